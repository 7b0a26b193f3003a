"""Rules of cat and stack, and of new tensors with the properties of another."""

from __future__ import annotations

import torch

from forall._compat.symbolic_zeros import make_plain_zeros
from forall._core.axes import stacked_dim
from forall._core.sparse_operands import expand_examples
from forall._vmap.batched_tensor import wrap_stack
from forall._vmap.registry import SHARED, register_rows
from forall._vmap.rule_makers.along_dims import StackHandler
from forall._vmap.rule_makers.basic import (
    expand_to_stack,
    is_mapped,
    lower_shared,
    move_to_front,
)

aten = torch.ops.aten


_CHANNELS_LAST = (torch.channels_last, torch.channels_last_3d)


def _cat(level, func, args, kwargs):
    tensors = args[0]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    parts = [_expand_to_stack(t, level) for t in tensors]
    rank = max(p.dim() for p in parts) - 1
    return wrap_stack(_cat_stacks(parts, stacked_dim(dim, rank)), 0, level)


def _expand_to_stack(t, level):
    """(B, *S), also of a sparse tensor that all examples share."""
    if is_mapped(t, level):
        return move_to_front(t)
    return expand_examples(lower_shared(t, level), level.size)


def _cat_stacks(parts, dim):
    """Drop empty rank-1 examples, which fit anything, as torch does for backward compatibility."""
    rank = max(p.dim() for p in parts) - 1
    return torch.cat([p for p in parts if rank < 2 or p.dim() > 2 or p.shape[1]], dim)


def _stack(level, func, args, kwargs):
    tensors = args[0]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    parts = [_expand_to_stack(t, level) for t in tensors]
    return wrap_stack(torch.stack(parts, stacked_dim(dim, parts[0].dim())), 0, level)


register_rows(
    {
        aten.cat.default: StackHandler(_cat, _cat_stacks),
        aten.stack.default: StackHandler(_stack, torch.stack),
    }
)


def _same_size(level, func, args, kwargs):
    return args[0].shape == args[1].shape


def _new_empty_strided(level, func, args, kwargs):
    x, size, stride = args[:3]
    room = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True) if n)
    out = x.value.new_empty_strided([level.size, *size], [max(room, 1), *stride], **kwargs)
    return wrap_stack(out, 0, level)


def _zeros_like_tangent(level, func, args, kwargs):
    """Return zeros for a tangent, with the primal's strides: torch takes the same views of both.

    The first dims of the tangent may be batch dims of torch's own vmap.
    """
    tangent, primal = args[:2]
    several = tangent.shape[: kwargs.get("self_num_batch_dims", 0)]
    reach = (max(n - 1, 0) * s for n, s in zip(primal.shape, primal.stride(), strict=True))
    offset = primal.storage_offset()
    room = offset + 1 + sum(reach)
    zeros = expand_to_stack(tangent, level).new_zeros(
        [level.size, *several, room], dtype=primal.dtype
    )
    steps = [zeros.stride(d) for d in range(zeros.dim() - 1)]
    size, stride = [level.size, *several, *primal.shape], [*steps, *primal.stride()]
    return wrap_stack(zeros.as_strided(size, stride, offset), 0, level)


def _new_zeros(make):
    def handler(level, func, args, kwargs):
        # It is unbatched: a write of batched data gives it a batch axis.
        return wrap_stack(make(args[0].value, *args[1:], **kwargs), None, level)

    return handler


register_rows(
    {
        aten.is_same_size.default: _same_size,
        aten._has_same_storage_numel.default: lambda *_: True,
        aten.new_empty_strided.default: _new_empty_strided,
        aten._new_zeros_with_same_feature_meta.default: _zeros_like_tangent,
        **{
            op: _new_zeros(op)
            for op in (
                aten.new_zeros.default,
                aten.new_ones.default,
                aten.new_full.default,
                aten.new_empty.default,
            )
        },
    }
)

SHARED[aten._efficientzerotensor.default] = lambda level, func, args, kwargs: make_plain_zeros(
    *args, **kwargs
)
