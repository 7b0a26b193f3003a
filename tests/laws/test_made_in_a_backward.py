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


def _row(x, i):
    return x[i]


def _rows(x, i):
    return x.narrow(0, i, 2)


def _write(x, i):
    y = x.sin()
    y[i] = x[0] * 2
    return y


INDEXING = {"x[i]": _row, "x.narrow(0, i, 2)": _rows, "y[i] = ..": _write}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize("name", INDEXING)
def test_indexing_by_each_examples_number_is_recomputed(name, levels, reentrant):
    def f(x, i):
        return (INDEXING[name](x.sin(), i) * x.cos()[:1]).sum()

    def gradient(run):
        x = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(2, 3, 4).requires_grad_()
        i = torch.tensor([[0, 1, 2], [2, 0, 1]])
        run(x, i).sum().backward()
        return x.grad

    mapped = lambda x, i: checkpoint(f, x, i, use_reentrant=reentrant)  # noqa: E731
    for _ in range(levels):
        mapped = forall.vmap(mapped)
    found = gradient(mapped if levels == 2 else lambda x, i: mapped(x.flatten(0, 1), i.flatten()))
    truth = gradient(
        lambda x, i: torch.stack(
            [f(*pair) for pair in zip(x.flatten(0, 1), i.flatten(), strict=True)]
        )
    )
    assert difference(found, truth) is None


def test_a_number_read_in_a_recomputation_after_the_call_is_a_clear_error():
    f = lambda x: checkpoint(lambda x: x * x.item(), x, use_reentrant=False)  # noqa: E731
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    with pytest.raises(RuntimeError, match="asks for a value that differs between the examples"):
        forall.vmap(f)(x).sum().backward()
    # The pass through the checkpoint inside the call has the number.
    found = forall.vmap(forall.grad(f))(x.detach())
    assert torch.equal(found, x.detach())
