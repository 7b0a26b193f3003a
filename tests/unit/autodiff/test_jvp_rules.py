"""Forward-mode rules of forall's own, by which primal and tangent of wrapped values stay apart."""

import itertools
import operator
from typing import Any

import pytest
import torch

from draws import make_generator
from forall import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from forall._autodiff.decompositions.backwards import BACKWARD
from forall._autodiff.jvp_fixes import FILLED, SUSPECT_OPS
from forall._autodiff.jvp_rules import JVP_RULES
from forall._compat.op_schema import get_facts

BINARY = {
    "add": operator.add,
    "add alpha": lambda x, y: torch.add(x, y, alpha=0.3),
    "sub": operator.sub,
    "sub alpha": lambda x, y: torch.sub(x, y, alpha=0.3),
    "mul": operator.mul,
    "div": operator.truediv,
    "maximum": torch.maximum,
}
PRODUCTS = {
    "mm": (torch.mm, (2, 3), (3, 4)),
    "bmm": (torch.bmm, (2, 2, 3), (2, 3, 4)),
    "mv": (torch.mv, (2, 3), (3,)),
}
UNARY = {
    "view": lambda x: x.view(6),
    "expand": lambda x: x.expand(2, 2, 3),
    "permute": lambda x: x.permute(1, 0),
    "slice": lambda x: x[:, 1:],
    "select": lambda x: x[1],
    "diagonal": lambda x: x.diagonal(),
    "squeeze": lambda x: x[:1].squeeze(),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "t": lambda x: x.t(),
    "clone": lambda x: x.clone(),
    "neg": operator.neg,
    "times a number": lambda x: torch.ops.aten.mul.Scalar(x, 0.3),
    "over a number": lambda x: torch.ops.aten.div.Scalar(x, 0.3),
    "plus a number": lambda x: torch.ops.aten.add.Scalar(x, 2, 0.3),
    "less a number": lambda x: torch.ops.aten.sub.Scalar(x, 2, 0.3),
    "sum": lambda x: x.sum(),
    "sum of rows": lambda x: x.sum(1, keepdim=True),
    "mean": lambda x: x.mean(),
    "mean of rows": lambda x: x.mean(0),
    "masked_fill": lambda x: x.masked_fill(x > 5, 2.0),
    "where": lambda x: torch.where(x > 5, x, x * x),
    "where left": lambda x: torch.where(x > 5, x, torch.ones(4, 1, 1, dtype=x.dtype)),
    "where right": lambda x: torch.where(x > 5, torch.zeros_like(x), x),
    "cat": lambda x: torch.cat([x, x * x]),
    "cat with a constant": lambda x: torch.cat([torch.zeros_like(x), x], 1),
    "abs": lambda x: (x - 5).abs() * x,
    "cos": torch.cos,
    "exp": lambda x: (x / 10).exp(),
    "expm1": lambda x: (x / 10).expm1(),
    "log": torch.log,
    "log1p": torch.log1p,
    "reciprocal": torch.reciprocal,
    "rsqrt": torch.rsqrt,
    "sigmoid": lambda x: (x / 5).sigmoid(),
    "sin": torch.sin,
    "sqrt": torch.sqrt,
    "tanh": lambda x: (x / 5).tanh(),
    **{f"power {n}": lambda x, n=n: x.pow(n) for n in (0, 1, 2, 3, -2, 0.5, 2.5)},
    "detached": lambda x: x * x.detach(),
    "compared": lambda x: x * (x > 5) * (x.ne(2)),
    "like": lambda x: x * torch.ones_like(x) + torch.zeros_like(x),
}


def draw(shape: Any, dtype: Any = torch.float64, seed: int = 0) -> torch.Tensor:
    found = torch.randn(shape, dtype=torch.float64, generator=make_generator(seed))
    return (found + 5).to(dtype)


def get_bits(t: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(t) if t.is_complex() else t


def compute_by_torch(f: Any, xs: tuple, ts: tuple) -> list[torch.Tensor]:
    """Return values and tangents by torch's own forward mode, for one example after another."""
    rows = []
    for row in zip(*xs, *ts, strict=True):
        with torch.autograd.forward_ad.dual_level():
            pairs = zip(row[: len(xs)], row[len(xs) :], strict=True)
            y = f(*(torch.autograd.forward_ad.make_dual(x, t) for x, t in pairs))
            y, tangent = torch.autograd.forward_ad.unpack_dual(y)
            rows.append((y, torch.zeros_like(y) if tangent is None else tangent))
    return [torch.stack([*column]) for column in zip(*rows, strict=True)]


def compute_by_vmap(f: Any, xs: tuple, ts: tuple) -> Any:
    n = len(xs)
    return vmap(lambda *both: jvp(f, both[:n], both[n:]))(*xs, *ts)


def check_bits(found: Any, wanted: Any) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert torch.equal(get_bits(a), get_bits(b))


def test_no_rule_is_for_an_operator_that_needs_another_way():
    assert JVP_RULES.keys().isdisjoint({*SUSPECT_OPS, *BACKWARD, *FILLED})
    for func in JVP_RULES:
        assert not get_facts(func).writes
        assert not get_facts(func).has_effect


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float64),
        (torch.bfloat16, torch.float32),
        (torch.complex128, torch.float64),
        (torch.complex64, torch.complex128),
    ],
    ids=lambda d: f"{d[0]}, {d[1]}".replace("torch.", ""),
)
def test_both_operands_move(name, dtypes):
    if name == "maximum" and any(d.is_complex for d in dtypes):
        pytest.skip("complex numbers have no order")
    for shapes in [((3,), (3,)), ((2, 3), (3,)), ((), (3,)), ((3,), ()), ((), ()), ((0,), ())]:
        xs = tuple(draw((4, *s), d, i) for i, (s, d) in enumerate(zip(shapes, dtypes, strict=True)))
        ts = tuple(
            draw((4, *s), d, 2 + i) for i, (s, d) in enumerate(zip(shapes, dtypes, strict=True))
        )
        found, wanted = (c(BINARY[name], xs, ts) for c in (compute_by_vmap, compute_by_torch))
        check_bits(found, wanted)


@pytest.mark.parametrize("name", PRODUCTS)
def test_both_factors_move(name):
    op, *shapes = PRODUCTS[name]
    xs, ts = (tuple(draw((4, *s), seed=2 * k + i) for i, s in enumerate(shapes)) for k in (0, 1))
    found, wanted = compute_by_vmap(op, xs, ts), compute_by_torch(op, xs, ts)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", UNARY)
def test_values_and_tangents_are_torchs(name):
    for dtype in (torch.float64, torch.float32):
        xs, ts = (draw((4, 2, 3), dtype),), (draw((4, 2, 3), dtype, 1),)
        found = compute_by_vmap(lambda x: UNARY[name](x * 1.5), xs, ts)
        wanted = compute_by_torch(lambda x: UNARY[name](x * 1.5), xs, ts)
        for a, b in zip(found, wanted, strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", UNARY)
def test_second_derivatives(name):
    w = draw((2, 3), seed=3).requires_grad_()

    def f(x):
        return (UNARY[name](x * w + x) * 0.1).sin().sum()

    xs = draw((3, 2, 3)) / 5
    loop = torch.stack([jacrev(jacrev(f))(x) for x in xs])
    for second in (hessian(f), jacfwd(jacfwd(f)), jacrev(jacfwd(f))):
        torch.testing.assert_close(vmap(second)(xs), loop)
    if loop.requires_grad:
        found, wanted = (torch.autograd.grad(h.sum(), w)[0] for h in (vmap(hessian(f))(xs), loop))
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("name", BINARY)
def test_second_derivatives_of_two(name):
    w = draw((3,), seed=3).requires_grad_()

    def f(x):
        return (BINARY[name](x * w, (x * x)[:1]) * 0.1).sin().sum()

    xs = draw((3, 3)) / 5
    loop = torch.stack([jacrev(jacrev(f))(x) for x in xs])
    for second in (hessian(f), jacfwd(jacfwd(f)), jacrev(jacfwd(f))):
        torch.testing.assert_close(vmap(second)(xs), loop)
    found, wanted = (torch.autograd.grad(h.sum(), w)[0] for h in (vmap(hessian(f))(xs), loop))
    torch.testing.assert_close(found, wanted)


VIEWS = ("view", "permute", "slice", "select", "diagonal", "squeeze", "unsqueeze", "t")
WRITES = {
    "times itself": lambda y: y.mul_(y.clone()),
    "a number": lambda y: y.fill_(2.0),
    "plus a constant": lambda y: y.add_(1.0),
    "sine": lambda y: y.sin_(),
    "copied": lambda y: y.copy_(y.clone().cos()),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("into", ["base", "view", "view of the base", "both"])
def test_writes_reach_base_and_views(write, name, into):
    def f(x):
        y = x * x
        view = UNARY[name](y)
        other = y[0]
        again = y[..., :1]
        targets = {"base": [y], "view": [view], "view of the base": [again], "both": [view, y]}
        for target in targets[into]:
            WRITES[write](target)
        return torch.cat([t.reshape(-1) for t in (y, view, other, again)])

    xs, ts = (draw((3, 2, 3)) / 5,), (draw((3, 2, 3), seed=1),)
    check = zip(compute_by_vmap(f, xs, ts), compute_by_torch(f, xs, ts), strict=True)
    for found, wanted in check:
        torch.testing.assert_close(found, wanted)
    loop = torch.stack([jacrev(jacrev(lambda x: f(x).sum()))(x) for x in xs[0]])
    torch.testing.assert_close(vmap(hessian(lambda x: f(x).sum()))(xs[0]), loop)
    torch.testing.assert_close(vmap(jacrev(jacfwd(lambda x: f(x).sum())))(xs[0]), loop)


@pytest.mark.parametrize("write", WRITES)
def test_a_write_into_an_input_reaches_its_views(write):
    def f(x):
        x = x.clone()
        view, square = x[1:], x * x
        WRITES[write](x)
        return view * 2, square, x

    xs, ts = draw((3, 4)) / 5, draw((3, 4), seed=1)
    found = vmap(lambda x, t: jvp(f, (x,), (t,)))(xs, ts)
    rows = [jvp(f, (x,), (t,)) for x, t in zip(xs, ts, strict=True)]
    for k, i in itertools.product(range(2), range(3)):
        torch.testing.assert_close(found[k][i], torch.stack([row[k][i] for row in rows]))


def test_results_that_share_memory():
    def f(x):
        y = x * x
        return y, y, y[1:]

    xs = draw((3, 4))
    values, tangents = vmap(lambda x: jvp(f, (x,), (x,)))(xs)
    for found, wanted in zip(values, (xs**2, xs**2, xs[:, 1:] ** 2), strict=True):
        torch.testing.assert_close(found, wanted)
    for found, wanted in zip(tangents, (xs**2, xs**2, xs[:, 1:] ** 2), strict=True):
        torch.testing.assert_close(found, 2 * wanted)


def test_a_value_that_escapes_is_its_primal():
    kept = []

    def f(x):
        kept.append(x * x)
        return x.sum()

    def g(x):
        jvp(f, (x,), (x,))
        return kept.pop() * 2

    xs = draw((3, 4))
    torch.testing.assert_close(vmap(g)(xs), 2 * xs * xs)
    torch.testing.assert_close(vmap(lambda x: jvp(g, (x,), (x,))[1])(xs), 4 * xs * xs)


def test_a_value_that_escapes_has_no_tangent_of_a_later_call():
    kept = []

    def f(x):
        kept.append(x * x)
        return x.sum()

    def g(x):
        return x.sum() + kept[-1].sum()

    def both(x):
        jvp(f, (x,), (x,))
        return jvp(g, (x,), (x,))[1]

    xs = draw((3, 4))
    torch.testing.assert_close(vmap(both)(xs), xs.sum(1))


def test_pull_backs_inside_forward_mode():
    w = draw((3,), seed=3)

    def f(x):
        y, pull = vjp(lambda x: (x * x * w).view(3, 1).neg().sum(1), x)
        return pull(y * x)[0]

    xs, ts = draw((4, 3)), draw((4, 3), seed=1)
    loop = [jacrev(f)(x) @ t for x, t in zip(xs, ts, strict=True)]
    torch.testing.assert_close(vmap(lambda x, t: jvp(f, (x,), (t,))[1])(xs, ts), torch.stack(loop))


def test_gradients_of_a_captured_tensor_inside():
    w = draw((3,), seed=3).requires_grad_()

    def f(x):
        (found,) = torch.autograd.grad((x * w * w * x).sum(), w, create_graph=True)
        return found

    xs, ts = draw((4, 3)), draw((4, 3), seed=1)
    found = torch.stack([jvp(f, (x,), (t,))[1] for x, t in zip(xs, ts, strict=True)])
    torch.testing.assert_close(found, 4 * xs * ts * w)


def test_third_derivatives():
    def f(x):
        y = (x * x / (x + 2)).view(3, 1)
        return (y.exp() * y.t()).sum().log()

    xs = draw((2, 3)) / 5
    loop = torch.stack([jacrev(jacrev(jacrev(f)))(x) for x in xs])
    torch.testing.assert_close(vmap(jacfwd(jacfwd(jacfwd(f))))(xs), loop)
    torch.testing.assert_close(vmap(jacfwd(hessian(f)))(xs), loop)
    torch.testing.assert_close(vmap(jacfwd(jacrev(jacfwd(f))))(xs), loop)
    torch.testing.assert_close(vmap(lambda x: jacfwd(grad(f))(x))(xs), vmap(hessian(f))(xs))


@pytest.mark.parametrize("in_dims", [(1, 1), (1, 0), (0, 1)])
def test_views_by_strides(in_dims):
    def f(x):
        y = (x * x).neg()
        head = y[:1]
        view = torch.as_strided(y, (2, 2), (1, 1))
        y.mul_(3.0)
        return head * 2, view, y.contiguous().view(2, 2)

    xs, ts = draw((4, 3))[:, :, None] / 5, draw((4, 3), seed=1)[:, :, None]
    xs, ts = (a.expand(4, 3, 2)[:, :2].reshape(4, 4) for a in (xs, ts))
    rows = [jvp(f, (x,), (t,)) for x, t in zip(xs, ts, strict=True)]
    moved = [a.movedim(0, d).contiguous() for a, d in zip((xs, ts), in_dims, strict=True)]
    found = vmap(lambda x, t: jvp(f, (x,), (t,)), in_dims=in_dims)(*moved)
    for k, i in itertools.product(range(2), range(3)):
        torch.testing.assert_close(found[k][i], torch.stack([row[k][i] for row in rows]))
