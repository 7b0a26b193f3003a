"""A backward that reads numbers: what it makes of them is for the examples that it was asked for.

An array of numpy's becomes a tensor that no mode sees, so nothing tells whose gradient it is.
"""

import numpy as np
import pytest
import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from forall import grad, vmap
from oracle import difference, loop


class Squared(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.from_numpy(np.square(x.numpy()))

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return torch.from_numpy(2 * g.numpy() * x.numpy())


class Copied(Squared):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.tensor(np.square(x.numpy()))

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return torch.tensor(2 * g.numpy() * x.numpy())


D = torch.float64
X = torch.tensor([[1.0, 2.0], [-3.0, 4.0], [5.0, 6.0], [1.5, 2.0]], dtype=D)
W = torch.tensor([0.5, -2.0], dtype=D)
G = torch.tensor([[1.0, 10.0], [100.0, 1000.0], [0.1, 0.01], [3.0, 30.0]], dtype=D)

FUNCTIONS = {
    "of an argument": lambda f, x, w: f(x),
    "of what is computed": lambda f, x, w: f(x * w) + x,
    "beside a captured tensor": lambda f, x, w: f(x) * w,
    "in one of two branches": lambda f, x, w: f(x * w) if x.sum() > 0 else x * w,
    "one after another": lambda f, x, w: f(f(x) * w),
}


@pytest.mark.parametrize("f", [Squared.apply, Copied.apply], ids=["from_numpy", "tensor"])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("size", [1, 4])
def test_gradients(f, name, size):
    def weighted(api, x, w):
        return (api(lambda x: FUNCTIONS[name](f, x, w))(x) * G[:size]).sum()

    def one(x, w, g):
        return (FUNCTIONS[name](f, x, w) * g).sum()

    def plain(x, w, g):
        x, w = (t.detach().clone().requires_grad_() for t in (x, w))
        return torch.autograd.grad(one(x, w, g), (x, w), materialize_grads=True)

    each = loop(plain, (0, None, 0))(X[:size], W, G[:size])
    truth = each[0], each[1].sum(0)
    leaves = [X[:size].clone().requires_grad_(), W.clone().requires_grad_()]
    mine = torch.autograd.grad(weighted(vmap, *leaves), leaves, materialize_grads=True)
    assert difference(mine, truth) is None
    mine = grad(lambda x, w: weighted(vmap, x, w), argnums=(0, 1))(X[:size], W)
    assert difference(mine, truth) is None
    inside = vmap(grad(one, argnums=(0, 1)), (0, None, 0))(X[:size], W, G[:size])
    assert difference(inside, each) is None
