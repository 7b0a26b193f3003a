"""Reductions: (B, *S) -> (B, *S without dims)."""

from __future__ import annotations

import torch

from forall._batching.families import front
from forall._batching.batched import wrap
from forall._batching.table import register
from forall._core.axes import stacked_dims

aten = torch.ops.aten


def reduction(func):
    """``dims`` count axes of S, so B is never reduced. ``func`` takes (x, dims, keepdim)."""

    def handler(level, op, args, kwargs):
        x, dims, keepdim = (*args, None, False)[:3] if len(args) < 3 else args
        dims = kwargs.pop("dim", dims) if kwargs else dims
        value = front(x)
        keepdim = kwargs.pop("keepdim", keepdim) if kwargs else keepdim
        if value.dim() == 1:  # S = (): lend the op an axis to reduce; keepdim adds none to a scalar
            stacked_dims(dims, 0)
            return wrap(func(value.unsqueeze(1), [1], False, **kwargs), 0, level)
        return wrap(func(value, stacked_dims(dims, value.dim() - 1), keepdim, **kwargs), 0, level)

    return handler


register(
    {
        op: reduction(op)
        for op in (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default)
    }
)


def whole(func):
    """Over every dim of the example."""

    def handler(level, op, args, kwargs):
        value = front(args[0])
        return wrap(func(value.reshape(value.shape[0], -1), [1], **kwargs), 0, level)

    return handler


register({aten.sum.default: whole(aten.sum.dim_IntList), aten.mean.default: whole(aten.mean.dim)})
