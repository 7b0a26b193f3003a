"""The laws for users: they pass on what is right and name what is wrong."""

import pytest
import torch

from forall.testing import check_grad, check_vmap

X = torch.rand(2, 3, dtype=torch.float64) + 0.5


class Wrong(torch.autograd.Function):
    """Squares, with a derivative that is off by a factor."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):  # pyright: ignore[reportIncompatibleMethodOverride]
        return g * ctx.saved_tensors[0]


class WrongTwice(torch.autograd.Function):
    """A first derivative that is right, and constant to whoever derives it again."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):  # pyright: ignore[reportIncompatibleMethodOverride]
        return g * 2 * ctx.saved_tensors[0].detach()


def test_check_vmap_passes_where_vmap_is_the_loop():
    check_vmap(torch.dot, X, X.sum(0), in_dims=(0, None))
    check_vmap(lambda x: {"s": x.sum(), "x": x, "n": 3}, X, in_dims=1, out_dims=-1, chunk_size=2)
    check_vmap(lambda d: d["x"].mul_(2), {"x": X}, in_dims=1)


def test_check_vmap_names_what_differs():
    calls = []

    def counts(x):
        calls.append(0)
        return x * len(calls)

    with pytest.raises(AssertionError, match=r"check_vmap\(counts, in_dims=0\): result 0 is off"):
        check_vmap(counts, X)


def test_check_vmap_needs_an_example():
    with pytest.raises(ValueError, match="there is no example"):
        check_vmap(torch.sin, X[:0])


def test_check_grad_passes_on_what_torch_differentiates():
    check_grad(lambda x, y: {"a": (x * y).sin(), "b": x.log().sum(0)}, X, X.flip(0), order=3)


def test_check_grad_finds_a_wrong_first_derivative():
    with pytest.raises(AssertionError, match=r"check_grad\(<lambda>\): result 0 is off"):
        check_grad(lambda x: Wrong.apply(x), X, order=1)


def test_check_grad_finds_a_wrong_second_derivative():
    check_grad(lambda x: WrongTwice.apply(x), X, order=1)
    with pytest.raises(AssertionError):
        check_grad(lambda x: WrongTwice.apply(x), X, order=2)


def test_check_grad_wants_float64():
    with pytest.raises(ValueError, match="must be float64"):
        check_grad(torch.sin, X.float())
