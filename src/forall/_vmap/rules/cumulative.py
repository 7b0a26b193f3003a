"""Rules of cumulative operators along one dim of each example: (B, *S) -> (B, *S)."""

from __future__ import annotations

import torch

from forall._vmap.registry import register_rows
from forall._vmap.rule_makers.along_dims import make_dim_handler

aten = torch.ops.aten

# Torch decomposes their backwards into ordinary operators, so they need no rules.
register_rows(
    {
        op: make_dim_handler(op)
        for op in (
            aten.cumsum.default,
            aten.cumprod.default,
            aten.cummax.default,
            aten.cummin.default,
            aten.logcumsumexp.default,
            aten._logcumsumexp.default,
        )
    }
)
