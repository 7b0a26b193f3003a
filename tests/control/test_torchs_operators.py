"""torch.cond and torch's while_loop, scan, map and associative_scan inside our transforms."""

import pytest
import torch
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch._higher_order_ops import map as map_

from forall import grad, hessian, jacfwd, jvp, vmap
from oracle import difference

D = torch.float64
X = torch.tensor([[0.3, -0.4, 0.9], [0.1, 1.2, -0.8]], dtype=D)


def by_cond(x):
    return torch.cond(torch.tensor(True), lambda x, y: (x.sin() * y).sum(), lambda x, y: y, (x, x))


def by_while(x):
    def body(i, x):
        return [i + 1, x.sin() * x]

    return while_loop(lambda i, x: i < 3, body, (torch.tensor(0), x))[1].sum()


def by_scan(x):
    last, ys = scan(lambda c, x: (c * x.sum(), x.sin() * c), x.sum(), x[:, None] * x, dim=1)
    return last + (ys * torch.arange(3.0, dtype=D)).sum()


def by_scan_reversed(x):
    last, ys = scan(lambda c, x: (c * x, c + x), x.sum(), x, reverse=True)
    return last + (ys * torch.arange(3.0, dtype=D)).sum()


def by_map(x):
    return map_(lambda x, y: (x["a"] * y).sin(), {"a": x}, x.sum()).sum()


def by_associative_scan(x):
    products = associative_scan(lambda a, b: a * b, x[None] + 1, 1, combine_mode="generic")
    return (products * torch.arange(3.0, dtype=D)).sum()


PLAIN = {
    by_cond: lambda x: (x.sin() * x).sum(),
    by_while: lambda x: three_times(x).sum(),
    by_scan: lambda x: scanned(x),
    by_scan_reversed: lambda x: scanned_back(x),
    by_map: lambda x: (x * x.sum()).sin().sum(),
    by_associative_scan: lambda x: ((x + 1).cumprod(0) * torch.arange(3.0, dtype=D)).sum(),
}


def three_times(x):
    for _ in range(3):
        x = x.sin() * x
    return x


def scanned(x):
    c, ys = x.sum(), []
    for column in (x[:, None] * x).unbind(1):
        ys.append(column.sin() * c)
        c = c * column.sum()
    return c + (torch.stack(ys, 1) * torch.arange(3.0, dtype=D)).sum()


def scanned_back(x):
    c, total = x.sum(), 0.0
    for i in (2, 1, 0):
        total = total + (c + x[i]) * i
        c = c * x[i]
    return c + total


TRANSFORMS = {
    "vmap": lambda f: vmap(f)(X),
    "grad": lambda f: grad(f)(X[0]),
    "jvp": lambda f: jvp(f, (X[0],), (X[1],)),
    "hessian": lambda f: hessian(f)(X[0]),
    "vmap of grad": lambda f: vmap(grad(f))(X),
    "grad of vmap": lambda f: grad(lambda x: vmap(f)(x).sum())(X),
    "vmap of jacfwd of grad": lambda f: vmap(jacfwd(grad(f)))(X),
}


@pytest.mark.parametrize("verb", TRANSFORMS)
@pytest.mark.parametrize("f", PLAIN, ids=lambda f: f.__name__)
def test_inside_our_transforms_they_mean_what_ours_do(f, verb):
    found = difference(TRANSFORMS[verb](f), TRANSFORMS[verb](PLAIN[f]))
    assert found is None, found


def test_the_default_way_of_an_associative_scan():
    f = lambda x: associative_scan(torch.mul, x, 0, reverse=True)  # noqa: E731
    assert difference(vmap(f)(X), X.flip(1).cumprod(1).flip(1)) is None


def test_a_scan_of_nothing_is_torchs():
    assert grad(lambda x: scan(lambda c, x: (c, x), x, [])[0])(X[0, 0]) == 1


def test_outside_they_are_torchs():
    with pytest.raises(RuntimeError, match="pred"):
        torch.cond("no", torch.sin, torch.cos, (X,))
    assert torch.equal(torch.cond(True, torch.sin, torch.cos, (X,)), X.sin())
    assert torch.cond.__name__ == "cond"
    assert "operands" in (torch.cond.__doc__ or "")


@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_where_dynamo_traces_they_are_torchs():
    def f(x):
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))

    compiled = torch.compile(f, backend="eager", fullgraph=True)
    for x in X:
        assert torch.equal(compiled(x), f_plain(x))


def f_plain(x):
    return x.sin() if x.sum() > 0 else x.cos()
