"""In-place updates that accumulate over the examples in a tensor that is older than the call.

See NOTE [older memory] in `ledger`. A rule gets the tensor one level down and returns the update
that each example makes: a `Step` ``s <- factor * s + data``. If only a part of the tensor is
written, the rule returns a function that writes for all examples. If the updates of the examples
cannot be added up, the rule returns None.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._vmap.batched_indices import Places, taken
from forall._vmap.mutation.pending_updates import Step
from forall._vmap.registry import UPDATES
from forall._vmap.rule_makers.basic import (
    front,
    is_mapped,
    level_on,
    lower,
    stacked,
)

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten
Tensor = torch.Tensor


def _beside(a: Any, x: Tensor, level: Any) -> Any:
    """Return an operand as (B, *S) with x's rank, or unbatched if shared, in the promoted dtype."""
    if not isinstance(a, Tensor):
        return a
    if is_mapped(a, level):
        a = front(a)
        if a.dim() <= x.dim():
            a = a.reshape(a.shape[0], *(1,) * (x.dim() + 1 - a.dim()), *a.shape[1:])
    else:
        a = lower(a, level)
    return a.to(torch.promote_types(a.dtype, x.dtype))


# --- pointwise -----------------------------------------------------------------------------------


def _plus(sign: int) -> Callable:
    def rule(level: Any, x: Tensor, other: Any, alpha: Any = 1) -> Any:
        if x.dtype is torch.bool:
            return _any(level, x, other)
        data = _beside(other, x, level)
        scale = alpha if sign > 0 else -alpha
        return Step(1, data if scale == 1 else data * scale, is_mapped(other, level))

    return rule


def _any(level: Any, x: Tensor, other: Any) -> Callable | None:
    """Add booleans: an entry becomes True if it is True for any example."""
    if x.dtype is not torch.bool:
        return None
    data = _beside(other, x, level)
    if is_mapped(other, level):
        data = data.any(0)
    return lambda: x.logical_or_(data)


def _times(invert: bool) -> Callable:
    def rule(level: Any, x: Tensor, other: Any) -> Any:
        if is_mapped(other, level) or x.dtype is torch.bool:
            return None
        factor = lower(other, level)
        return Step(1 / factor if invert else factor, 0, False)

    return rule


def _lerp(level: Any, x: Tensor, end: Any, weight: Any) -> Any:
    if is_mapped(weight, level):
        return None
    weight = lower(weight, level)
    return Step(1 - weight, _beside(end, x, level) * weight, is_mapped(end, level))


def _product(combine: Callable) -> Callable:
    """Return the rule of addcmul_ or addcdiv_."""

    def rule(level: Any, x: Tensor, a: Any, b: Any, value: Any = 1) -> Any:
        data = combine(_beside(a, x, level), _beside(b, x, level))
        return Step(1, data * value, is_mapped(a, level) or is_mapped(b, level))

    return rule


def _matrices(product: Callable) -> Callable:
    """Return the rule of addmm_ or a relative of it: beta * s + alpha * product(a, b)."""

    def rule(level: Any, x: Tensor, a: Any, b: Any, beta: Any = 1, alpha: Any = 1) -> Any:
        with level_on(level):
            made = product(a, b)
        return Step(beta, _beside(made, x, level) * alpha, is_mapped(made, level))

    return rule


# --- at indices ----------------------------------------------------------------------------------


def _joined(a: Tensor, dim: int) -> Tensor:
    """Fold the batch axis into ``dim``: (B, .., n, ..) -> (.., B*n, ..), as a copy."""
    return a.movedim(0, dim).flatten(dim, dim + 1).clone()


def _by_rows(level: Any, x: Tensor, dim: int, index: Any, source: Any, alpha: Any = 1) -> Any:
    x = x if x.dim() else x.unsqueeze(0)
    dim %= x.dim()
    index, source = stacked(index, level), stacked(source, level)
    index = index if index.dim() > 1 else index.unsqueeze(1)
    source = source if source.dim() > 1 else source.unsqueeze(1)
    index, source = _joined(index, 0), _joined(source, dim)
    return lambda: x.index_add_(dim, index, source, alpha=alpha)


def _scattered(level: Any, x: Tensor, dim: int, index: Any, source: Any) -> Any:
    x = x if x.dim() else x.unsqueeze(0)
    dim %= x.dim()
    index = stacked(index, level)
    index = index if index.dim() > 1 else index.unsqueeze(1)
    if isinstance(source, Tensor):
        source = stacked(source, level)
        source = source if source.dim() > 1 else source.unsqueeze(1)
        source = source[tuple(slice(n) for n in index.shape)]
    else:
        source = torch.full(index.shape, source, dtype=x.dtype, device=x.device)
    index, source = _joined(index, dim), _joined(source, dim)
    return lambda: x.scatter_add_(dim, index, source)


def _scatter_reduce(
    level: Any, x: Tensor, dim: int, index: Any, source: Any, reduce: str, include_self: bool = True
) -> Any:
    if reduce not in ("add", "sum") or not include_self:
        return None
    return _scattered(level, x, dim, index, source)


def _put(level: Any, x: Tensor, indices: list, values: Any, accumulate: bool = False) -> Any:
    if not accumulate:
        return None
    places = Places(level.size, taken(indices, level))
    v = stacked(values, level)
    if x.dtype is torch.bool:
        return None
    if not places.mapped:
        v, at = v.sum(0, dtype=v.dtype), [None if i is None else i.clone() for i in places.indices]
        return lambda: aten.index_put_.default(x, at, v, True)
    rank = x.dim() - places.consumed + places.rank
    v = v.reshape(v.shape[0], *(1,) * (rank + 1 - v.dim()), *v.shape[1:])
    v = v.movedim(0, places.lead if places.adjacent else 0).clone()
    at = [None if i is None else i.clone() for i in places.indices]
    return lambda: aten.index_put_.default(x, at, v, True)


UPDATES.update(
    {
        aten.add_.Tensor: _plus(1),
        aten.add_.Scalar: _plus(1),
        aten.sub_.Tensor: _plus(-1),
        aten.sub_.Scalar: _plus(-1),
        aten.logical_or_.default: _any,
        aten.bitwise_or_.Tensor: _any,
        aten.__ior__.Tensor: _any,
        aten.mul_.Tensor: _times(invert=False),
        aten.mul_.Scalar: _times(invert=False),
        aten.div_.Tensor: _times(invert=True),
        aten.div_.Scalar: _times(invert=True),
        aten.lerp_.Scalar: _lerp,
        aten.lerp_.Tensor: _lerp,
        aten.addcmul_.default: _product(torch.mul),
        aten.addcdiv_.default: _product(torch.div),
        aten.addmm_.default: _matrices(aten.mm.default),
        aten.addmv_.default: _matrices(aten.mv.default),
        aten.addr_.default: _matrices(lambda a, b: a.unsqueeze(1) * b),
        aten.baddbmm_.default: _matrices(aten.bmm.default),
        aten.addbmm_.default: _matrices(lambda a, b: aten.bmm.default(a, b).sum(0)),
        aten.index_add_.default: _by_rows,
        aten.scatter_add_.default: _scattered,
        aten.scatter_.reduce: _scatter_reduce,
        aten.scatter_.value_reduce: _scatter_reduce,
        aten.scatter_reduce_.two: _scatter_reduce,
        aten.index_put_.default: _put,
        aten._index_put_impl_.default: _put,
    }
)
