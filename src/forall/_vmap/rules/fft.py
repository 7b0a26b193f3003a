"""Rules of Fourier transforms: dims of the example become dims of the batched tensor."""

from __future__ import annotations

from typing import Any

import torch

from forall._core.axes import stacked_dim
from forall._vmap.registry import register
from forall._vmap.rule_makers.basic import by_front

aten = torch.ops.aten


def transform(func: Any):
    def rule(size, x, dims, *rest):
        return func(x.v, [stacked_dim(d, x.v.dim() - 1) for d in dims], *rest)

    return by_front(rule)


register(
    {
        op: transform(op)
        for op in (aten._fft_r2c.default, aten._fft_c2r.default, aten._fft_c2c.default)
    }
)
