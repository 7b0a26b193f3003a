"""Gradients of examples lie in a row, as a stack of the loop's does: they have views."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import forall

B = 4


class First(nn.Module):
    """A recurrent layer's sequence, without its state."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)[0]


class Itself(nn.Module):
    """A module of several sequences, of one."""

    def __init__(self, module: nn.Module, times: int) -> None:
        super().__init__()
        self.module, self.times = module, times

    def forward(self, x):
        out = self.module(*[x] * self.times)
        return out[0] if isinstance(out, tuple) else out


LAYERS = {
    "Linear": (lambda: nn.Linear(8, 4), (3, 8)),
    "Bilinear": (lambda: Itself(nn.Bilinear(8, 8, 4), 2), (3, 8)),
    "Conv1d": (lambda: nn.Conv1d(3, 5, 3), (2, 3, 9)),
    "Conv1d, long": (lambda: nn.Conv1d(8, 8, 25), (1, 8, 99)),
    "Conv2d": (lambda: nn.Conv2d(3, 5, 3), (1, 3, 9, 9)),
    "Conv2d without a batch": (lambda: nn.Conv2d(3, 5, 3), (3, 9, 9)),
    "Conv2d in blocks": (lambda: nn.Conv2d(16, 16, 3, padding=1, bias=False), (1, 16, 32, 32)),
    "Conv2d of few places": (lambda: nn.Conv2d(8, 64, 3), (1, 8, 4, 4)),
    "Conv2d 1x1": (lambda: nn.Conv2d(3, 5, 1), (2, 3, 9, 9)),
    "Conv2d 1x1, strided": (lambda: nn.Conv2d(3, 5, 1, stride=2), (2, 3, 9, 9)),
    "Conv2d 7x7": (lambda: nn.Conv2d(3, 5, 7, stride=2, padding=3), (1, 3, 8, 8)),
    "Conv2d, dilated": (lambda: nn.Conv2d(3, 5, 3, dilation=2), (1, 3, 9, 9)),
    "Conv2d, groups": (lambda: nn.Conv2d(4, 8, 3, groups=2), (2, 4, 9, 9)),
    "Conv2d, depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4), (1, 4, 9, 9)),
    "Conv2d, reflected": (
        lambda: nn.Conv2d(3, 5, 3, padding=1, padding_mode="reflect"),
        (1, 3, 9, 9),
    ),
    "Conv3d": (lambda: nn.Conv3d(3, 5, 3), (2, 3, 5, 5, 5)),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(3, 5, 3), (2, 3, 9)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(3, 5, 3), (1, 3, 9, 9)),
    "ConvTranspose2d, groups": (
        lambda: nn.ConvTranspose2d(4, 6, 3, groups=2, stride=2),
        (1, 4, 5, 5),
    ),
    "ConvTranspose3d": (lambda: nn.ConvTranspose3d(3, 5, 3), (1, 3, 4, 4, 4)),
    "Embedding": (lambda: nn.Embedding(10, 4, padding_idx=1), None),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(10, 4), None),
    "LayerNorm": (lambda: nn.LayerNorm(8), (3, 8)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 8), (2, 8, 4, 4)),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(8, affine=True), (2, 8, 4, 4)),
    "RMSNorm": (lambda: nn.RMSNorm(8), (3, 8)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(8, track_running_stats=False), (2, 8, 4, 4)),
    "RNN": (lambda: First(nn.RNN(8, 4, batch_first=True)), (2, 5, 8)),
    "LSTM": (lambda: First(nn.LSTM(8, 4, 2, bidirectional=True)), (5, 2, 8)),
    "GRU": (lambda: First(nn.GRU(8, 4)), (5, 2, 8)),
    "LSTMCell": (lambda: First(nn.LSTMCell(8, 4)), (2, 8)),
    "MultiheadAttention": (
        lambda: Itself(nn.MultiheadAttention(8, 2, batch_first=True), 3),
        (2, 5, 8),
    ),
    "TransformerEncoderLayer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        (2, 5, 8),
    ),
    "TransformerDecoderLayer": (
        lambda: Itself(nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2),
        (2, 5, 8),
    ),
    "PReLU": (lambda: nn.PReLU(4), (2, 4, 3)),
    "weight_norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 4)), (3, 8)),
    "images, then vectors": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.GroupNorm(2, 8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False),
            nn.Flatten(),
            nn.Linear(128, 3),
        ),
        (1, 3, 8, 8),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_parameters_are_contiguous_and_the_loops(name, dtype):
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    module = make().to(dtype)
    xs = torch.randint(10, (B, 2, 3)) if shape is None else torch.randn(B, *shape, dtype=dtype)
    parameters = {k: v.detach().clone() for k, v in module.named_parameters()}

    def loss(p, x):
        return forall.functional_call(module, p, (x,)).sin().sum()

    def one(p, x):
        p = {k: v.clone().requires_grad_() for k, v in p.items()}
        return dict(zip(p, torch.autograd.grad(loss(p, x), [*p.values()]), strict=True))

    right = [one(parameters, x) for x in xs]
    stacked = {k: v.expand(B, *v.shape).clone() for k, v in parameters.items()}
    found = [
        forall.vmap(forall.grad(loss), (None, 0))(parameters, xs),
        forall.vmap(forall.grad(loss), (0, 0))(stacked, xs),
        forall.vmap(forall.grad(loss), (None, -1))(parameters, xs.movedim(0, -1).contiguous()),
        forall.jit(forall.vmap(forall.grad(loss), (None, 0)))(parameters, xs),
    ]
    if shape is not None and len(shape) == 4:
        flat = xs.flatten(0, 1).contiguous(memory_format=torch.channels_last)
        found.append(
            forall.vmap(forall.grad(loss), (None, 0))(parameters, flat.unflatten(0, (B, -1)))
        )
    for gradients in found:
        for key, gradient in gradients.items():
            assert gradient.is_contiguous(), (key, gradient.shape, gradient.stride())
            want = torch.stack([g[key] for g in right])
            torch.testing.assert_close(gradient, want, rtol=1e-3, atol=1e-4)
