"""Scans along one dim of each example: (B, *S) -> (B, *S)."""

from __future__ import annotations

import torch

from forall._vmap.registry import register
from forall._vmap.rule_makers.along_dims import along

aten = torch.ops.aten

# Their backwards are made of plain operators by torch, so they need no rows.
register(
    {
        op: along(op)
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
