"""Operators of torch.library: its vmap rules and its autograd formulas are honoured."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import forall
from forall import PerformanceWarning
from oracle import difference, loop

LIBRARY = torch.library.Library("laws_custom_op", "FRAGMENT")
RULES: list[tuple] = []


@torch.library.custom_op("laws_custom_op::scaled_square", mutates_args=())
def scaled_square(x: Tensor, by: float) -> Tensor:
    return x * x * by


@torch.library.custom_op("laws_custom_op::doubled_product", mutates_args=())
def doubled_product(x: Tensor, g: Tensor) -> Tensor:
    return 2 * x * g


scaled_square.register_autograd(
    lambda ctx, g: (doubled_product(ctx.saved_tensors[0], g) * ctx.by, None),
    setup_context=lambda ctx, inputs, output: (
        ctx.save_for_backward(inputs[0]),
        setattr(ctx, "by", inputs[1]),
    ),
)
doubled_product.register_autograd(
    lambda ctx, h: (2 * h * ctx.saved_tensors[1], 2 * h * ctx.saved_tensors[0]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@torch.library.custom_op("laws_custom_op::both", mutates_args=())
def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x + y, x * y


def _both(info, in_dims, x, y):
    RULES.append((info.batch_size, info.randomness, in_dims))
    x, y = (
        t.expand(info.batch_size, *t.shape) if d is None else t.movedim(d, 0)
        for t, d in zip((x, y), in_dims, strict=True)
    )
    return (x + y, x * y), (0, 0)


torch.library.register_vmap("laws_custom_op::both", _both)
both.register_autograd(
    lambda ctx, g, h: (g + h * ctx.saved_tensors[1], g + h * ctx.saved_tensors[0]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@torch.library.custom_op("laws_custom_op::no_formula", mutates_args=())
def no_formula(xs: list[Tensor]) -> Tensor:
    return torch.stack(xs).sum(0)


@torch.library.custom_op("laws_custom_op::grow", mutates_args={"x"})
def grow(x: Tensor, by: Tensor) -> None:
    x.add_(by)


LIBRARY.define("cube(Tensor x) -> Tensor")
LIBRARY.impl("cube", lambda x: x**3, "CPU")
LIBRARY.define("fourth(Tensor x) -> Tensor")
LIBRARY.impl("fourth", lambda x: x**4, "CompositeImplicitAutograd")

pytestmark = pytest.mark.filterwarnings("ignore::forall.PerformanceWarning")
X = torch.arange(12.0, dtype=torch.float64).reshape(3, 4) / 7
Y = (X + 1).cos()


def square(x: Tensor) -> Tensor:
    return scaled_square(x, 3.0)


def test_without_a_rule_it_loops_and_says_so():
    with pytest.warns(PerformanceWarning, match="scaled_square"):
        assert torch.equal(forall.vmap(square)(X), square(X))
    assert forall.vmap(square)(X[:0]).shape == (0, 4)


def test_lists_and_writes_in_place():
    assert torch.equal(forall.vmap(lambda x, y: no_formula([x, y]))(X, Y), X + Y)

    def grown(x, y):
        local = x.clone()
        grow(local, y)
        return local

    assert torch.equal(forall.vmap(grown)(X, Y), X + Y)
    assert torch.equal(forall.vmap(lambda y: grown(torch.zeros_like(X[0]), y))(Y), Y)


@pytest.mark.parametrize("in_dims", [(0, 0), (0, None), (None, 0), (1, 0), (0, 1)])
def test_torchs_vmap_rule_is_called_once(in_dims):
    given = [
        t if d == 0 else t[0] if d is None else t.mT for t, d in zip((X, Y), in_dims, strict=True)
    ]
    RULES.clear()
    found = forall.vmap(both, in_dims=in_dims, randomness="different")(*given)
    assert [r[:2] for r in RULES] == [(3, "different")]
    assert difference(found, loop(both, in_dims)(*given)) is None


def test_torchs_vmap_rule_in_two_levels():
    found = forall.vmap(forall.vmap(both, in_dims=(0, None)), in_dims=(None, 0))(X, Y)
    truth = [loop(both, (0, None))(X, y) for y in Y]
    assert difference(found, tuple(map(torch.stack, zip(*truth, strict=True)))) is None


def test_its_autograd_formula():
    def value(x):
        return square(x).sum()

    assert difference(forall.vmap(forall.grad(value))(X), 6 * X) is None
    assert (
        difference(forall.vmap(forall.hessian(value))(X), 6 * torch.eye(4).expand(3, 4, 4).double())
        is None
    )
    x = X.clone().requires_grad_()
    assert torch.autograd.gradcheck(forall.vmap(square), x)
    assert torch.autograd.gradgradcheck(forall.vmap(square), x)
    pair = forall.vmap(forall.jacrev(both, argnums=(0, 1)))(X, Y)
    eye = torch.eye(4).expand(3, 4, 4).double()
    assert difference(pair, ((eye, eye), (torch.diag_embed(Y), torch.diag_embed(X)))) is None


def test_forward_mode_comes_from_the_autograd_formula():
    """Torch's own forward mode answers with no tangent, which would be a zero."""
    assert difference(forall.jvp(square, (X,), (Y,)), (3 * X * X, 6 * X * Y)) is None
    assert difference(forall.linearize(square, X)[1](Y), 6 * X * Y) is None
    assert difference(forall.vmap(forall.jacfwd(square))(X), torch.diag_embed(6 * X)) is None
    assert difference(forall.jvp(forall.vmap(square), (X,), (Y,))[1], 6 * X * Y) is None
    twice = forall.jvp(lambda x: forall.jvp(square, (x,), (Y,))[1], (X,), (Y,))[1]
    assert difference(twice, 6 * Y * Y) is None
    sums = forall.jvp(both, (X, Y), (Y, X))[1]
    assert difference(sums, (X + Y, X * X + Y * Y)) is None


@torch.library.custom_op("laws_custom_op::products", mutates_args=())
def products(xs: list[Tensor], *, by: float) -> list[Tensor]:
    return [xs[0] * xs[1] * by, xs[1] * xs[1] * by]


products.register_autograd(
    lambda ctx, g: [(g[0] * ctx.x[1]) * ctx.by, (g[0] * ctx.x[0] + 2 * g[1] * ctx.x[1]) * ctx.by],
    setup_context=lambda ctx, inputs, keyword_only_inputs, output: (
        setattr(ctx, "x", inputs[0]),
        setattr(ctx, "by", keyword_only_inputs["by"]),
    ),
)


def test_the_formula_of_lists_and_of_arguments_by_name():
    def value(x, y):
        return sum(p.sum() for p in products([x, y], by=3.0))

    def same(x, y):
        return (3 * x * y + 3 * y * y).sum()

    for way in (forall.grad, forall.hessian, forall.jacfwd):
        pair = (forall.vmap(way(f, argnums=(0, 1)))(X, Y) for f in (value, same))
        assert difference(*pair) is None
    pushes = (forall.jvp(forall.grad(f, argnums=(0, 1)), (X, Y), (Y, X)) for f in (value, same))
    assert difference(*pushes) is None


def test_without_a_formula_a_derivative_is_an_error():
    for derivative in (forall.grad, forall.jacfwd):
        with pytest.raises(RuntimeError, match="no autograd formula was registered"):
            derivative(lambda x: no_formula([x]).sum())(X)


def test_operators_of_a_library_without_custom_op():
    cube, fourth = torch.ops.laws_custom_op.cube, torch.ops.laws_custom_op.fourth
    assert difference(forall.vmap(cube)(X), X**3) is None
    assert difference(forall.vmap(forall.grad(lambda x: fourth(x).sum()))(X), 4 * X**3) is None
    assert difference(forall.jvp(fourth, (X,), (Y,))[1], 4 * X**3 * Y) is None
    torch.library.register_autograd(
        "laws_custom_op::cube",
        lambda ctx, g: 3 * ctx.saved_tensors[0] ** 2 * g,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
        lib=LIBRARY,
    )
    assert difference(forall.vmap(forall.grad(lambda x: cube(x).sum()))(X), 3 * X**2) is None
    assert difference(forall.vmap(forall.jacfwd(cube))(X), torch.diag_embed(3 * X**2)) is None
