"""Recomputation: run a user's function again later, as checkpoints do in a backward pass.

The function runs in the context of its first run. Levels that were entered since, a pull-back's
among them, are switched off. A level that has ended since still defines what a random draw is, and
new tensors belong to it: per-example values may be written into them.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torch import Tensor

from forall._compat import pytree
from forall._compat.dispatch_state import functions_off, is_in_backward
from forall._compat.exception_safety import contextmanager
from forall._compat.lazy_bits import keep_lazy_zeros
from forall._compat.op_schema import get_facts
from forall._compat.private_api import DispatchMode
from forall._core.levels import Level, run_outside, set_acting_level, stack, top

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def bind_original_context(function: Callable, *, recomputes: bool = True) -> Callable:
    """Wrap ``function`` so that any later call runs at the level that is active now.

    With ``recomputes`` the call computes the same values again, as a checkpoint does. Otherwise it
    computes something new, as a hook does.
    """
    level = top()
    parts = [*_sub_levels_of(level)] if stack.diverged else []

    def run_in_context(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as place:
            since = find_level_entered_since(level)
            if since is not None:
                place.enter_context(run_outside(since))
            place.enter_context(set_entry_point(level, since, recomputes=recomputes))
            place.enter_context(CreateForLevel(level))
            place.enter_context(keep_lazy_zeros())  # in a pull-back of many at once they pass
            if parts:
                place.enter_context(_ActingSubLevels(parts))
            return function(*args, **kwargs)

    return run_in_context


@contextmanager
def set_entry_point(
    place: Level | None, since: Level | None, *, recomputes: bool
) -> Iterator[None]:
    """Order levels that are entered here as if entered then: see NOTE [inside and outside]."""
    was = stack.place, stack.since, stack.recomputes
    stack.place, stack.since, stack.recomputes = place, since, recomputes and is_in_backward()
    try:
        yield
    finally:
        stack.place, stack.since, stack.recomputes = was


def _sub_levels_of(level: Level | None) -> Iterator[Level]:
    while level is not None:
        if level.root is not level:
            yield level
        level = level.parent


class _ActingSubLevels:
    """Context in which the same sub-levels act as in the first run, where examples had diverged."""

    def __init__(self, parts: list[Level]) -> None:
        self.parts = parts

    def __enter__(self) -> None:
        self.was = [(part.root, part.root.acting_level) for part in self.parts]
        for part in self.parts:
            set_acting_level(part.root, part)
        stack.again += 1

    def __exit__(self, *_: object) -> None:
        stack.again -= 1
        for root, level in self.was:
            set_acting_level(root, level)


def find_level_entered_since(level: Level | None) -> Level | None:
    """The outermost of the active levels that are inside ``level``, or beside it."""
    known = set() if level is None else {level.root, *level.entry.around}
    found, now = None, top()
    while now is not None and now.root not in known:
        found, now = now, now.parent
    return found


def _ended_levels_that_draw(level: Level | None) -> Any:
    while level is not None:
        if level.draws and not level.active:
            yield level
        level = level.parent


class CreateForLevel(ExitStack):
    """Context in which new tensors belong to ``level`` and those around it, even ended ones."""

    def __init__(self, level: Level | None) -> None:
        super().__init__()
        for ended in reversed([*_ended_levels_that_draw(level)]):
            self.enter_context(_FactoryMode(ended))


class _FactoryMode(DispatchMode):
    """A mode that hands random draws and factory functions to a level that has ended.

    Such operators may have no argument from which their level can be seen.
    """

    stays = True  # see `outside`

    def __init__(self, level: Level) -> None:
        super().__init__()
        self.level = level

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not (get_facts(func).seeded or _is_factory(func, args, kwargs)):
            return func(*args, **(kwargs or {}))
        with functions_off():
            return self.level.run(func, args, kwargs or {})


def _is_factory(func: Any, args: tuple, kwargs: dict | None) -> bool:
    """True if an operator is a factory function: its result depends on no tensor's values."""
    name = func.overloadpacket.__name__
    if name.endswith("_like") or name.startswith("new_"):
        return True
    return not any(isinstance(a, Tensor) for a in pytree.get_leaves((args, kwargs)))
