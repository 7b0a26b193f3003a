"""Pull-backs of many cotangents at once that lead into a graph from before them.

NOTE [several passes through one call]
    In a call of vmap that has ended, the level of such a pull-back lies inside the values: what
    autograd saved is the same for all of its cotangents, and the nodes that it records hang on
    both. The derivatives in what was saved are one for each cotangent. Another pass leaves its own
    in the same place, and autograd adds them up as they come: each would then be there as often
    as the other has cotangents. So they are summed on the way there, by a hook on each node of
    the pass from which an edge leads to an older node.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forall._compat.dispatch_state import apply_own_function, functions_off
from forall._compat.wrapper_tensor import Wrapper
from forall._core.levels import Level, alias_for_autograd
from forall._vmap.batched_cotangents import unwrap_cotangents
from forall._vmap.batched_tensor import wrap_stack
from forall._vmap.boundary import Unstack
from forall._vmap.lazy_grad.lazy_tensor import LazyGrad

if TYPE_CHECKING:
    from collections.abc import Iterable

    from forall._vmap.vmap_level import CotangentLevel


def sum_leaving_cotangents(level: CotangentLevel, found: Iterable[Tensor], older: set) -> None:
    """Sum the cotangents of ``level`` wherever the graph of ``found`` leads to older nodes.

    ``found`` is what the pass of ``level`` made. Values that a later pass records on its way
    through these nodes have a derivative in the older ones as well. See NOTE [several passes
    through one call].
    """
    todo = [t.grad_fn for t in found]
    while todo:
        node: Any = todo.pop()
        if node is None or node in older or level.mark in node.metadata:
            continue
        node.metadata[level.mark] = None
        ends = [end for end, _ in node.next_functions]
        todo += ends
        places = [i for i, end in enumerate(ends) if end in older]
        if places:
            node.register_hook(partial(_sum_leaving, level, older, places))
        if isinstance(node, _ENDS):
            node.register_prehook(partial(_follow_cotangents, level, older))


def _sum_leaving(
    level: CotangentLevel, older: set, places: list[int], gradients: tuple, _: tuple
) -> tuple:
    with functions_off():
        found = {i: gradients[i] for i in places if _is_value_of_pass(gradients[i], level)}
        sum_leaving_cotangents(level, found.values(), older)
        return tuple(
            _sum_cotangents(g, level) if i in found else g for i, g in enumerate(gradients)
        )


def _follow_cotangents(level: CotangentLevel, older: set, gradients: tuple) -> None:
    with functions_off():
        sum_leaving_cotangents(level, [g for g in gradients if _is_value_of_pass(g, level)], older)


def _is_value_of_pass(g: Any, level: CotangentLevel) -> bool:
    """True if ``g`` holds values of the pass."""
    while isinstance(g, Wrapper) and (
        type(g) is not LazyGrad or g.records_on_value
    ):  # else it stays unmade
        if g.level is level:
            return True
        g = g.value
    return False


def _sum_cotangents(g: Any, level: CotangentLevel) -> Tensor:
    # Made here and not in the node: a node's forward runs under no_grad, and there the tangents
    # that a value holds, and its history further out, would be cut.
    made = _sum_inside(g, level)
    return (
        apply_own_function(SumOverCotangents, g, [alias_for_autograd(made)], level)
        if g.requires_grad
        else made
    )


def _sum_inside(g: Any, level: CotangentLevel) -> Tensor:
    """The sum over all cotangents, as a value of the levels around."""
    if g.level is level:
        return unwrap_cotangents(g, ((level, None),))
    return g.level.apply_to_inner([g], lambda value: _sum_inside(value, level))


def _broadcast_to_cotangents(g: Any, level: Level) -> Tensor:
    """Wrap a gradient as one that is the same for all cotangents."""
    made = _wrap_for_cotangents(g, level)
    return (
        apply_own_function(BroadcastToCotangents, g, [alias_for_autograd(made)], level)
        if g.requires_grad
        else made
    )


def _wrap_for_cotangents(g: Any, level: Level) -> Tensor:
    if isinstance(g, Wrapper) and level.is_outside(g.level):
        return g.level.apply_to_inner([g], lambda value: _wrap_for_cotangents(value, level))
    return wrap_stack(g, None, level)


class SumOverCotangents(torch.autograd.Function):
    """The sum over the cotangents of a pull-back, as a value of the call that it leads through."""

    back = staticmethod(_broadcast_to_cotangents)
    along = staticmethod(_sum_cotangents)

    @staticmethod
    def forward(g, made, level):
        return made[0]

    @staticmethod
    def setup_context(ctx, inputs, output):
        *_, ctx.level = inputs

    @classmethod
    def backward(cls, ctx, g):
        with functions_off():
            return cls.back(g, ctx.level), None, None

    @classmethod
    def jvp(cls, ctx, t, *_):
        return None if t is None else cls.along(t, ctx.level)


class BroadcastToCotangents(SumOverCotangents):
    """The transpose of `SumOverCotangents`: one value for all cotangents of a pull-back."""

    back = staticmethod(_sum_cotangents)
    along = staticmethod(_broadcast_to_cotangents)


# At these nodes a pass through the nodes of an earlier one comes to their end.
_ENDS = (Unstack._backward_cls, BroadcastToCotangents._backward_cls)
