"""Values of levels that have ended: who may still act on them, and what is left for the user."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forall._core.levels import innermost, levels_in
from forall._torch.dispatch import functions_are_off, in_backward
from forall._torch.wrapper import Wrapper

if TYPE_CHECKING:
    from forall._core.levels import Level


def is_over(level: Level) -> bool:
    """Whether a user's own code meets a value of this level after the level has ended.

    A backward pass, with its hooks and recomputations, acts under ended levels by right, and so
    does our own code, which no function mode is to see.
    """
    return not level.active and level.ends and not functions_are_off() and not in_backward()


# Asked of the tensor itself, for which nothing else may answer.
_ITS_OWN = frozenset(
    {"__get__", "__set__", "__delete__", "requires_grad_", "retain_grad", "register_hook"}
)


def dispatched(func: Any, args: tuple, kwargs: dict) -> Any:
    """An operator that no mode took: of our own code, in a backward pass, or after the call."""
    level = innermost(levels_in(args, kwargs))
    if is_over(level):
        return level.run_afterwards(func, args, kwargs)
    return level.run(func, args, kwargs)


def left_over(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments of a user's call, ordinary tensors for what ended levels leave of them."""
    if not any(is_over(level) for level in levels_in(args, kwargs)) or (
        getattr(func, "__name__", "") in _ITS_OWN
    ):
        return args, kwargs
    return tuple(_left_over(a) for a in args), {k: _left_over(a) for k, a in kwargs.items()}


def _left_over(a: Any) -> Any:
    if type(a) in (list, tuple):
        return type(a)(map(_left_over, a))
    while isinstance(a, Wrapper) and is_over(a.level):
        left = a.level.afterwards(a)
        if left is a:
            break
        a = left
    return a
