"""A custom Function under forward mode, vmap and a derivative inside it, against the loop."""

import pytest
import torch
from torch import Tensor

from forall import grad, jacfwd, jvp, linearize, vmap

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
    "an output without a derivative": lambda x: WithFlags.apply(x)[1],
    "an output that is not used": lambda x: Both.apply(x)[1],
}
INSIDE = {
    "jvp": lambda f: lambda x: jvp(f, (x,), (x.cos(),))[1],
    "jacfwd": jacfwd,
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
