"""The dtype that the gradient of a leaf gets belongs to the tensor itself, captured or not."""

import pytest
import torch

from forall import grad, jvp, vmap
from oracle import same

pytestmark = pytest.mark.skipif(
    not hasattr(torch.Tensor, "grad_dtype"), reason="this release of torch has no grad_dtype"
)
X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


@pytest.fixture
def w():
    return torch.nn.Parameter(torch.ones(2))


def test_it_is_read_of_a_captured_parameter(w):
    def f(x):
        return x * (2 if w.grad_dtype is torch.float32 else 3)

    assert same(vmap(f)(X), 2 * X)
    assert same(vmap(grad(lambda x: f(x).sum()))(X), torch.full_like(X, 2))
    assert same(vmap(lambda x: jvp(f, (x,), (x,))[1])(X), 2 * X)


def test_it_is_written_to_a_captured_parameter(w):
    def f(x):
        w.grad_dtype = torch.float64
        return x * (2 if w.grad_dtype is torch.float64 else 3)

    assert same(vmap(f)(X), 2 * X)
    assert w.grad_dtype is torch.float64


def test_it_is_read_of_a_leaf_of_each_example():
    def f(x):
        y = x.detach().clone().requires_grad_()
        return x * (2 if y.grad_dtype is torch.float32 else 3)

    assert same(vmap(f)(X), 2 * X)
