"""The decorator of all transforms: a transformed function that is called often is recorded.

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
import operator
import sys
from dataclasses import fields
from importlib import import_module
from time import perf_counter
from types import CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol
from weakref import ref

from torch.compiler import is_dynamo_compiling as is_compiling
from torch.nn import Module

from forall._api import dynamo_call
from forall._api.chunk_size import Chunks
from forall._api.execution import fresh_closures
from forall._compat import functorch_interop, profiler
from forall._compat.private_api import count_dispatch_modes
from forall._compat.trace_modes import is_pre_dispatch_tracing
from forall._compat.transform_call import call_transform
from forall._core import config
from forall._core.errors import TransformCall
from forall._core.levels import stack
from forall._jit.search_budget import clock, disable_gc

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forall._api.execution.side_effect_free import Bindings
    from forall._jit.auto.policy import AutoReplayCache

_CALLS = 2  # of a function before it is analysed, however long they take
_TIMED = 16  # replayed calls that are timed
_LOOKED_AT_AGAIN = 256  # calls after which a function with side effects is read again
_MOST = 16  # transforms of one function that are counted together
_RECORDS = tuple(  # the modules that record and replay, with all they import
    f"forall._jit.{name}"
    for name in (
        "tracing.tracer",
        "guards.build",
        "auto.purity",
        "passes.pipeline",
        "tracing.trace_call",
        "auto.policy",
    )
)
_AT_ONCE = 0.02  # seconds of one call that go into importing these


class CheaperCalls(Protocol):
    """Calls of one function that need no checks, as `loop_or_batch.SettledCalls` has them."""

    codes: ClassVar[int]
    unknown: int  # the value of ``codes`` when this function was found to have no such calls

    def find(self, args: tuple) -> Any:
        """Return what is known of a call with these arguments; None if it needs checks."""
        ...

    def run(self, args: tuple, known: Any, calls: Calls | None) -> Any:
        """Return the results of a call of which this is known."""
        ...


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
            replays = self.make_replays(func, eager)
        if replays is not None:
            instead = functools.partial(call_transform, eager, func, *args, **kwargs)
            return replays.run((given, *args) if given else args, kwargs, instead)
        start = perf_counter()
        result = call_transform(eager, func, *args, **kwargs)
        self.spent += perf_counter() - start
        self.count += 1
        if self.count >= _CALLS and self.spent >= config.now.patience and _import_recorder():
            self.make_replays(func, eager)
        return result

    def __reduce__(self) -> tuple:
        return Calls, ()  # programs stay where they were recorded

    @property
    def hits(self) -> int:
        """The number of calls that were replayed."""
        return 0 if self.replays is None else self.replays.hits

    def may_replay(self) -> bool:
        """Return True if the next call may be replayed, or recorded."""
        replays = self.replays
        return replays is not None and (replays.newest is not None or replays.attempts.rest <= 0)

    def has_doubts(self) -> bool:
        """Return True if it is known that no call will be replayed."""
        return self.replays is not None and self.replays.find_obstacle() is not None

    def describe_replay(self) -> str:
        """Describe how the calls are replayed, or why not; "" if that is not known yet."""
        replays = self.replays
        if replays is None:
            return ""
        why = replays.find_obstacle()
        if why is not None:
            return f"no: {why}"
        return f"{replays.hits} calls so far" if replays.hits else ""

    def make_replays(self, func: Any, eager: Callable) -> AutoReplayCache:
        from forall._jit.auto.policy import (
            AutoReplayCache,  # it imports the recorder, which takes long
        )

        if self.same is None:
            self.replays = AutoReplayCache(functools.partial(eager, func))
        else:
            run = functools.partial(_call_template, eager, fresh_closures.rebuild_closure(func))
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


class _OwnedCalls:
    """The calls that depend on objects of the user's, which are dropped when one of these dies."""

    __slots__ = ("is_used", "kept", "key", "objects", "same")

    def __init__(self, kept: dict, key: Any, made: fresh_closures.FreshClosure) -> None:
        self.kept, self.key, self.same = kept, key, made.same
        self.objects = [ref(x(), self._drop_calls) for x in made.objects()]
        self.is_used = False  # since the last full collection

    def _drop_calls(self, _: ref) -> None:
        self.kept.pop(self.key, None)
        _holding.pop(id(self), None)

    def hold(self) -> None:
        """Note that a program will hold the objects, which must die once the program is unused."""
        if not _holding and _drop_unused_calls not in gc.callbacks:
            gc.callbacks.append(_drop_unused_calls)
        _holding[id(self)] = self


_holding: dict[int, _OwnedCalls] = {}


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


class _FunctionCalls:
    """The calls of all transforms of a user's function or module, and its pure bindings."""

    __slots__ = ("bindings", "calls", "doubts", "of")

    def __init__(self, owner: FunctionType | Module) -> None:
        self.of = ref(owner)  # attributes are copied to others (functools.wraps, copy.copy)
        self.calls: dict[Any, Calls] = {}
        self.bindings: Bindings | None = None  # if it only computes
        self.doubts = 0  # calls until it is read again, if it had side effects

    def __reduce__(self) -> tuple:
        return type(None), ()  # copied or pickled with its owner; a reader may not have forall


def can_replay() -> bool:
    """Return True if a call that begins now may be replayed.

    Not inside a transform: the outermost one replays the whole call, or pulls back many at once.
    """
    if is_compiling() or not config.now.replay or stack.top is not None or stack.reversing:
        return False
    return not functorch_interop.must_hand_over() and not is_pre_dispatch_tracing()


class _BoundCalls(NamedTuple):
    """The calls of a function, and its bound values if it is a fresh closure."""

    calls: Calls
    given: list | None


def _find_calls(func: Any, key: Any, own: Calls | None = None) -> _BoundCalls:
    """Find the calls of the transform of ``func`` with this ``key``.

    ``own`` are the calls of one such transform, which nothing else refers to.
    """
    if key is None or not can_replay() or count_dispatch_modes():  # a mode must see all operators
        return _BoundCalls(Calls(), None)
    if type(func) is MethodType and isinstance(func.__self__, Module):
        return _BoundCalls(
            _get_calls(_get_calls_by_key(func.__self__), (func.__func__, key), fresh_closures.MOST),
            None,
        )
    made = fresh_closures.read_fresh_closure(func)
    if made is not None:
        return _BoundCalls(_get_closure_calls(made, key), made.given)
    how = fresh_closures.find_transform(func)
    if how is not None:
        return _BoundCalls(_get_calls(how.calls().further, key, _MOST), None)
    if not isinstance(func, (FunctionType, Module)):
        return _BoundCalls(own or Calls(), None)
    most = fresh_closures.MOST if isinstance(func, Module) else _MOST
    return _BoundCalls(_get_calls(_get_calls_by_key(func), key, most), None)


def _get_calls(kept: dict[Any, Calls], key: Any, most: int) -> Calls:
    calls = kept.get(key)
    if calls is None:
        calls = Calls()
        if len(kept) < most:
            kept[key] = calls
    return calls


def _get_closure_calls(made: fresh_closures.FreshClosure, key: Any) -> Calls:
    """Return the calls of all fresh closures with these parts."""
    module = made.home()
    kept: dict[Any, Any] = fresh_closures.table if module is None else _get_calls_by_key(module)
    key = (*map(id, made.same), key)
    calls = kept.get(key)
    if calls is None:
        home = _OwnedCalls(kept, key, made) if made.objects() else None
        if len(kept) >= fresh_closures.MOST:
            kept.pop(next(iter(kept)), None)  # the oldest, of functions no longer created
        calls = kept[key] = Calls(made.same, home)
    return calls


def call_or_replay(
    verb: str, func: Callable, eager: Callable, args: tuple, options: dict[str, Any]
) -> Any:
    """Return ``eager(func, *args, **options)``, replayed if it can be."""
    if options:
        eager = functools.partial(eager, **options)
    if not can_replay():
        return call_transform(eager, func, *args)
    calls, given = _find_calls(func, _make_point_key(verb, options))
    return calls.run(func, given, eager, args, {})


def make_replayable(func: Callable) -> Callable:
    """Return the function with calls that are replayed if they can be, one autograd node each."""
    if not can_replay():
        return func
    calls, given = _find_calls(func, _OF_FUNCTION)
    return lambda *args: calls.run(func, given, operator.call, args, {})


def find_point_calls(verb: str, func: Callable, options: dict[str, Any]) -> Calls:
    """Return the calls of ``func`` that `vjp`, `jvp` or `linearize` replays."""
    return _find_calls(
        func, _OF_FUNCTION if verb == "vjp" else _make_point_key(verb, options)
    ).calls


def _make_point_key(verb: str, options: dict[str, Any]) -> Any:
    return _read((verb, *options.items()))[0]


_OF_FUNCTION = ()  # the key of calls of a function itself, which `make_replayable` replays


def _make_transform_key(how: tuple) -> Any:
    """Return a key that is equal for equal options; None if an option has no key."""
    try:
        return _make_value_key(how)
    except TypeError:
        return None


def _make_value_key(value: Any) -> Any:
    kind = type(value)
    if kind is tuple:
        return tuple(map(_make_value_key, value))
    if kind is list:
        return kind.__name__, *map(_make_value_key, value)
    if kind is dict:
        return kind.__name__, *[
            (_make_value_key(name), _make_value_key(x)) for name, x in value.items()
        ]
    if value is None or kind in _WORDS:
        return kind.__name__, value  # 1 and True are not the same
    if kind is Chunks:
        return kind.__name__, *[_make_value_key(getattr(value, f.name)) for f in fields(Chunks)]
    raise TypeError


_WORDS = frozenset({bool, int, str})
_UNTOLD: Any = object()  # among a template's options, so that it has no key


def _read(how: tuple) -> tuple[Any, bool]:
    """Return the key of a transform's options, and True if these may change.

    Some programs make a transform for each call, with the very same options each time.
    """
    marks = tuple([id(y) for x in how for y in (x if type(x) is tuple else (x,))])
    known = _reads.get(marks)
    if known is not None:
        return known.key, False
    key, may_change = _make_transform_key(how), _has_mutable_options(how)
    if key is not None and _is_of_words(how):
        if len(_reads) >= _MOST_READS:
            _reads.clear()
        _reads[marks] = _Read(how, key)
    return key, may_change


class _Read(NamedTuple):
    """Options, held so that no others get their ids, and their key."""

    how: tuple
    key: Any


_reads: dict[tuple, _Read] = {}
_MOST_READS = 1000


def _is_of_words(value: Any) -> bool:
    """Return True for options that never change."""
    if type(value) is tuple:
        return all(map(_is_of_words, value))
    return value is None or type(value) in _WORDS


def _has_mutable_options(value: Any) -> bool:
    """Return True if the options hold a list or dict, which the transform reads in each call."""
    if type(value) is tuple:
        return any(map(_has_mutable_options, value))
    return type(value) in (list, dict)


def _get_calls_by_key(owner: FunctionType | Module) -> dict[Any, Calls]:
    return _get_function_calls(owner).calls


def _get_function_calls(owner: FunctionType | Module) -> _FunctionCalls:
    kept = vars(owner).get("__forall_further__")
    if type(kept) is not _FunctionCalls or kept.of() is not owner:
        kept = vars(owner)["__forall_further__"] = _FunctionCalls(owner)
    return kept


def find_bindings(func: Any) -> Bindings | None:
    """Return the bindings of a function that only computes; None for any other.

    The function is read once, and again if one of its names is bound to something else.
    """
    if type(func) is not FunctionType:
        return None
    kept = _get_function_calls(func)
    if kept.bindings is not None:
        if kept.bindings.hold(func):
            return kept.bindings
        kept.bindings = None
    elif kept.doubts > 0:
        kept.doubts -= 1
        return None
    # Its tables take time to import, and in most programs no examples diverge.
    from forall._api.execution.side_effect_free import find_pure_bindings

    kept.bindings = find_pure_bindings(func)
    if kept.bindings is None:
        kept.doubts = _LOOKED_AT_AGAIN
    return kept.bindings


def replay_transform(
    func: Callable,
    how: tuple = (),
    settled: CheaperCalls | None = None,
    alone: Callable | None = None,
) -> Callable[[Callable], Callable]:
    """Return a decorator for a transform of ``func``, which is replayed if it can be.

    ``how`` are the transform's name and options, see NOTE [the key of a transform]. The decorated
    function runs one call of the function that is its first argument. ``settled`` runs calls that
    need no checks, while nothing is replayed. ``alone`` does the same by torch.autograd, for
    ordinary tensors without history.
    """
    return functools.partial(_make_transformed, func, how, settled=settled, alone=alone)


def _make_transformed(
    func: Callable,
    how: tuple,
    eager: Callable,
    *,
    settled: CheaperCalls | None = None,
    alone: Callable | None = None,
) -> Callable:
    verb = how[0] if how else ""

    def call_traced(*args: Any, **kwargs: Any) -> Any:
        """Run the call where Dynamo traces it."""
        if verb in dynamo_call.VERBS and not functorch_interop.must_hand_over():
            options = dict([x for x in how[1:] if x is not _UNTOLD])
            return dynamo_call.call_transform(verb, options, func, args, kwargs)
        return eager(func, *args, **kwargs)

    if is_compiling():
        return call_traced
    key, may_change = _read(how)
    asked = key is not None and can_replay() and fresh_closures.may_be_fresh_closure(func)
    own = None if isinstance(func, (FunctionType, Module)) else Calls()
    fixed = None if asked else _find_calls(func, key, own)
    last: Calls | None = None

    @functools.wraps(func, updated=())
    def call_transformed(*args: Any, **kwargs: Any) -> Any:
        nonlocal last
        if is_compiling():
            return call_traced(*args, **kwargs)
        known = span = quiet = None
        if functorch_interop.is_dynamo_listening():
            quiet = functorch_interop.run_eagerly()
            quiet.__enter__()
        if profiler.is_profiling():
            span = profiler.make_span(str(TransformCall(verb, func)))
            span.__enter__()
        try:
            if settled is not None and settled.unknown != settled.codes and not kwargs:
                known = settled.find(args)
                found = None if known is None else settled.run(args, known, last)
                if found is not None:
                    return found[0]
            replays = None if last is None else last.replays
            if not can_replay() or (
                replays is not None and replays.newest is None and replays.skips_call()
            ):
                return call_transform(eager, func, *args, **kwargs)
            if may_change and key != _make_transform_key(how):
                return call_transform(eager, func, *args, **kwargs)
            calls, given = fixed or _find_calls(func, key, own)
            last = calls  # finding them may take longer than a replayed call
            if known is None or known.times.replays >= _TIMED:
                return calls.run(func, given, eager, args, kwargs)
            hits, start = calls.hits, perf_counter()
            result = calls.run(func, given, eager, args, kwargs)
            if calls.hits > hits:
                known.times.note_replay(perf_counter() - start)
            return result
        finally:
            if span is not None:
                span.__exit__(None, None, None)
            if quiet is not None:
                quiet.__exit__(None, None, None)

    def calls() -> Calls:
        return (fixed or _find_calls(func, key, own)).calls

    vars(call_transformed)["__forall_transform__"] = fresh_closures.Transform(
        func,
        how,
        eager,
        None if may_change else key,
        lambda other: _make_transformed(other, (*how, _UNTOLD), eager),
        calls,
        alone,
    )
    return call_transformed


def describe_replay(transformed: Callable) -> str:
    """Describe how calls of a transformed function are replayed, or why not; "" if unknown yet."""
    how = vars(transformed)["__forall_transform__"]
    calls = how.calls()
    if calls.replays is None:
        calls.make_replays(how.func, how.eager)
    return calls.describe_replay()


def get_transform_calls(transformed: Callable) -> Calls:
    """Return the calls of a transformed function so far."""
    return vars(transformed)["__forall_transform__"].calls()
