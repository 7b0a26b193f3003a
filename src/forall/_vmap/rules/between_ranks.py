"""Rules of the operators between the ranks of a mesh, `forall::ranks_sum` and its kin.

A level hands its stack on, with its examples where the operator does not look, so that one message
serves all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forall._core import rank_ops as ops
from forall._vmap.batched_tensor import wrap_stack
from forall._vmap.registry import SHARED, register_rows
from forall._vmap.rule_makers.basic import is_mapped, lower_shared

if TYPE_CHECKING:
    from collections.abc import Callable


def _make_handler(place: int | None, after: int | None = None) -> Callable:
    """Return a rule: the examples go to dim ``place``, None for any, and are in dim ``after``."""

    def handler(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
        x, *rest = args
        if not is_mapped(x, level):
            return wrap_stack(func(lower_shared(x, level), *rest), None, level)
        axis = x.axis if place is None else place
        made = func(x.value.movedim(x.axis, axis), *rest)
        return wrap_stack(made, axis if after is None else after, level)

    return handler


_HANDLERS = {
    ops.SUM: _make_handler(None),
    ops.GATHER: _make_handler(1),
    ops.SCATTER: _make_handler(1),
    ops.EXCHANGE: _make_handler(1),
    ops.EXTREME: _make_handler(1, 0),
}
register_rows(_HANDLERS)
SHARED.update(_HANDLERS)
