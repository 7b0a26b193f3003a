"""A call of a transform that ends in an exception leaves this thread's state as it found it.

NOTE [an exception between two instructions]
    Each context of ours puts back what it has changed, which serves for errors of the user's. A
    KeyboardInterrupt, or the exception of another signal's handler, may come between any two
    instructions: while a context is entered, or before its ``__exit__`` has done anything. So the
    outermost call keeps what was there before it, in one place, and puts it back where the call
    ends in any exception. What it finds as it was, it leaves alone. A generator that a context is
    made of is closed first: whoever keeps the exception would have it go on later.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch.autograd import forward_ad

from forall._compat.private_api import (
    pop_functions,
    pop_mode,
    push_functions,
    push_mode,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

P = ParamSpec("P")
T = TypeVar("T")

_functions_are_on = torch._C._is_torch_function_enabled
_records = torch.is_grad_enabled
_is_forward_on = torch._C._is_fwd_grad_enabled
_keeps_casts = torch.is_autocast_cache_enabled
_count_modes = torch._C._len_torch_dispatch_stack
_count_functions = torch._C._len_torch_function_stack

_PLACES: list[Any] = []
_IDLE: list[Any] = []
# What else is done, before our own state is put back: told of the modes that were left on, and of
# the level of torch's forward mode that is to be the current one.
PUT_BACK: list[Callable[[list, int], None]] = []


class Here(threading.local):
    """State of a thread that is put back."""

    @classmethod
    def made(cls, *, idle: bool = False) -> Any:
        """The one object of its class, which is put back with all others.

        What is ``idle`` outside of calls has its class's values there, and need not be kept.
        """
        here = cls()
        (_IDLE if idle else _PLACES).append(here)
        return here


class _Now(threading.local):
    before: Any = None  # what the outermost call of this thread has found

    def __init__(self) -> None:
        self.open: list[Any] = []  # generators of contexts that have been entered
        self.dicts: list[dict] = []  # of the objects whose state is put back


_now = _Now()
_guards: list[Any] = []
_ever_called = False


def has_called() -> bool:
    """Whether a transform has been called in this process."""
    return _ever_called


def _entered(guard: Any) -> None:
    """Enter a context of torch's for good: one that is let go puts back what it has changed."""
    guard.__enter__()
    _guards.append(guard)


class _Context(contextlib._GeneratorContextManager):
    def __enter__(self) -> Any:
        _now.open.append(self.gen)
        return super().__enter__()

    def __exit__(self, *error: object) -> Any:
        try:
            return super().__exit__(*error)
        finally:
            if self.gen.gi_frame is None:  # it has put back what it set
                _now.open.remove(self.gen)


def contextmanager(func: Callable[P, Iterator[T]]) -> Callable[P, AbstractContextManager[T]]:
    """`contextlib.contextmanager` for contexts that set state."""

    @functools.wraps(func)
    def made(*args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[T]:
        return _Context(func, args, kwargs)

    return made


def is_inside_call() -> bool:
    """True while an outermost call of this thread restores the state if it fails."""
    return _now.before is not None


def call_and_restore(func: Callable, /, *args: Any, **kwargs: Any) -> Any:
    """``func(*args, **kwargs)``, after which this thread's state is as before if it fails."""
    global _ever_called  # noqa: PLW0603 - of the process, and set once
    _ever_called = True
    try:
        _now.before = _found()
        result = func(*args, **kwargs)
        _now.before = None
    except BaseException:
        before, _now.before = _now.before, None
        if before is not None:
            _put_back(before)
        raise
    return result


def _found() -> tuple:
    """What this thread has set of torch's state and of ours."""
    now = _now
    dicts = now.dicts
    if len(dicts) != len(_PLACES):
        dicts[:] = map(vars, _PLACES)
    return (
        len(now.open),
        _functions_are_on(),
        _records(),
        _is_forward_on(),
        forward_ad._current_level,
        _keeps_casts(),
        modes() if _count_modes() else (),
        functions() if _count_functions() else (),
        [*map(dict.copy, dicts)],
    )


def _put_back(before: tuple) -> None:
    """Put back all that is not as it was."""
    opened, on, grad, forward, level, caches, dispatch, function, ours = before
    while len(_now.open) > opened:
        with contextlib.suppress(Exception):  # of one that finds what others have left
            _now.open.pop().close()
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        left = _back(modes, dispatch, lambda: pop_mode(None), push_mode)
        _back(functions, function, pop_functions, push_functions)
        torch.set_autocast_cache_enabled(caches)
        for tell in PUT_BACK:
            tell(left, level)
        for place in _IDLE:
            vars(place).clear()
        for now, was in zip(_now.dicts, ours, strict=False):
            if now != was:
                now.clear()
                now.update(was)
    if on and not _functions_are_on():
        _entered(torch._C._EnableTorchFunction())
    torch._C._set_grad_enabled(grad)
    torch._C._set_fwd_grad_enabled(forward)


def modes() -> tuple:
    """The dispatch modes that are on, the outermost first."""
    at = torch._C._get_dispatch_stack_at
    return tuple(at(i) for i in range(_count_modes()))


def functions() -> tuple:
    """The function modes that are on, the outermost first."""
    at = torch._C._get_function_stack_at
    return tuple(at(i) for i in range(_count_functions()))


def _back(found: Callable[[], tuple], was: tuple, pop: Callable, push: Callable) -> list:
    """Have the modes on that were; those that were left on."""
    now = found()
    same = 0
    for a, b in zip(now, was, strict=False):
        if a is not b:
            break
        same += 1
    for _ in now[same:]:
        pop()
    for mode in was[same:]:
        push(mode)
    return [*now[same:]]
