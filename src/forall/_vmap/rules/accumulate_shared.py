"""In-place updates that accumulate over the examples in a tensor that is older than the call.

See NOTE [older memory] in `mutation_log`. A rule gets the tensor one level down and returns the
update that each example makes: an `AffineUpdate` ``s <- factor * s + data``. If only a part of the
tensor is written, the rule returns a function that writes for all examples. If the updates of the
examples cannot be added up, the rule returns None.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._core.axes import fold_axis, pad_rank
from forall._vmap.batched_indices import StackIndices, take_indices
from forall._vmap.mutation.pending_updates import AffineUpdate
from forall._vmap.registry import UPDATES
from forall._vmap.rule_makers.basic import (
    expand_to_stack,
    is_mapped,
    lower_shared,
    move_to_front,
    reenter_level,
)

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten
Tensor = torch.Tensor


def _align_operand(a: Any, x: Tensor, level: Any) -> Any:
    """Return an operand as (B, *S) with x's rank, or unbatched if shared, in the promoted dtype."""
    if not isinstance(a, Tensor):
        return a
    if is_mapped(a, level):
        a = pad_rank(move_to_front(a), x.dim())
    else:
        a = lower_shared(a, level)
    return a.to(torch.promote_types(a.dtype, x.dtype))


# --- pointwise -----------------------------------------------------------------------------------


def _make_add(sign: int) -> Callable:
    def rule(level: Any, x: Tensor, other: Any, alpha: Any = 1) -> Any:
        if x.dtype is torch.bool:
            return _logical_or(level, x, other)
        data = _align_operand(other, x, level)
        scale = alpha if sign > 0 else -alpha
        return AffineUpdate(1, data if scale == 1 else data * scale, is_mapped(other, level))

    return rule


def _logical_or(level: Any, x: Tensor, other: Any) -> Callable | None:
    """Add booleans: an entry becomes True if it is True for any example."""
    if x.dtype is not torch.bool:
        return None
    data = _align_operand(other, x, level)
    if is_mapped(other, level):
        data = data.any(0)
    return lambda: x.logical_or_(data)


def _make_mul(invert: bool) -> Callable:
    def rule(level: Any, x: Tensor, other: Any) -> Any:
        if is_mapped(other, level) or x.dtype is torch.bool:
            return None
        factor = lower_shared(other, level)
        return AffineUpdate(1 / factor if invert else factor, 0, False)

    return rule


def _lerp(level: Any, x: Tensor, end: Any, weight: Any) -> Any:
    if is_mapped(weight, level):
        return None
    weight = lower_shared(weight, level)
    return AffineUpdate(1 - weight, _align_operand(end, x, level) * weight, is_mapped(end, level))


def _make_addc(combine: Callable) -> Callable:
    """Return the rule of addcmul_ or addcdiv_."""

    def rule(level: Any, x: Tensor, a: Any, b: Any, value: Any = 1) -> Any:
        data = combine(_align_operand(a, x, level), _align_operand(b, x, level))
        return AffineUpdate(1, data * value, is_mapped(a, level) or is_mapped(b, level))

    return rule


def _make_addmm(product: Callable) -> Callable:
    """Return the rule of addmm_ or a relative of it: beta * s + alpha * product(a, b)."""

    def rule(level: Any, x: Tensor, a: Any, b: Any, beta: Any = 1, alpha: Any = 1) -> Any:
        with reenter_level(level):
            made = product(a, b)
        return AffineUpdate(beta, _align_operand(made, x, level) * alpha, is_mapped(made, level))

    return rule


# --- at indices ----------------------------------------------------------------------------------


def _make_stack(a: Tensor, level: Any) -> Tensor:
    """Return (B, *S), where S has rank 1 at least."""
    a = expand_to_stack(a, level)
    return a if a.dim() > 1 else a.unsqueeze(1)


def _fold_batch(a: Tensor, dim: int) -> Tensor:
    """Fold the batch axis into ``dim``: (B, .., n, ..) -> (.., B*n, ..), as a copy."""
    return fold_axis(a, dim).clone()


def _index_add(level: Any, x: Tensor, dim: int, index: Any, source: Any, alpha: Any = 1) -> Any:
    x = x if x.dim() else x.unsqueeze(0)
    dim %= x.dim()
    index = _fold_batch(_make_stack(index, level), 0)
    source = _fold_batch(_make_stack(source, level), dim)
    return lambda: x.index_add_(dim, index, source, alpha=alpha)


def _scatter_add(level: Any, x: Tensor, dim: int, index: Any, source: Any) -> Any:
    x = x if x.dim() else x.unsqueeze(0)
    dim %= x.dim()
    index = _make_stack(index, level)
    if isinstance(source, Tensor):
        source = _make_stack(source, level)[tuple(slice(n) for n in index.shape)]
    else:
        source = torch.full(index.shape, source, dtype=x.dtype, device=x.device)
    index, source = _fold_batch(index, dim), _fold_batch(source, dim)
    return lambda: x.scatter_add_(dim, index, source)


def _scatter_reduce(
    level: Any, x: Tensor, dim: int, index: Any, source: Any, reduce: str, include_self: bool = True
) -> Any:
    if reduce not in ("add", "sum") or not include_self:
        return None
    return _scatter_add(level, x, dim, index, source)


def _index_put(level: Any, x: Tensor, indices: list, values: Any, accumulate: bool = False) -> Any:
    if not accumulate or x.dtype is torch.bool:
        return None
    places = StackIndices(level.size, take_indices(indices, level))
    v = expand_to_stack(values, level)
    if places.mapped:
        v = pad_rank(v, x.dim() - places.consumed + places.rank)
        v = v.movedim(0, places.lead if places.adjacent else 0).clone()
    else:
        v = v.sum(0, dtype=v.dtype)
    at = [None if i is None else i.clone() for i in places.indices]
    return lambda: aten.index_put_.default(x, at, v, True)


UPDATES.update(
    {
        aten.add_.Tensor: _make_add(1),
        aten.add_.Scalar: _make_add(1),
        aten.sub_.Tensor: _make_add(-1),
        aten.sub_.Scalar: _make_add(-1),
        aten.logical_or_.default: _logical_or,
        aten.bitwise_or_.Tensor: _logical_or,
        aten.__ior__.Tensor: _logical_or,
        aten.mul_.Tensor: _make_mul(invert=False),
        aten.mul_.Scalar: _make_mul(invert=False),
        aten.div_.Tensor: _make_mul(invert=True),
        aten.div_.Scalar: _make_mul(invert=True),
        aten.lerp_.Scalar: _lerp,
        aten.lerp_.Tensor: _lerp,
        aten.addcmul_.default: _make_addc(torch.mul),
        aten.addcdiv_.default: _make_addc(torch.div),
        aten.addmm_.default: _make_addmm(aten.mm.default),
        aten.addmv_.default: _make_addmm(aten.mv.default),
        aten.addr_.default: _make_addmm(lambda a, b: a.unsqueeze(1) * b),
        aten.baddbmm_.default: _make_addmm(aten.bmm.default),
        aten.addbmm_.default: _make_addmm(lambda a, b: aten.bmm.default(a, b).sum(0)),
        aten.index_add_.default: _index_add,
        aten.scatter_add_.default: _scatter_add,
        aten.scatter_.reduce: _scatter_reduce,
        aten.scatter_.value_reduce: _scatter_reduce,
        aten.scatter_reduce_.two: _scatter_reduce,
        aten.index_put_.default: _index_put,
        aten._index_put_impl_.default: _index_put,
    }
)
