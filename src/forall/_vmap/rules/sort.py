"""Rules of sort and topk along one dim of each example, and of searchsorted and bucketize."""

from __future__ import annotations

import torch

from forall._vmap.memory_layout import is_expanded_inside, keep_example_layout
from forall._vmap.registry import register_rows
from forall._vmap.rule_makers.along_dims import make_dim_handler
from forall._vmap.rule_makers.basic import (
    MappedStack,
    expand_stack,
    get_value,
    make_stack_handler,
)
from forall._vmap.rule_makers.pointwise import result_dtype

aten = torch.ops.aten

register_rows(
    {
        op: keep_example_layout(make_dim_handler(op), is_expanded_inside)
        for op in (aten.sort.default, aten.sort.stable)
    }
)
register_rows({aten.topk.default: make_dim_handler(aten.topk.default)})


def _promote_number(row, x):
    """Return x, and the dtype that the examples promote to if their batched tensors would not.

    An example of rank 0 promotes less than its batched tensor does.
    """
    if isinstance(x, MappedStack) and x.v.dim() == 1 and x.v.dtype != get_value(row).dtype:
        common = result_dtype((get_value(row).dtype,), (x.v.dtype,))
        return MappedStack(x.v.to(common)), common
    return x, None


@make_stack_handler
def _batch_searchsorted(size, rows, x, *, sorter=None, **kwargs):
    """Search x (B, *S) in rows (B, N), or x (B, *K, M) in rows (B, *K, N)."""
    x, common = _promote_number(rows, x)
    if common is not None:
        rows = MappedStack(rows.v.to(common)) if isinstance(rows, MappedStack) else rows.to(common)
    if (
        not isinstance(rows, MappedStack)
        and not isinstance(sorter, MappedStack)
        and rows.dim() == 1
    ):
        return aten.searchsorted.Tensor(rows, x.v.contiguous(), sorter=sorter, **kwargs)
    rows, x = expand_stack(rows, size), expand_stack(x, size)
    sorter = None if sorter is None else expand_stack(sorter, size).contiguous()
    shape = x.shape
    if rows.dim() == 2:
        x = x.flatten(1) if x.dim() > 1 else x.unsqueeze(1)
    out = aten.searchsorted.Tensor(rows.contiguous(), x.contiguous(), sorter=sorter, **kwargs)
    return out.view(shape)


@make_stack_handler
def _search_number(size, rows, number, *, sorter=None, **kwargs):
    """Search a Python number in the row of each example."""
    rows = expand_stack(rows, size).contiguous()
    x = torch.full((size, 1), number, dtype=torch.result_type(rows, number), device=rows.device)
    sorter = None if sorter is None else expand_stack(sorter, size).contiguous()
    return aten.searchsorted.Tensor(rows, x, sorter=sorter, **kwargs).squeeze(1)


def _make_swapped_handler(rule):
    """Return a handler with swapped operands: bucketize(x, y) is searchsorted(y, x)."""

    def handler(level, func, args, kwargs):
        return rule(level, func, (args[1], args[0]), kwargs)

    return handler


register_rows(
    {
        aten.searchsorted.Tensor: _batch_searchsorted,
        aten.searchsorted.Scalar: _search_number,
        aten.bucketize.Tensor: _make_swapped_handler(_batch_searchsorted),
        aten.bucketize.Scalar: _make_swapped_handler(_search_number),
    }
)
