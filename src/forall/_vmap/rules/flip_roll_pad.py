"""Rules of flip, roll, pad and the like: one kernel call on (B, *S) with its dims shifted by one.

The backward operators of views and the ``*_scatter`` operators are here too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._core.axes import pad_rank, stacked_dim, stacked_dims
from forall._vmap.batched_tensor import wrap_stack
from forall._vmap.memory_layout import is_expanded_inside, keep_example_layout
from forall._vmap.registry import register_rows
from forall._vmap.rule_makers.basic import expand_to_stack, move_to_front

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten


def make_front_handler(rule: Callable) -> Callable:
    """Return a handler made of ``rule((B, *S), *args)``, for an operator on one tensor."""

    def handler(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
        return wrap_stack(rule(move_to_front(args[0]), *args[1:], **kwargs), 0, level)

    return handler


def _flip(v, dims):
    return v.flip(stacked_dims(dims, v.dim() - 1)) if dims and v.dim() > 1 else v.clone()


def _roll(v, shifts, dims=()):
    if v.dim() == 1:
        return v.clone()
    if not dims:
        return v.flatten(1).roll(shifts, 1).reshape(v.shape)
    return v.roll(shifts, stacked_dims(dims, v.dim() - 1))


def _rot90(v, k=1, dims=(0, 1)):
    if len(dims) != 2 or v.dim() < 3:
        return aten.rot90.default(v[0], k, dims)  # raises torch's error
    return aten.rot90.default(v, k, stacked_dims(dims, v.dim() - 1))


def _make_triangle(op):
    def rule(v, diagonal=0):
        if v.dim() < 3:
            raise RuntimeError(f"{op}: input tensor must have at least 2 dimensions")
        return op(v, diagonal)

    return rule


def _diag_embed(v, offset=0, dim1=-2, dim2=-1):
    return aten.diag_embed.default(
        v, offset, stacked_dim(dim1, v.dim()), stacked_dim(dim2, v.dim())
    )


def _repeat(v, repeats):
    if len(repeats) < v.dim() - 1:
        raise RuntimeError(
            "Number of dimensions of repeat dims can not be smaller than number of dimensions of "
            "tensor"
        )
    return pad_rank(v, len(repeats)).repeat(1, *repeats)


def _pad(v, pad, value=0):
    if len(pad) > 2 * (v.dim() - 1):
        raise RuntimeError(
            f"Length of pad should be no more than twice the number of dimensions of the input. "
            f"Pad length is {len(pad)} while the input has {v.dim() - 1} dimensions."
        )
    return aten.constant_pad_nd.default(v, pad, value)


register_rows(
    {
        op: keep_example_layout(make_front_handler(rule), is_expanded_inside)
        for op, rule in {
            aten.flip.default: _flip,
            aten.roll.default: _roll,
            aten.rot90.default: _rot90,
            aten.tril.default: _make_triangle(aten.tril.default),
            aten.triu.default: _make_triangle(aten.triu.default),
            aten.diag_embed.default: _diag_embed,
            aten.repeat.default: _repeat,
            aten.constant_pad_nd.default: _pad,
        }.items()
    }
)


# --- backward operators of views: zeros of the given sizes, except where the view is -------------


def _select_backward(g, sizes, dim, index):
    return aten.select_backward(g, [g.shape[0], *sizes], stacked_dim(dim, len(sizes)), index)


def _slice_backward(g, sizes, dim, start, end, step):
    sizes, dim = [g.shape[0], *sizes], stacked_dim(dim, len(sizes))
    return aten.slice_backward(g, sizes, dim, start, end, step)


def _diagonal_backward(g, sizes, offset, dim1, dim2):
    dims = stacked_dim(dim1, len(sizes)), stacked_dim(dim2, len(sizes))
    return aten.diagonal_backward(g, [g.shape[0], *sizes], offset, *dims)


def _unfold_backward(g, sizes, dim, size, step):
    if not sizes:  # of a number: one window of one entry
        return aten.unfold_backward(g.unsqueeze(1), [g.shape[0], 1], 1, size, step).squeeze(1)
    return aten.unfold_backward(g, [g.shape[0], *sizes], stacked_dim(dim, len(sizes)), size, step)


register_rows(
    {
        op: make_front_handler(rule)
        for op, rule in {
            aten.select_backward.default: _select_backward,
            aten.slice_backward.default: _slice_backward,
            aten.diagonal_backward.default: _diagonal_backward,
            aten.unfold_backward.default: _unfold_backward,
        }.items()
    }
)


# --- a copy of a tensor in which a view has other values -----------------------------------------


def _make_scatter_handler(rule: Callable) -> Callable:
    """Return a handler made of ``rule(x, src, rank, *args)``, where x and src are (B, ..)."""

    def handler(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
        x, src = expand_to_stack(args[0], level), expand_to_stack(args[1], level)
        return wrap_stack(rule(x, src, x.dim() - 1, *args[2:], **kwargs), 0, level)

    return handler


def _select_scatter(x, src, rank, dim, index):
    return aten.select_scatter(x, src, stacked_dim(dim, rank), index)


def _slice_scatter(x, src, rank, dim=0, start=None, end=None, step=1):
    return aten.slice_scatter(x, src, stacked_dim(dim, rank), start, end, step)


def _diagonal_scatter(x, src, rank, offset=0, dim1=0, dim2=1):
    return aten.diagonal_scatter(x, src, offset, stacked_dim(dim1, rank), stacked_dim(dim2, rank))


def _as_strided_scatter(x, src, rank, size, stride, storage_offset=None):
    x = x.contiguous()
    room = x.shape[1:].numel()
    return aten.as_strided_scatter(
        x, src, [x.shape[0], *size], [room, *stride], storage_offset or 0
    )


register_rows(
    {
        aten.select_scatter.default: _make_scatter_handler(_select_scatter),
        aten.slice_scatter.default: _make_scatter_handler(_slice_scatter),
        aten.diagonal_scatter.default: _make_scatter_handler(_diagonal_scatter),
        aten.as_strided_scatter.default: _make_scatter_handler(_as_strided_scatter),
    }
)
