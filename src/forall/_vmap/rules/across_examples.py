"""Rules of the collectives over a named axis, `forall::psum` and its kin.

For the level that has the axis a collective is one operator on the stack: a sum over the examples,
the stack itself, its transpose. Another level hands its stack on, with its examples where the
operator does not look.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forall._core import collective_ops as ops
from forall._core.find_axis import check_all_come
from forall._core.levels import lift
from forall._vmap.active_set.merge import fit_gradient
from forall._vmap.batched_tensor import BatchedTensor, wrap_stack
from forall._vmap.registry import SHARED, answer_directly, register_rows
from forall._vmap.rule_makers.basic import expand_to_stack, is_mapped, lower_shared, move_to_front

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor


class _Rule(NamedTuple):
    """The meaning of a collective for the level that has its axis, and for another level."""

    on_stack: Callable  # from the stack (N, *S) and further arguments
    on_shared: Callable | None = None  # from a value that all share, and N; else it is expanded
    is_same: bool = True  # True if the result is the same for all examples
    is_local: bool = False  # True if it is of this rank's examples, whatever others have
    # The dims of another level's examples in its stack and in the result, from where they are.
    place: Callable[[int], tuple[int, int]] = lambda axis: (axis, axis)


def _make_handler(rule: _Rule) -> Callable:
    def handler(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
        x, *rest, number, size = args
        axis, root = level.axis, level.root
        if axis is None or axis.number != number:
            return _pass_on(rule, level, func, args)
        if root.sub_level is not None or root.size != axis.local_size:
            check_all_come(func._opname, axis, root)
        if level is not root:  # a gradient of some of the examples: the others have none
            own = type(x) is BatchedTensor and x.level is level
            x = fit_gradient(x if own else wrap_stack(x, None, level), root)
        if is_mapped(x, root):
            stack = move_to_front(x)
        elif axis.ranks is not None and not rule.is_local:
            stack = expand_to_stack(x, root)  # what all share here may differ from rank to rank
        elif rule.on_shared is not None:
            return wrap_stack(rule.on_shared(lower_shared(x, root), size), None, root)
        else:
            stack = expand_to_stack(x, root)
        if axis.ranks is None or rule.is_local:
            made = rule.on_stack(stack, *rest)
        else:
            made = getattr(axis.ranks, func._opname)(stack, *rest)
        return wrap_stack(made, None if rule.is_same else 0, root)

    return handler


def _pass_on(rule: _Rule, level: Any, func: Any, args: tuple) -> Any:
    """Run the collective on the stack of a level that lacks the axis."""
    x, *rest = args
    value, after = lower_shared(x, level), None
    if is_mapped(x, level):
        before, after = rule.place(x.axis)
        value = value.movedim(x.axis, before)
    if not level.active:  # zeros of a derivative may be of no level, and no mode sees them
        value = lift(value, _find_level(level, rest[-2]))
    return wrap_stack(func(value, *rest), after, level)


def _find_level(level: Any, number: int) -> Any:
    """Return the level around this one that has the axis; None if there is none."""
    while level is not None and (level.axis is None or level.axis.number != number):
        level = level.parent
    return level and level.root


def _sum(stack: Tensor) -> Tensor:
    return stack.sum(0)


def _mean(stack: Tensor) -> Tensor:
    return stack.mean(0)


def _max(stack: Tensor) -> Tensor:
    return stack.amax(0) if stack.shape[0] else stack.new_zeros(stack.shape[1:])


def _min(stack: Tensor) -> Tensor:
    return stack.amin(0) if stack.shape[0] else stack.new_zeros(stack.shape[1:])


def _copy(stack: Tensor) -> Tensor:
    return stack.clone(memory_format=torch.contiguous_format)


def _transpose(stack: Tensor) -> Tensor:
    return _copy(stack.transpose(0, 1))


def _permute(stack: Tensor, sources: list[int], targets: list[int]) -> Tensor:
    """Row ``targets[i]`` of the result is row ``sources[i]`` of the stack, others are zeros.

    Rows that stay neighbours are one piece: a recorded program has no index as a constant.
    """
    by_target = dict(zip(targets, sources, strict=True))
    pieces, row = [], 0
    while row < stack.shape[0]:
        source, start = by_target.get(row), row
        row += 1
        while row < stack.shape[0] and by_target.get(row) == (
            None if source is None else source + row - start
        ):
            row += 1
        piece = stack.narrow(0, source or 0, row - start)
        pieces.append(torch.zeros_like(piece) if source is None else piece)
    return torch.cat(pieces) if pieces else stack.clone()


def _clone_shared(x: Tensor, size: Any) -> Tensor:
    return x.clone()


def _in_front(axis: int) -> tuple[int, int]:
    return axis, axis + 1


_RULES = {
    ops.PSUM: _Rule(_sum, ops.sum_shared),
    ops.PSUM_HERE: _Rule(_sum, ops.sum_shared, is_local=True),
    ops.SHARE: _Rule(_copy, _clone_shared, is_same=False, is_local=True),
    ops.PMEAN: _Rule(_mean, _clone_shared),
    ops.PMAX: _Rule(_max, _clone_shared),
    ops.PMIN: _Rule(_min, _clone_shared),
    ops.ALL_GATHER: _Rule(_copy, ops.gather_shared, place=_in_front),
    ops.PSUM_SCATTER: _Rule(_sum, is_same=False, place=lambda axis: (1, 0)),
    ops.ALL_TO_ALL: _Rule(_transpose, is_same=False, place=lambda axis: (1, 1)),
    ops.PPERMUTE: _Rule(_permute, is_same=False),
}
_HANDLERS = {op: _make_handler(rule) for op, rule in _RULES.items()}
register_rows(_HANDLERS)
SHARED.update(_HANDLERS)
for _op in _HANDLERS:
    answer_directly(_op, _op)
