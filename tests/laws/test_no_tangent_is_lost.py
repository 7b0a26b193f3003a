"""Operators whose tangents torch's own forward mode drops, or gets wrong, without a word."""

import numpy as np
import pytest
import torch

from forall import jacfwd, jvp, linearize, vjp, vmap
from forall.testing import check_grad


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@torch.library.custom_op("forall_tests::squared", mutates_args=())
def squared(x: torch.Tensor) -> torch.Tensor:
    return x * x


@squared.register_fake
def _(x):
    return torch.empty_like(x)


squared.register_autograd(
    lambda ctx, g: 2 * ctx.saved_tensors[0] * g,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)

INDEX = torch.tensor([0, 2, 2, 1, 0])


def product(x, source):
    return x.scatter_reduce(0, INDEX, source, "prod")


def product_in_place(x, source):
    y = x * 1
    y.scatter_reduce_(0, INDEX, source, "prod")
    return y


def product_of_rows(x, source):
    return x.index_reduce(0, INDEX, source, "prod")


def triangle(b, a):
    return torch.triangular_solve(b, a)[0]


CASES = {
    "a custom operator": (squared, (5,)),
    "products scattered": (product, (4,), (5,)),
    "products scattered in place": (product_in_place, (4,), (5,)),
    "products of rows": (product_of_rows, (4,), (5,)),
    "a triangular system": (triangle, (3, 1), (3, 3)),
}

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*runs once per example"),
    pytest.mark.filterwarnings("ignore:torch.triangular_solve is deprecated"),
    pytest.mark.filterwarnings("ignore:index_reduce"),
    pytest.mark.filterwarnings("ignore:scatter_reduce"),
]


@pytest.mark.parametrize("name", CASES)
def test_tangents_are_slopes(name):
    torch.manual_seed(0)
    f, *shapes = CASES[name]
    check_grad(f, *(double(*s) for s in shapes), order=1)


@pytest.mark.parametrize("name", CASES)
def test_tangents_and_cotangents_agree_under_vmap_and_around_it(name):
    torch.manual_seed(0)
    f, *shapes = CASES[name]
    xs, ts = (tuple(double(3, *s) for s in shapes) for _ in range(2))
    y, inside = vmap(lambda xs, ts: jvp(f, xs, ts))(xs, ts)
    _, outside = jvp(vmap(f), xs, ts)
    c = torch.randn_like(y)
    pulled = vjp(vmap(f), *xs)[1](c)
    truth = sum((g * t).sum() for g, t in zip(pulled, ts, strict=True))
    torch.testing.assert_close((c * inside).sum(), truth)
    torch.testing.assert_close((c * outside).sum(), truth)


def test_products_of_rows_that_differ_between_the_examples():
    torch.manual_seed(0)
    x, source, t = double(4), double(3, 5), double(4)
    index = torch.stack([INDEX, INDEX.flip(0), INDEX.roll(1)])

    def f(x, index, source):
        return x.index_reduce(0, index, source, "prod")

    def mapped(x):
        return vmap(f, in_dims=(None, 0, 0))(x, index, source)

    _, found = jvp(mapped, (x,), (t,))
    c = torch.randn_like(found)
    torch.testing.assert_close((c * found).sum(), vjp(mapped, x)[1](c)[0] @ t)


IN_NUMPY = {
    "numpy": lambda x: torch.from_numpy(np.sin(x.numpy())),
    "asarray": lambda x: torch.tensor(np.asarray(x)),
}


@pytest.mark.parametrize("f", IN_NUMPY.values(), ids=IN_NUMPY)
def test_numpy_does_not_drop_it_without_a_word(f):
    x = torch.tensor([[0.5, 2.0], [1.0, -1.0]])
    for ours in (
        lambda: jvp(f, (x,), (x,)),
        lambda: jacfwd(f)(x),
        lambda: linearize(f, x),
        lambda: vmap(lambda x: jvp(f, (x,), (x,)))(x),
        lambda: jvp(vmap(f), (x,), (x,)),
        lambda: jvp(lambda w: vmap(lambda x: x * f(w))(x), (x[0],), (x[0],)),
    ):
        with pytest.raises(RuntimeError, match="would lose the tangent"):
            ours()
    for g in (f, vmap(f)):
        value, tangent = jvp(lambda x, g=g: g(x.detach()), (x,), (x,))
        torch.testing.assert_close(value, f(x))
        assert not tangent.any()
        with torch.no_grad():
            torch.testing.assert_close(g(x), f(x))
