"""State of this thread that is restored if a call of a transform ends in an exception.

NOTE [an exception between two instructions]
    Each context of forall restores the state that it has changed, which suffices for errors of the
    user's code. A KeyboardInterrupt, or the exception of another signal handler, may come between
    any two instructions. It may come while a context is entered, or before its ``__exit__`` has
    done anything.

    So the outermost call (`transform_call`) takes a snapshot of the state before it, and restores
    it if the call ends in any exception. State that is unchanged is left alone. Generators of
    contexts are closed first: they would otherwise continue when the exception is freed.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch

from forall._compat.private_api import count_all_function_modes, count_dispatch_modes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

P = ParamSpec("P")
T = TypeVar("T")


PLACES: list[Any] = []
IDLE: list[Any] = []
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
        (IDLE if idle else PLACES).append(here)
        return here


class _OpenCalls(threading.local):
    before: Any = None  # the state before the outermost call of this thread

    def __init__(self) -> None:
        self.open: list[Any] = []  # generators of contexts that have been entered
        self.dicts: list[dict] = []  # of the objects whose state is put back


class _FirstCall:
    """A flag: True once a transform was called in this process."""

    was_made = False


open_calls, first_call = _OpenCalls(), _FirstCall()


class _Context(contextlib._GeneratorContextManager):
    def __enter__(self) -> Any:
        open_calls.open.append(self.gen)
        return super().__enter__()

    def __exit__(self, *error: object) -> Any:
        try:
            return super().__exit__(*error)
        finally:
            if self.gen.gi_frame is None:  # it has restored the state
                open_calls.open.remove(self.gen)


def contextmanager(func: Callable[P, Iterator[T]]) -> Callable[P, AbstractContextManager[T]]:
    """Return a context manager as `contextlib.contextmanager` does, for contexts that set state."""

    @functools.wraps(func)
    def make_context(*args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[T]:
        return _Context(func, args, kwargs)

    return make_context


def list_dispatch_modes() -> tuple:
    """Return the dispatch modes that are on, the outermost first."""
    at = torch._C._get_dispatch_stack_at
    return tuple(at(i) for i in range(count_dispatch_modes()))


def list_function_modes() -> tuple:
    """Return the function modes that are on, the outermost first."""
    at = torch._C._get_function_stack_at
    return tuple(at(i) for i in range(count_all_function_modes()))
