"""Rules of in-place views (torch's tag ``inplace_view``): the tensor becomes a view of itself.

(.., B, ..) -> (.., B, ..) by the rule of the view. They also run if no argument is batched, since a
tensor that is older than the call must keep its shape outside.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from forall._vmap.batched_tensor import Batched, Family, refit
from forall._vmap.registry import SHARED, register, view_call
from forall._vmap.rule_makers.basic import front, is_mapped, lower

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten


def reseated(view: Any) -> Callable:
    """Return a handler made of a view operator, which adds the view to the target's chain."""

    def handler(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
        target = args[0]
        family, chain = target.family, target.chain
        if family is None:
            family = Family(target.value, target.axis, target.older)
            family.add(target)
        call = view_call(view, args[1:], kwargs, None, target)
        refit(target, *call(target.value, target.axis))
        target.family, target.chain = family, (*chain, call)
        return target

    return handler


ROWS = {
    op: reseated(view)
    for op, view in {
        aten.as_strided_.default: aten.as_strided.default,
        aten.squeeze_.default: aten.squeeze.default,
        aten.squeeze_.dim: aten.squeeze.dim,
        aten.squeeze_.dims: aten.squeeze.dims,
        aten.t_.default: aten.t.default,
        aten.transpose_.default: aten.transpose.int,
        aten.unsqueeze_.default: aten.unsqueeze.default,
    }.items()
}


def _resized(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """Resize each example: it keeps its first entries in order, and new ones are uninitialised."""
    target = args[0]
    size = list(args[1].shape if func is aten.resize_as_.default else args[1])
    if list(target.shape) == size:
        return target
    if not (type(target) is Batched and target.level is level):  # one size for all examples
        aten.resize_.default(lower(target, level), size)
        return target
    value = front(target) if is_mapped(target, level) else target.value.unsqueeze(0)
    entries = value.reshape(value.shape[0], target.numel())
    more = math.prod(size) - target.numel()
    if more > 0:
        entries = torch.cat([entries, entries.new_empty((value.shape[0], more))], 1)
    value = entries[:, : math.prod(size)].reshape(value.shape[0], *size)
    if is_mapped(target, level):
        refit(target, value, 0)
    else:
        refit(target, value[0], None)
    return target


ROWS |= {aten.resize_.default: _resized, aten.resize_as_.default: _resized}
register(ROWS)
SHARED.update(ROWS)
