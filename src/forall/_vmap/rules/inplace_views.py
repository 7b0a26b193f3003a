"""Rules of in-place views (torch's tag ``inplace_view``): the tensor becomes a view of itself.

(.., B, ..) -> (.., B, ..) by the rule of the view. They also run if no argument is batched, since a
tensor that is older than the call must keep its shape outside.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from forall._vmap.batched_tensor import AliasFamily, BatchedTensor, replace_stack
from forall._vmap.registry import SHARED, register_rows
from forall._vmap.rule_makers.basic import is_mapped, lower_shared, make_view_call, move_to_front

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten


def make_inplace_view_handler(view: Any) -> Callable:
    """Return a handler made of a view operator, which adds the view to the target's chain."""

    def handler(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
        target = args[0]
        family, chain = target.family, target.chain
        if family is None:
            family = AliasFamily(target.value, target.axis, target.is_external)
            family.add(target)
        call = make_view_call(view, args[1:], kwargs, None, target)
        replace_stack(target, *call(target.value, target.axis))
        target.family, target.chain = family, (*chain, call)
        return target

    return handler


ROWS = {
    op: make_inplace_view_handler(view)
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


def _resize(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """Resize each example: it keeps its first entries in order, and new ones are uninitialised."""
    target = args[0]
    size = list(args[1].shape if func is aten.resize_as_.default else args[1])
    if list(target.shape) == size:
        return target
    if not (type(target) is BatchedTensor and target.level is level):  # one size for all examples
        aten.resize_.default(lower_shared(target, level), size)
        return target
    value = move_to_front(target) if is_mapped(target, level) else target.value.unsqueeze(0)
    entries = value.reshape(value.shape[0], target.numel())
    more = math.prod(size) - target.numel()
    if more > 0:
        entries = torch.cat([entries, entries.new_empty((value.shape[0], more))], 1)
    value = entries[:, : math.prod(size)].reshape(value.shape[0], *size)
    if is_mapped(target, level):
        replace_stack(target, value, 0)
    else:
        replace_stack(target, value[0], None)
    return target


ROWS |= {aten.resize_.default: _resize, aten.resize_as_.default: _resize}
register_rows(ROWS)
SHARED.update(ROWS)
