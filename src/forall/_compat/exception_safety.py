"""Restoration of this thread's state if a call of a transform ends in an exception.

NOTE [an exception between two instructions]
    Each context of forall restores the state that it has changed, which suffices for errors of the
    user's code. A KeyboardInterrupt, or the exception of another signal handler, may come between
    any two instructions. It may come while a context is entered, or before its ``__exit__`` has
    done anything.

    So the outermost call takes a snapshot of the state before it, and restores it if the call ends
    in any exception. State that is unchanged is left alone. Generators of contexts are closed
    first: they would otherwise continue when the exception is freed.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch.autograd import forward_ad

from forall._compat.private_api import (
    count_dispatch_modes,
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
_count_functions = torch._C._len_torch_function_stack

_PLACES: list[Any] = []
_IDLE: list[Any] = []
# Functions called before forall's own state is restored, with the modes that were left on and
# the level of torch's forward mode that is to be current.
PUT_BACK: list[Callable[[list, int], None]] = []


class RestoredState(threading.local):
    """The base of thread-local state that is restored."""

    @classmethod
    def make_instance(cls, *, idle: bool = False) -> Any:
        """Create the one object of its class, which is restored with all others.

        State that is ``idle`` has its class's values outside of calls, and is not saved.
        """
        here = cls()
        (_IDLE if idle else _PLACES).append(here)
        return here


class _OpenCalls(threading.local):
    before: Any = None  # the state before the outermost call of this thread

    def __init__(self) -> None:
        self.open: list[Any] = []  # generators of contexts that have been entered
        self.dicts: list[dict] = []  # of the objects whose state is put back


_now = _OpenCalls()
_guards: list[Any] = []
_ever_called = False


def has_called_transform() -> bool:
    """Return True if a transform has been called in this process."""
    return _ever_called


def _enter_for_good(guard: Any) -> None:
    """Enter a context of torch's for good, and keep it: dropping it would undo its change."""
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
            if self.gen.gi_frame is None:  # it has restored the state
                _now.open.remove(self.gen)


def contextmanager(func: Callable[P, Iterator[T]]) -> Callable[P, AbstractContextManager[T]]:
    """Return a context manager as `contextlib.contextmanager` does, for contexts that set state."""

    @functools.wraps(func)
    def make_context(*args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[T]:
        return _Context(func, args, kwargs)

    return make_context


def is_inside_call() -> bool:
    """True while an outermost call of this thread restores the state if it fails."""
    return _now.before is not None


def call_and_restore(func: Callable, /, *args: Any, **kwargs: Any) -> Any:
    """Return ``func(*args, **kwargs)``; restore this thread's state if that raises."""
    global _ever_called  # noqa: PLW0603 - of the process, and set once
    _ever_called = True
    try:
        _now.before = _take_snapshot()
        result = func(*args, **kwargs)
        _now.before = None
    except BaseException:
        before, _now.before = _now.before, None
        if before is not None:
            _restore_snapshot(before)
        raise
    return result


def _take_snapshot() -> tuple:
    """Return this thread's state of torch and of forall."""
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
        list_dispatch_modes() if count_dispatch_modes() else (),
        list_function_modes() if _count_functions() else (),
        [*map(dict.copy, dicts)],
    )


def _restore_snapshot(before: tuple) -> None:
    """Restore all state that has changed."""
    opened, on, grad, forward, level, caches, dispatch, function, ours = before
    while len(_now.open) > opened:
        with contextlib.suppress(Exception):  # its state may have been changed by others
            _now.open.pop().close()
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        left = _restore_modes(list_dispatch_modes, dispatch, lambda: pop_mode(None), push_mode)
        _restore_modes(list_function_modes, function, pop_functions, push_functions)
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
        _enter_for_good(torch._C._EnableTorchFunction())
    torch._C._set_grad_enabled(grad)
    torch._C._set_fwd_grad_enabled(forward)


def list_dispatch_modes() -> tuple:
    """Return the dispatch modes that are on, the outermost first."""
    at = torch._C._get_dispatch_stack_at
    return tuple(at(i) for i in range(count_dispatch_modes()))


def list_function_modes() -> tuple:
    """Return the function modes that are on, the outermost first."""
    at = torch._C._get_function_stack_at
    return tuple(at(i) for i in range(_count_functions()))


def _restore_modes(found: Callable[[], tuple], was: tuple, pop: Callable, push: Callable) -> list:
    """Restore a stack of modes; return those that were left on."""
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
