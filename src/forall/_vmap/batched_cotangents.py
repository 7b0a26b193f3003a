"""Wrappers of batched cotangents, in a pull-back of many cotangents at once.

NOTE [dressed stacks]
    A pull-back of many cotangents at once runs under a level that records on its stacks
    (`CotangentLevel`): there the history of a tensor hangs on the value, not on the wrapper. So
    such wrappers are taken off before a node is recorded (`strip_cotangent_wrappers`), and put on
    again inside the node or behind it (`wrap_cotangents`).

    A pull-back inside a running vmap has its level within that vmap's level. The wrapper of the
    pull-back stays outermost where values cross the boundary of the outer level, so that each
    value crosses as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forall._core.levels import find_innermost_of, level_of
from forall._vmap.batched_tensor import BatchedTensor, wrap_stack

if TYPE_CHECKING:
    import torch

    from forall._core.levels import Level
    from forall._vmap.vmap_level import CotangentLevel, VmapLevel

    CotangentWrappers = tuple[tuple[CotangentLevel, int | None], ...]


def strip_cotangent_wrappers(tensor: torch.Tensor) -> tuple[torch.Tensor, CotangentWrappers]:
    """Take off the wrappers around the tensor that carries the history; return both.

    See NOTE [dressed stacks].
    """
    worn: CotangentWrappers = ()
    while isinstance(tensor, BatchedTensor) and tensor.level.records_on_value:
        tensor.level.mark = tensor.level.mark or object()
        worn = ((tensor.level, tensor.axis), *worn)
        tensor = tensor.value
    return tensor, worn


def wrap_cotangents(tensor: torch.Tensor, worn: CotangentWrappers) -> torch.Tensor:
    """Put the wrappers on again, the first one next to the tensor."""
    for level, axis in worn:
        tensor = wrap_stack(tensor, axis, level)
    return tensor


def unwrap_cotangents(tensor: torch.Tensor, worn: CotangentWrappers) -> torch.Tensor:
    """Take off these wrappers; each batch axis goes where it was when its wrapper was put on."""
    for level, axis in reversed(worn):
        if isinstance(tensor, BatchedTensor) and tensor.level is level:
            value, now = tensor.value, tensor.axis
        else:
            value, now = tensor, None
        if axis is None:
            # The same for all of its examples then; a derivative of it is the sum over them.
            tensor = value * level.size if now is None else value.sum(now)
        elif now is None:
            tensor = value.expand(level.size, *value.shape).movedim(0, axis)
        else:
            tensor = value.movedim(now, axis)
    return tensor


def unwrap_at_node(
    tensor: torch.Tensor, worn: CotangentWrappers
) -> tuple[torch.Tensor, CotangentWrappers]:
    """Take off the wrappers of a node's other side, and those of pull-backs that have ended.

    A value that was the same for all cotangents of an ended pull-back gets one derivative from
    each: their sum.
    """
    tensor = unwrap_cotangents(tensor, worn)
    while (
        isinstance(tensor, BatchedTensor)
        and tensor.level.records_on_value
        and not tensor.level.active
    ):
        ended = ((tensor.level, None),)
        tensor, worn = unwrap_cotangents(tensor, ended), (*ended, *worn)
    return tensor, worn


def is_pullback_value(tensor: torch.Tensor, level: VmapLevel) -> bool:
    """True if ``tensor`` is a value of a pull-back that runs inside ``level``."""
    return (
        isinstance(tensor, BatchedTensor)
        and tensor.level.records_on_value
        and level.is_outside(tensor.level)
    )


def unwrap_on_entry(stack: BatchedTensor, axis: int) -> tuple[torch.Tensor, int, int | None]:
    """The value of a stack, the position of ``axis`` in it, and the stack's own axis without it."""
    n = stack.axis
    if n is None or axis < n:
        return stack.value, axis, n if n is None else n - 1
    return stack.value, axis + 1, n


def unwrap_on_exit(example: BatchedTensor, axis: int) -> tuple[torch.Tensor, int, int | None]:
    """The value of an example, the position of ``axis`` in it, and the own axis beside it."""
    n = example.axis
    if n is None or axis <= n:
        return example.value, axis, n if n is None else n + 1
    return example.value, axis + 1, n


def find_enclosing_level(level: VmapLevel, args: tuple) -> Level:
    """The pull-back's level or an enclosing one: the one just inside the level of ``args``.

    A pull-back inside a vmap goes through nodes that were recorded outside of that vmap.
    """
    inner = find_innermost_of(tuple(a.value if level_of(a) is level else a for a in args))
    around: Level | None = level
    while around is not None and around.parent is not inner:
        around = around.parent
    return level if around is None or inner is None else around
