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

from forall._compat.dispatch_state import apply_function, functions_off
from forall._compat.wrapper_tensor import Wrapper
from forall._core.levels import Level, second_name
from forall._vmap.batched_cotangents import undress
from forall._vmap.batched_tensor import wrap
from forall._vmap.boundary import Enter
from forall._vmap.lazy_grad.lazy_tensor import Unmade

if TYPE_CHECKING:
    from collections.abc import Iterable

    from forall._vmap.vmap_level import VmapLevel


def sum_what_leaves(level: VmapLevel, found: Iterable[Tensor], older: set) -> None:
    """Sum the cotangents of ``level`` wherever the graph of ``found`` leads to older nodes.

    ``found`` is what the pass of ``level`` made. Values that a later pass records on its way
    through these nodes have a derivative in the older ones as well. See NOTE [several passes
    through one call].
    """
    todo = [t.grad_fn for t in found]
    while todo:
        node: Any = todo.pop()
        if node is None or node in older or level.crosses in node.metadata:
            continue
        node.metadata[level.crosses] = None
        ends = [end for end, _ in node.next_functions]
        todo += ends
        places = [i for i, end in enumerate(ends) if end in older]
        if places:
            node.register_hook(partial(_summed, level, older, places))
        if isinstance(node, _ENDS):
            node.register_prehook(partial(_looked_at, level, older))


def _summed(level: VmapLevel, older: set, places: list[int], gradients: tuple, _: tuple) -> tuple:
    with functions_off():
        found = {i: gradients[i] for i in places if _is_of(gradients[i], level)}
        sum_what_leaves(level, found.values(), older)
        return tuple(_sum(g, level) if i in found else g for i, g in enumerate(gradients))


def _looked_at(level: VmapLevel, older: set, gradients: tuple) -> None:
    with functions_off():
        sum_what_leaves(level, [g for g in gradients if _is_of(g, level)], older)


def _is_of(g: Any, level: VmapLevel) -> bool:
    """True if ``g`` holds values of the pass."""
    while isinstance(g, Wrapper) and (type(g) is not Unmade or g.peels):  # else it stays unmade
        if g.level is level:
            return True
        g = g.value
    return False


def _sum(g: Any, level: VmapLevel) -> Tensor:
    # Made here and not in the node: a node's forward runs under no_grad, and there the tangents
    # that a value holds, and its history further out, would be cut.
    made = _inside(g, level)
    return apply_function(Sum, g, [second_name(made)], level) if g.requires_grad else made


def _inside(g: Any, level: VmapLevel) -> Tensor:
    """The sum over all cotangents, as a value of the levels around."""
    if g.level is level:
        return undress(g, ((level, None),))
    return g.level.under([g], lambda value: _inside(value, level))


def _for_each(g: Any, level: Level) -> Tensor:
    """Wrap a gradient as one that is the same for all cotangents."""
    made = _dressed(g, level)
    return apply_function(Each, g, [second_name(made)], level) if g.requires_grad else made


def _dressed(g: Any, level: Level) -> Tensor:
    if isinstance(g, Wrapper) and level.is_outside(g.level):
        return g.level.under([g], lambda value: _dressed(value, level))
    return wrap(g, None, level)


class Sum(torch.autograd.Function):
    """The sum over the cotangents of a pull-back, as a value of the call that it leads through."""

    back = staticmethod(_for_each)
    along = staticmethod(_sum)

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


class Each(Sum):
    """The transpose of `Sum`: one value, the same for all cotangents of a pull-back."""

    back = staticmethod(_sum)
    along = staticmethod(_for_each)


# At these nodes a pass through the nodes of an earlier one comes to their end.
_ENDS = (Enter._backward_cls, Each._backward_cls)
