"""Running a user's function once more, later, as checkpoints do in a backward pass.

It runs where it first ran: the levels entered since, a pull-back's among them, have no part in it;
and a level that has ended since still says what a draw of random numbers is, and takes as its own
what is made anew: examples may be written into it.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torch import Tensor

from forall._compat import pytree
from forall._compat.dispatch_state import functions_off, in_backward, users_tangents
from forall._compat.exception_safety import contextmanager
from forall._compat.lazy_bits import lazy_zeros_stay
from forall._compat.op_schema import facts
from forall._compat.private_api import DispatchMode
from forall._core.levels import Level, act, outside, stack, top

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def where_it_first_ran(function: Callable, *, recomputes: bool = True) -> Callable:
    """``function``, which runs at any later time at the level that runs now.

    It ``recomputes`` what it made then, or else something else of the values that it meets.
    """
    level = top()
    parts = [*_parts(level)] if stack.parted else []

    def again(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as place:
            since = entered_since(level)
            if since is not None:
                place.enter_context(outside(since))
            place.enter_context(_counted(level, since, recomputes))
            place.enter_context(as_made_by(level))
            place.enter_context(lazy_zeros_stay())  # in a pull-back of many at once they pass
            if parts:
                place.enter_context(_Acting(parts))
            return function(*args, **kwargs)

    return again


@contextmanager
def _counted(place: Level | None, since: Level | None, recomputes: bool) -> Iterator[None]:
    """What is entered counts as it would have then: see NOTE [inside and outside]."""
    was = stack.place, stack.since, stack.recomputes
    stack.place, stack.since, stack.recomputes = place, since, recomputes and in_backward()
    try:
        yield
    finally:
        stack.place, stack.since, stack.recomputes = was


def _parts(level: Level | None) -> Iterator[Level]:
    while level is not None:
        if level.root is not level:
            yield level
        level = level.parent


class _Acting:
    """The examples run that ran, where they had parted."""

    def __init__(self, parts: list[Level]) -> None:
        self.parts = parts

    def __enter__(self) -> None:
        self.was = [(part.root, part.root.acting) for part in self.parts]
        for part in self.parts:
            act(part.root, part)
        stack.again += 1

    def __exit__(self, *_: object) -> None:
        stack.again -= 1
        for root, level in self.was:
            act(root, level)


def may_carry_tangents() -> bool:
    """Whether forward mode is at work around the code that runs now."""
    level = top()
    while level is not None:
        if level.peels:
            return True
        level = level.parent
    return users_tangents()


def entered_since(level: Level | None) -> Level | None:
    """The outermost of the active levels that are inside ``level``, or beside it."""
    known = set() if level is None else {level.root, *level.around}
    found, now = None, top()
    while now is not None and now.root not in known:
        found, now = now, now.parent
    return found


def _ended(level: Level | None) -> Any:
    while level is not None:
        if level.draws and not level.active:
            yield level
        level = level.parent


class as_made_by(ExitStack):
    """What code of the user's makes is of ``level`` and of those around it, though they ended."""

    def __init__(self, level: Level | None) -> None:
        super().__init__()
        for ended in reversed([*_ended(level)]):
            self.enter_context(_Makes(ended))


class _Makes(DispatchMode):
    """Draws and new tensors of a level that has ended: they may have no argument to tell it by."""

    stays = True  # see `outside`

    def __init__(self, level: Level) -> None:
        super().__init__()
        self.level = level

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not (facts(func).seeded or _is_new(func, args, kwargs)):
            return func(*args, **(kwargs or {}))
        with functions_off():
            return self.level.run(func, args, kwargs or {})


def _is_new(func: Any, args: tuple, kwargs: dict | None) -> bool:
    """Whether an operator makes a tensor without reading any."""
    name = func.overloadpacket.__name__
    if name.endswith("_like") or name.startswith("new_"):
        return True
    return not any(isinstance(a, Tensor) for a in pytree.leaves((args, kwargs)))
