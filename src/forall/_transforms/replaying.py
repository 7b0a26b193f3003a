"""Transformed functions that are called often become programs; see `_programs.replay`.

NOTE [one count for all wrappers]
    ``grad(f)(x)`` in a loop makes a wrapper for each call. What they share is kept with ``f``: in
    the attributes of a function of the user's or of a module, or with the calls of ``f`` where
    that is a wrapper of ours. A method of a module is a new object each time it is asked for: its
    calls are kept with the module. It holds nothing of ``f``, so a function that is dropped goes
    at once, as ever; one that has been replayed is held by its own program, until the next garbage
    collection. Other objects may read what attributes they have, and a table beside them would
    hold them for good: nothing is kept with these.
"""

from __future__ import annotations

import functools
from time import perf_counter
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any
from weakref import ref

from torch.nn import Module

from forall._core import config
from forall._core.levels import stack
from forall._torch import handover
from forall._torch.dispatch import dispatch_modes
from forall._transforms import anew
from forall._transforms.chunking import Chunks

if TYPE_CHECKING:
    from collections.abc import Callable

    from forall._programs.replay import Replays

_CALLS = 2  # of a function before it is looked at, however long they take
_MOST = 16  # transforms of one function that are counted together


class Calls:
    """The calls of a transformed function so far, and of what is made of it."""

    __slots__ = ("count", "further", "held", "of", "replays", "spent")

    def __init__(self, held: tuple | None = None) -> None:
        self.held = held  # by a function that is made anew with each call
        self.of: Any = None  # the one of these that was transformed
        self.count = 0
        self.spent = 0.0
        self.replays: Replays | None = None
        self.further: dict[Any, Calls] = {}

    def run(self, eager: Callable, args: tuple, kwargs: dict) -> Any:
        if self.replays is not None:
            return self.replays.run(args, kwargs)
        if config.now.replay == "check":
            return self._looked_at(eager).run(args, kwargs)
        start = perf_counter()
        result = eager(*args, **kwargs)
        self.spent += perf_counter() - start
        self.count += 1
        if self.count >= _CALLS and self.spent >= config.now.patience:
            self._looked_at(eager)
        return result

    def run_as(self, func: Any, eager: Callable, args: tuple, kwargs: dict) -> Any:
        """`run`, for ``func`` or a transform of it."""
        if self.held is not None:
            func = getattr(func, "__forall_root__", func)
            if self.replays is None:
                self.of = func
            if not (anew.holds(func, self.held) and anew.holds(self.of, self.held)):
                return eager(*args, **kwargs)
        return self.run(eager, args, kwargs)

    def told(self, eager: Callable) -> str:
        """How the calls are replayed, or why not; nothing where that is not known yet."""
        replays = self._looked_at(eager) if self.replays is None else self.replays
        why = replays.doubt()
        if why is not None:
            return f"no: {why}"
        return f"{replays.hits} calls so far" if replays.hits else ""

    def _looked_at(self, eager: Callable) -> Replays:
        from forall._programs.replay import Replays  # with all that records, which is much

        self.replays = Replays(eager)
        return self.replays


class _Further:
    """The calls of transforms of a function or module of the user's."""

    __slots__ = ("calls", "of")

    def __init__(self, owner: FunctionType | Module) -> None:
        self.of = ref(owner)  # attributes are copied to others (functools.wraps, copy.copy)
        self.calls: dict[Any, Calls] = {}

    def __reduce__(self) -> tuple:
        return type(None), ()  # with what is copied or pickled; who reads that need not have forall


def _nothing() -> None: ...


def is_on() -> bool:
    """Whether a call that begins now may be replayed.

    Not inside a transform, which has the whole call to replay, and may pull back many at once.
    """
    if not config.now.replay or stack.top is not None or stack.reversing:
        return False
    return not handover.needed()


def calls_of(func: Callable, *how: Any) -> Calls:
    """The calls of a transform of ``func``, told from others by ``how``, whoever has made it."""
    if not is_on() or dispatch_modes():  # a function that is recorded is to stay as it is
        return Calls()
    try:
        key = _key(how)
    except TypeError:
        return Calls()
    kept, key, held = _place(func, key)
    calls = kept.get(key)
    if calls is None:
        calls = Calls(held)
        if len(kept) >= (anew.MOST if kept is anew.table else _MOST):
            if held is None:
                return calls
            kept.pop(next(iter(kept)), None)  # who holds a number that counts is ever another
        kept[key] = calls
    return calls


def _place(func: Any, key: Any) -> tuple[dict[Any, Calls], Any, tuple | None]:
    """Where its calls are kept, under which key, and what it holds if it is made anew."""
    if type(func) is MethodType and isinstance(func.__self__, Module):
        return _kept(func.__self__), (func.__func__, key), None
    if type(func) is FunctionType:
        if func.__code__ is _OURS:
            calls = vars(func)["__forall_calls__"]
            return calls.further, key, calls.held
        held = anew.held(func)
        if held is not None:
            home = anew.home(held)
            return anew.table if home is None else _kept(home), (*map(id, held), key), held
    return _kept(func), key, None


def replayed(func: Callable) -> Callable:
    """The function itself, which is replayed where its calls can be: one node of a graph each."""
    if not is_on():
        return func
    calls = calls_of(func)
    return lambda *args: calls.run_as(func, func, args, {})


def _key(value: Any) -> Any:
    """Equal where two values say the same: 1, 1.0 and True do not."""
    if isinstance(value, tuple):
        return tuple(map(_key, value))
    if value is None or isinstance(value, (int, str, Chunks)):
        return type(value), value
    raise TypeError


def _kept(owner: Any) -> dict[Any, Calls]:
    if not isinstance(owner, (FunctionType, Module)):
        return {}
    kept = vars(owner).get("__forall_further__")
    if type(kept) is not _Further or kept.of() is not owner:
        kept = vars(owner)["__forall_further__"] = _Further(owner)
    return kept.calls


def replaying(func: Callable, *how: Any) -> Callable[[Callable], Callable]:
    """A transform of ``func``, under the name of ``func``, and replayed where it can be.

    ``how`` says all that the transform was given besides.
    """

    def decorated(eager: Callable) -> Callable:
        calls = calls_of(func, *how) if how else Calls()

        @functools.wraps(func, updated=())
        def transformed(*args: Any, **kwargs: Any) -> Any:
            if is_on():
                return calls.run_as(func, eager, args, kwargs)
            return eager(*args, **kwargs)

        vars(transformed)["__forall_calls__"] = calls
        vars(transformed)["__forall_root__"] = getattr(func, "__forall_root__", func)
        vars(transformed)["__forall_eager__"] = eager  # what `explain` asks for
        return transformed

    return decorated


_OURS = getattr(replaying(_nothing)(_nothing), "__code__")  # noqa: B009 - a Callable has none
