"""A tensor of a jvp that is kept after its end is still a wrapper, not an ordinary tensor."""

import pytest
import torch

from forall import jvp


@pytest.mark.xfail(reason="what autograd leaves on a captured leaf keeps the tangent it had inside")
def test_backward_inside_jvp_leaves_an_ordinary_gradient():
    w = torch.ones(3, requires_grad=True)
    x = torch.arange(3.0)
    jvp(lambda x: ((x * w * w).sum().backward(), x)[1], (x,), (x,))
    assert type(w.grad) is torch.Tensor


@pytest.mark.xfail(reason="a value is not unwrapped when its level ends")
def test_a_value_kept_from_a_jvp_is_an_ordinary_tensor():
    kept = []
    x = torch.arange(3.0)
    jvp(lambda x: (kept.append(x * 2), x)[1], (x,), (x,))
    assert type(kept[0] + 1) is torch.Tensor
