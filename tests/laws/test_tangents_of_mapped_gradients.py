"""``jvp`` of ``vmap(grad(f))`` is that of ``grad(f)``, one example after another."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from forall import grad, hessian, jacfwd, jvp, vmap

D = torch.float64
XS = torch.linspace(-1, 2, 48, dtype=D).reshape(3, 1, 2, 2, 4).sin()
W = XS[0].cos()
TARGETS, LENGTHS = torch.tensor([[1, 2]]), (torch.tensor([4]), torch.tensor([2]))


def layer():
    torch.manual_seed(0)
    made = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True).double()
    return made.eval().requires_grad_(requires_grad=False)


LAYER = layer()
FUSED = {
    "attention": lambda w, x: F.scaled_dot_product_attention(w, x, x.cos()),
    "a transformer's layer": lambda w, x: LAYER((w + x)[0]),
    "layer_norm": lambda w, x: F.layer_norm(w * x, (4,)),
    "cdist": lambda w, x: torch.cdist(w * x, x.cos() + w),
    "ctc_loss": lambda w, x: F.ctc_loss(
        (w * x).reshape(4, 1, 4).log_softmax(-1), TARGETS, *LENGTHS
    ),
    "hardsigmoid": lambda w, x: F.hardsigmoid(w * x),
    "multi_margin_loss": lambda w, x: F.multi_margin_loss(
        (w * x).reshape(4, 4), torch.tensor([1, 2, 3, 0])
    ),
    "grid_sample": lambda w, x: F.grid_sample(
        w * x, torch.stack([w[..., 0], x[..., 1]], -1), align_corners=False
    ),
}


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_kernel(name):
    def f(w, x):
        return FUSED[name](w, x).sin().sum()

    def mapped(w):
        return vmap(grad(f), (None, 0))(w, XS)

    expected = torch.stack([jvp(lambda w, x=x: grad(f)(w, x), (W,), (W.cos(),))[1] for x in XS])
    found, tangent = jvp(mapped, (W,), (W.cos(),))
    assert type(found) is torch.Tensor
    torch.testing.assert_close(tangent, expected)
    directions = torch.stack([W, W.cos()])
    each = vmap(lambda t: jvp(mapped, (W,), (t,))[1])(directions)
    torch.testing.assert_close(each[1], expected)
    second = torch.stack([hessian(lambda w, x=x: f(w, x))(W) for x in XS])
    torch.testing.assert_close(jacfwd(mapped)(W), second)
