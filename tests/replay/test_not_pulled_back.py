"""Calls whose results require grad, of what torch cannot differentiate once more."""

import torch
from torch.nn import functional as F

import forall
from forall._api.execution.transform_decorator import describe_replay
from oracle import same


def test_a_call_that_cannot_be_pulled_back_tells_why(at_once):
    weight = torch.randn(4, 4, requires_grad=True)

    def f(x):
        q = (x @ weight).view(1, 1, 4, 4)  # torch has no second derivative of the fused kernel
        return F.scaled_dot_product_attention(q, q, q).sum((0, 1, 2))

    jacobian, x = forall.jacrev(f), torch.randn(4, 4)
    wanted = jacobian(x)
    for _ in range(6):
        assert same(jacobian(x), wanted)
    assert "cannot be pulled back" in describe_replay(jacobian)
