"""A custom Function under forward mode, vmap and a derivative inside it, against the loop."""

import pytest
import torch
from torch import Tensor

from forall import grad, jacfwd, jacrev, jvp, linearize, vjp, vmap
from laws.nesting import Cube

XS = torch.linspace(-2, 3, 8, dtype=torch.float64).reshape(4, 2)
TS = XS.cos()


class WithFlags(torch.autograd.Function):
    """The second output's cotangent alone is of use; of the first there is none."""

    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        flags = a > 0
        ctx.mark_non_differentiable(flags)
        return flags, a**3

    @staticmethod
    def backward(ctx, _, g):
        return 3 * ctx.saved_tensors[0] ** 2 * g


class Both(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return a.sin(), a**3

    @staticmethod
    def backward(ctx, g, h):
        (a,) = ctx.saved_tensors
        return a.cos() * g + 3 * a**2 * h


FUNCTIONS = {
    "one output": Cube.apply,
    "an output without a derivative": lambda x: WithFlags.apply(x)[1],
    "an output that is not used": lambda x: Both.apply(x)[1],
}
INSIDE = {
    "jvp": lambda f: lambda x: jvp(f, (x,), (x.cos(),))[1],
    "jacfwd": jacfwd,
    "jacrev": jacrev,
    "grad": lambda f: grad(lambda x: f(x).sum()),
}


def along(f, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    return jvp(f, (x,), (t,))


def linear(f, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    y, push = linearize(f, x)
    return y, push(t)


@pytest.mark.parametrize("outside", [along, linear])
@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_tangents_of_mapped_derivatives(name, inside, outside):
    derivative = INSIDE[inside](FUNCTIONS[name])
    loop = [INSIDE[inside](lambda x: x**3)(x) for x in XS]
    tangents = [
        jvp(INSIDE[inside](lambda x: x**3), (x,), (t,))[1] for x, t in zip(XS, TS, strict=True)
    ]
    y, t = outside(vmap(derivative), XS, TS)
    torch.testing.assert_close(y, torch.stack(loop))
    torch.testing.assert_close(t, torch.stack(tangents))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_all_columns_of_mapped_tangents(name):
    def tangents(f):
        return vmap(lambda x: jvp(f, (x,), (x.cos(),))[1])

    expected = jacfwd(tangents(lambda x: x**3))(XS)
    torch.testing.assert_close(jacfwd(tangents(FUNCTIONS[name]))(XS), expected)


W = torch.linspace(-1, 1, 4, dtype=torch.float64).reshape(2, 2)
AROUND = {
    "before": lambda cube: lambda x: cube(x).sin(),
    "behind": lambda cube: lambda x: cube(x.sin()),
    "twice": lambda cube: lambda x: cube(cube(x).cos()),
    "in two places": lambda cube: lambda x: cube(x) + cube(2 * x) * x,
    "with a captured matrix": lambda cube: lambda x: W @ cube(W @ x) * x,
    "mapped": lambda cube: lambda x: vmap(lambda row: cube(row * x))(W),
    "in a map that shares": lambda cube: lambda x: vmap(lambda row: cube(x) * row)(W),
}
OUTSIDE = {
    "jvp": lambda f: jvp(f, (XS,), (TS,))[1],
    "linearize": lambda f: linearize(f, XS)[1](TS),
    "jacfwd": lambda f: jacfwd(f)(XS),
    "two maps": lambda f: jvp(vmap(f), (XS[None],), (TS[None],))[1],
    "in a map": lambda f: vmap(lambda x, t: jvp(f, (x,), (t,))[1])(XS[None], TS[None]),
    "twice": lambda f: jvp(lambda x: jvp(f, (x,), (TS,))[1], (XS,), (TS,))[1],
    "in reverse": lambda f: grad(lambda x: jvp(f, (x,), (TS,))[1].sin().sum())(XS),
}


@pytest.mark.parametrize("outside", OUTSIDE)
@pytest.mark.parametrize("around", AROUND)
def test_the_rows_of_a_jacobian_cross_the_maps_border(around, outside):
    found = OUTSIDE[outside](vmap(jacrev(AROUND[around](Cube.apply))))
    expected = OUTSIDE[outside](vmap(jacrev(AROUND[around](lambda x: x**3))))
    torch.testing.assert_close(found, expected)


def test_pull_backs_that_are_called_under_a_map_of_their_own():
    def rows(f):
        return lambda x: vmap(vjp(f, x)[1])(W)[0]

    f, g = (AROUND["in two places"](cube) for cube in (Cube.apply, lambda x: x**3))
    expected = torch.stack([jvp(rows(g), (x,), (t,))[1] for x, t in zip(XS, TS, strict=True)])
    torch.testing.assert_close(jvp(vmap(rows(f)), (XS,), (TS,))[1], expected)
