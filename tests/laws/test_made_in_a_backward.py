"""What code of the user's makes in a backward pass after the call takes what differs."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import forall
from oracle import difference


class Square(torch.autograd.Function):
    """Its backward fills buffers of its own, by copy, by out= and in place."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        twice = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        torch.mul(x, 2, out=twice)
        found = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        found += twice
        into = torch.zeros_like(torch.ones(x.shape, dtype=x.dtype, device=x.device))
        into.copy_(found * g)
        return into


def filled(x):
    buffer = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    buffer.copy_(x)
    return buffer * x


FUNCTIONS = {
    "a Function": Square.apply,
    "a checkpoint": lambda x: checkpoint(filled, x, use_reentrant=False),
    "a reentrant checkpoint": lambda x: checkpoint(filled, x, use_reentrant=True),
}


@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_buffer_of_its_own(name, levels):
    x = torch.randn(3, 2, 4, dtype=torch.float64).requires_grad_()
    f = FUNCTIONS[name]
    for _ in range(levels):
        f = forall.vmap(f)
    f(x).backward(torch.ones_like(x))
    assert difference(x.grad, 2 * x.detach()) is None
