"""The calls of transformed functions, of which those that are made often are recorded.

NOTE [one count for all wrappers]
    ``grad(f)(x)`` in a loop makes a wrapper for each call. The wrappers share one count of calls,
    which is kept with ``f``. If ``f`` is a user's function or a module, the count is in its
    attributes; if it is a wrapper of forall's, with its calls. A method of a module is a new object
    each time it is read, so its calls are kept with the module.

    The count refers to nothing of ``f``: a function that is dropped is freed at once, as ever. A
    function that has been recorded is held by its own program, until the next garbage collection.
    Attributes of other objects may be inspected by other code, so nothing is put there, see
    `fresh_closures`.
"""

from __future__ import annotations

import functools
import gc
import sys
from importlib import import_module
from time import perf_counter
from types import CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any
from weakref import ref

from torch.nn import Module

from forall._api.execution.function_record import get_record
from forall._api.execution.transform_decorator import (
    BoundCalls,
    can_replay,
    find_transform,
    slot,
)
from forall._auto_replay import fresh_closures
from forall._auto_replay.attempt_budget import disable_gc
from forall._compat.private_api import count_dispatch_modes
from forall._compat.transform_call import call_transform
from forall._core import config
from forall._jit.deadline import clock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forall._auto_replay.policy import AutoReplayCache

_CALLS = 2  # of a function before it is analysed, however long they take
_MOST = 16  # transforms of one function that are counted together
_RECORDS = (  # the modules that record and replay, with all they import
    "forall._jit.tracing.tracer",
    "forall._jit.guards.build",
    "forall._auto_replay.purity",
    "forall._jit.passes.pipeline",
    "forall._jit.tracing.trace_call",
    "forall._auto_replay.policy",
)
_AT_ONCE = 0.02  # seconds of one call that go into importing these


class Calls:
    """The calls of a transformed function so far, and the programs recorded from them."""

    __slots__ = ("count", "further", "home", "replays", "same", "spent")

    def __init__(self, same: list | None = None, home: _OwnedCalls | None = None) -> None:
        self.same = same  # the key of fresh closures; kept alive, because its ids are in use
        self.home = home  # drops the calls when a user's object dies
        self.count = 0
        self.spent = 0.0
        self.replays: AutoReplayCache | None = None
        self.further: dict[Any, Calls] = {}

    def run(self, func: Any, given: list | None, eager: Callable, args: tuple, kwargs: dict) -> Any:
        """Return ``eager(func, *args, **kwargs)``, replayed if it can be.

        ``given`` are the bound values of ``func`` if it is a fresh closure.
        """
        replays = self.replays
        if self.home is not None:
            self.home.is_used = True
        if replays is None and config.now.replay == "check":
            replays = self._make_replays(func, eager)
        if replays is not None:
            instead = functools.partial(call_transform, eager, func, *args, **kwargs)
            return replays.run((given, *args) if given else args, kwargs, instead)
        start = perf_counter()
        result = call_transform(eager, func, *args, **kwargs)
        self.spent += perf_counter() - start
        self.count += 1
        if self.count >= _CALLS and self.spent >= config.now.patience and _import_recorder():
            self._make_replays(func, eager)
        return result

    def __reduce__(self) -> tuple:
        return Calls, ()  # programs stay where they were recorded

    @property
    def hits(self) -> int:
        """The number of calls that were replayed."""
        return 0 if self.replays is None else self.replays.hits

    def skips_call(self) -> bool:
        """Return True if the next call is eager without a look, and count it."""
        replays = self.replays
        return replays is not None and replays.newest is None and replays.skips_call()

    def may_replay(self) -> bool:
        """Return True if the next call may be replayed, or recorded."""
        replays = self.replays
        return replays is not None and (replays.newest is not None or replays.attempts.rest <= 0)

    def has_doubts(self) -> bool:
        """Return True if it is known that no call will be replayed."""
        return self.replays is not None and self.replays.find_obstacle() is not None

    def find_obstacle(self, func: Any, eager: Callable) -> None:
        """Read ``func`` for what keeps its calls from being replayed, unless that was done."""
        if self.replays is None:
            self._make_replays(func, eager)

    def describe_replay(self) -> str:
        """Describe how the calls are replayed, or why not; "" if that is not known yet."""
        replays = self.replays
        if replays is None:
            return ""
        why = replays.find_obstacle() or replays.find_futility()
        if why is not None:
            return f"no: {why}"
        return f"{replays.hits} calls so far" if replays.hits else ""

    def describe_program(self, name: str, args: tuple, kwargs: dict, *, is_replayed: bool) -> str:
        """Return the listing of the newest recorded program; "" if there is none.

        The arguments are those of the last call, which ran that program if ``is_replayed``.
        """
        newest = None if self.replays is None else self.replays.newest
        if newest is None:
            return ""
        from forall._jit.cache import cache_info  # it imports the recorder, which takes long

        arguments = cache_info.describe_arguments(args, kwargs) if is_replayed else ".."
        return cache_info.describe_entry(name, newest, arguments).text

    def _make_replays(self, func: Any, eager: Callable) -> AutoReplayCache | None:
        # It imports the recorder, which takes long.
        from forall._auto_replay.policy import AutoReplayCache

        if self.same is None:
            self.replays = AutoReplayCache(functools.partial(eager, func))
        else:
            try:
                template = fresh_closures.rebuild_closure(func)
            except fresh_closures.CannotShare:  # a call of it has freed a graph
                return None
            run = functools.partial(_call_template, eager, template)
            if fresh_closures.BoundValue not in self.same:
                run = functools.partial(run, ())
            in_table = self.home is not None and self.home.kept is fresh_closures.table
            leave = self.home.hold if in_table else None
            copied = any(isinstance(x, CodeType) for x in self.same)
            self.replays = AutoReplayCache(run, leave, stands_in=copied)
        return self.replays


def _import_recorder() -> bool:
    """Import the recorder, a part of it with each call; return True once all is imported."""
    missing = [name for name in _RECORDS if name not in sys.modules]
    if not missing:
        return True
    start = clock()
    with disable_gc():
        while missing and clock() - start < _AT_ONCE:
            import_module(missing.pop(0))
    return not missing


def _call_template(
    eager: Callable, template: Any, given: Sequence, /, *args: Any, **kwargs: Any
) -> Any:
    return eager(fresh_closures.rebuild_closure(template, iter(given)), *args, **kwargs)


_holding: dict[int, _OwnedCalls] = {}


class _OwnedCalls:
    """The calls that depend on objects of the user's, which are dropped when one of these dies."""

    __slots__ = ("is_used", "kept", "key", "objects", "same")

    def __init__(self, kept: dict, key: Any, made: fresh_closures.FreshClosure) -> None:
        self.kept, self.key, self.same = kept, key, made.same
        self.objects = [ref(x(), self._drop_calls) for x in made.objects()]
        self.is_used = False  # since the last full collection

    # A default, since objects may also die after the interpreter has cleared this module.
    def _drop_calls(self, _: ref, holding: dict[int, _OwnedCalls] = _holding) -> None:
        self.kept.pop(self.key, None)
        holding.pop(id(self), None)

    def hold(self) -> None:
        """Note that a program will hold the objects, which must die once the program is unused."""
        if not _holding and _drop_unused_calls not in gc.callbacks:
            gc.callbacks.append(_drop_unused_calls)
        _holding[id(self)] = self


def _drop_unused_calls(phase: str, info: dict[str, int]) -> None:
    """Drop programs that hold objects of the user's, and had no call since the last collection.

    Python calls this before and after a garbage collection; the objects may then be collected.
    """
    if phase != "start" or info["generation"] < _FULL:
        return
    for home in [*_holding.values()]:
        if not home.is_used:
            home.kept.pop(home.key, None)
            _holding.pop(id(home), None)
        home.is_used = False


_FULL = 2  # the generation of a full collection


class CallFinder:
    """Finds the calls of the transform of ``func`` with this ``key``."""

    __slots__ = ("_own", "func", "key")

    def __init__(self, func: Any, key: Any) -> None:
        self.func, self.key = func, key
        self._own: Calls | None = None  # of this transform alone, which nothing else refers to

    def find_fixed(self) -> BoundCalls | None:
        """Return the calls if they stay the same; None if they are to be found for each call."""
        if self.key is None or not can_replay():
            return BoundCalls(Calls(), None)
        if fresh_closures.may_be_fresh_closure(self.func):
            return None
        return self._look_up(is_fresh=False)

    def find(self) -> BoundCalls:
        """Return the calls, and the bound values of ``func`` if it is a fresh closure."""
        if self.key is None or not can_replay():
            return BoundCalls(Calls(), None)
        return self._look_up()

    def _look_up(self, *, is_fresh: bool = True) -> BoundCalls:
        func, key = self.func, self.key
        if count_dispatch_modes():  # a mode sees all operators
            return BoundCalls(Calls(), None)
        is_function = type(func) is FunctionType
        if type(func) is MethodType and isinstance(func.__self__, Module):
            kept, key = get_record(func.__self__).calls, (func.__func__, key)
            return BoundCalls(_get_calls(kept, key, fresh_closures.MOST), None)
        how = find_transform(func)
        if is_fresh or not is_function or how is not None:
            made = fresh_closures.read_fresh_closure(func)
            if made is not None:
                return BoundCalls(_get_closure_calls(made, key), made.given)
        if how is not None:
            return BoundCalls(_get_calls(how.calls().further, key, _MOST), None)
        if is_function or isinstance(func, Module):
            most = _MOST if is_function else fresh_closures.MOST
            return BoundCalls(_get_calls(get_record(func).calls, key, most), None)
        self._own = self._own or Calls()
        return BoundCalls(self._own, None)


def _get_calls(kept: dict[Any, Calls], key: Any, most: int) -> Calls:
    calls = kept.get(key)
    if calls is None:
        calls = Calls()
        if len(kept) < most:
            kept[key] = calls
    return calls


def _get_closure_calls(made: fresh_closures.FreshClosure, key: Any) -> Calls:
    """Return the calls of all fresh closures with these parts."""
    kept = made.kept
    if kept is None:
        module = made.home()
        kept = fresh_closures.table if module is None else get_record(module).calls
    key = (*map(id, made.same), key)
    calls = kept.get(key)
    if calls is None:
        home = _OwnedCalls(kept, key, made) if made.objects() else None
        if len(kept) >= fresh_closures.MOST:
            kept.pop(next(iter(kept)), None)  # the oldest, of functions no longer created
        calls = kept[key] = Calls(made.same, home)
    return calls


def install() -> None:
    """Fill the slot of the transforms' decorator, so that calls are replayed."""
    slot.make_finder = CallFinder


def get_transform_calls(transformed: Callable) -> Calls:
    """Return the calls of a transformed function so far."""
    return vars(transformed)["__forall_transform__"].calls()
