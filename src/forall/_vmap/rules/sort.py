"""Rules of sort and topk along one dim of each example, and of searchsorted and bucketize."""

from __future__ import annotations

import torch

from forall._vmap.memory_layout import asks_first, expanded_inside
from forall._vmap.registry import register
from forall._vmap.rule_makers.along_dims import along
from forall._vmap.rule_makers.basic import Stack, by_front

aten = torch.ops.aten

register(
    {op: asks_first(along(op), expanded_inside) for op in (aten.sort.default, aten.sort.stable)}
)
register({aten.topk.default: along(aten.topk.default)})


def _dtype_of(a):
    return a.v.dtype if isinstance(a, Stack) else a.dtype


def _stack(a, size):
    return a.v if isinstance(a, Stack) else a.expand(size, *a.shape)


def _number_promoted(row, x):
    """Return x, and the dtype that the examples promote to if their batched tensors would not.

    An example of rank 0 promotes less than its batched tensor does.
    """
    if isinstance(x, Stack) and x.v.dim() == 1 and x.v.dtype != _dtype_of(row):
        number = torch.empty((), dtype=x.v.dtype, device="meta")
        common = torch.result_type(torch.empty(1, dtype=_dtype_of(row), device="meta"), number)
        return Stack(x.v.to(common)), common
    return x, None


@by_front
def _searchsorted(size, rows, x, *, sorter=None, **kwargs):
    """Search x (B, *S) in rows (B, N), or x (B, *K, M) in rows (B, *K, N)."""
    x, common = _number_promoted(rows, x)
    if common is not None:
        rows = Stack(rows.v.to(common)) if isinstance(rows, Stack) else rows.to(common)
    if not isinstance(rows, Stack) and not isinstance(sorter, Stack) and rows.dim() == 1:
        return aten.searchsorted.Tensor(rows, x.v.contiguous(), sorter=sorter, **kwargs)
    rows, x = _stack(rows, size), _stack(x, size)
    sorter = None if sorter is None else _stack(sorter, size).contiguous()
    shape = x.shape
    if rows.dim() == 2:
        x = x.flatten(1) if x.dim() > 1 else x.unsqueeze(1)
    out = aten.searchsorted.Tensor(rows.contiguous(), x.contiguous(), sorter=sorter, **kwargs)
    return out.view(shape)


@by_front
def _search_number(size, rows, number, *, sorter=None, **kwargs):
    """Search a Python number in the row of each example."""
    rows = _stack(rows, size).contiguous()
    x = torch.full((size, 1), number, dtype=torch.result_type(rows, number), device=rows.device)
    sorter = None if sorter is None else _stack(sorter, size).contiguous()
    return aten.searchsorted.Tensor(rows, x, sorter=sorter, **kwargs).squeeze(1)


def _swapped(rule):
    """Return a handler with swapped operands: bucketize(x, y) is searchsorted(y, x)."""

    def handler(level, func, args, kwargs):
        return rule(level, func, (args[1], args[0]), kwargs)

    return handler


register(
    {
        aten.searchsorted.Tensor: _searchsorted,
        aten.searchsorted.Scalar: _search_number,
        aten.bucketize.Tensor: _swapped(_searchsorted),
        aten.bucketize.Scalar: _swapped(_search_number),
    }
)
