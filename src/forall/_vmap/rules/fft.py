"""Rules of Fourier transforms: dims of the example become dims of the batched tensor."""

from __future__ import annotations

from typing import Any

import torch

from forall._core.axes import stacked_dim
from forall._vmap.registry import register_rows
from forall._vmap.rule_makers.basic import make_stack_handler

aten = torch.ops.aten


def make_fft_handler(func: Any):
    def rule(size, x, dims, *rest):
        return func(x.v, [stacked_dim(d, x.v.dim() - 1) for d in dims], *rest)

    return make_stack_handler(rule)


register_rows(
    {
        op: make_fft_handler(op)
        for op in (aten._fft_r2c.default, aten._fft_c2r.default, aten._fft_c2c.default)
    }
)
