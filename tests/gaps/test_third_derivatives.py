"""What goes wrong in third derivatives."""

import pytest
import torch

from forall import hessian, jvp, vmap

D = torch.float64


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return a**3

    @staticmethod
    def backward(ctx, g):
        return 3 * ctx.saved_tensors[0] ** 2 * g


@pytest.mark.xfail(
    strict=True, reason="a Function's values get an axis of each map that they are taken through"
)
def test_the_tangents_of_mapped_hessians_of_a_function():
    xs = torch.linspace(-1, 2, 6, dtype=D).reshape(3, 2)
    expected = jvp(vmap(hessian(lambda x: x**3)), (xs,), (xs.cos(),))[1]
    torch.testing.assert_close(jvp(vmap(hessian(Cube.apply)), (xs,), (xs.cos(),))[1], expected)
