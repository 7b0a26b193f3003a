"""The decorator of all transforms, and the slot that automatic replay fills.

NOTE [the slot of automatic replay]
    The package `_auto_replay` records and replays calls of transformed functions. No other package
    imports it. When forall is imported, it enters a class in ``slot``, by which the decorator finds
    the calls of a transform so far. While the slot is empty, each call runs eagerly.
"""

from __future__ import annotations

import functools
import marshal
import operator
from dataclasses import fields
from time import perf_counter
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from torch.compiler import is_dynamo_compiling as is_compiling

from forall._api import dynamo_call
from forall._api.chunk_size import Chunks
from forall._compat import functorch_interop, profiler
from forall._compat.device_mesh import is_mesh_class, is_placement_class
from forall._compat.private_api import PLAIN
from forall._compat.trace_modes import is_pre_dispatch_tracing
from forall._compat.transform_call import call_transform
from forall._core import config
from forall._core.bound_meshes import bound
from forall._core.errors import TransformCall
from forall._core.levels import stack
from forall._core.python_state import is_ours

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

_TIMED = 16  # replayed calls that are timed


class ReplayableCalls(Protocol):
    """The calls of a transformed function so far, as automatic replay keeps them."""

    hits: Any  # the number of calls that were replayed

    def run(self, func: Any, given: list | None, eager: Callable, args: tuple, kwargs: dict) -> Any:
        """Return ``eager(func, *args, **kwargs)``, replayed if it can be.

        ``given`` are the bound values of ``func`` if it is a fresh closure.
        """
        ...

    def skips_call(self) -> bool:
        """Return True if the next call is eager without a look, and count it."""
        ...

    def may_replay(self) -> bool:
        """Return True if the next call may be replayed, or recorded."""
        ...

    def has_doubts(self) -> bool:
        """Return True if it is known that no call will be replayed."""
        ...

    def find_obstacle(self, func: Any, eager: Callable) -> None:
        """Read ``func`` for what keeps its calls from being replayed, unless that was done."""
        ...

    def describe_replay(self) -> str:
        """Describe how the calls are replayed, or why not; "" if that is not known yet."""
        ...

    def describe_program(self, name: str, args: tuple, kwargs: dict, *, is_replayed: bool) -> str:
        """Return the listing of the newest recorded program; "" if there is none.

        The arguments are those of the last call, which ran that program if ``is_replayed``.
        """
        ...


class BoundCalls(NamedTuple):
    """The calls of a function, and its bound values if it is a fresh closure."""

    calls: ReplayableCalls
    given: list | None


class CallLookup(Protocol):
    """Finds the calls of one transform of a function."""

    def find(self) -> BoundCalls:
        """Return the calls."""
        ...

    def find_fixed(self) -> BoundCalls | None:
        """Return the calls if they stay the same; None if they are to be found for each call."""
        ...


class ReplaySlot:
    """The slot that automatic replay fills, see NOTE [the slot of automatic replay]."""

    # From a function, and the key of its transform or None, to what finds the calls.
    make_finder: Callable[[Any, Any], CallLookup] | None = None


slot = ReplaySlot()


class Transform(NamedTuple):
    """A record of how a function was transformed; ``key`` identifies the transform and its options.

    ``key`` is None if nothing distinguishes the transform from others.
    """

    func: Callable
    how: tuple  # the transform's name and options
    eager: Callable  # runs one call of the function that is its first argument
    key: Hashable
    make: Callable[[Callable], Callable]  # the transform of another function
    calls: Callable[[], ReplayableCalls | None]  # its calls so far, None while the slot is empty
    # The same by torch.autograd, if no level, mode or hook takes part in the call.
    alone: Callable | None = None


def find_transform(x: Any) -> Transform | None:
    """Return the record of how a function was transformed; None if no transform returned it."""
    if type(x) is not FunctionType or "__forall_transform__" not in vars(x) or not is_ours(x):
        return None  # attributes are copied to others (functools.wraps)
    return vars(x)["__forall_transform__"]


class CheaperCalls(Protocol):
    """Calls of one function that need no checks, as `loop_or_batch.SettledCalls` has them."""

    codes: ClassVar[int]
    unknown: int  # the value of ``codes`` when this function was found to have no such calls

    def find(self, args: tuple) -> Any:
        """Return what is known of a call with these arguments; None if it needs checks."""
        ...

    def run(self, args: tuple, known: Any, calls: ReplayableCalls | None) -> Any:
        """Return the results of a call of which this is known."""
        ...


def can_replay() -> bool:
    """Return True if a call that begins now may be replayed.

    Not inside a transform: the outermost one replays the whole call, or pulls back many at once.
    """
    if is_compiling() or not config.now.replay or stack.top is not None or stack.reversing:
        return False
    if slot.make_finder is None or bound.meshes:
        return False
    return not functorch_interop.must_hand_over() and not is_pre_dispatch_tracing()


def find_calls(func: Any, key: Any) -> BoundCalls | None:
    """Return the calls of the transform of ``func`` with this ``key``; None if the slot is empty.

    Without a key they are new ones, which nothing else refers to.
    """
    return None if slot.make_finder is None else slot.make_finder(func, key).find()


def call_or_replay(
    verb: str, func: Callable, eager: Callable, args: tuple, options: dict[str, Any]
) -> Any:
    """Return ``eager(func, *args, **options)``, replayed if it can be."""
    if options:
        eager = functools.partial(eager, **options)
    found = find_calls(func, _make_point_key(verb, options)) if can_replay() else None
    if found is None:
        return call_transform(eager, func, *args)
    return found.calls.run(func, found.given, eager, args, {})


def make_replayable(func: Callable) -> Callable:
    """Return the function with calls that are replayed if they can be, one autograd node each."""
    found = find_calls(func, _OF_FUNCTION) if can_replay() else None
    if found is None:
        return func
    calls, given = found
    return lambda *args: calls.run(func, given, operator.call, args, {})


def find_point_calls(verb: str, func: Callable, options: dict[str, Any]) -> ReplayableCalls | None:
    """Return the calls of ``func`` that `vjp`, `jvp` or `linearize` replays; None without any."""
    found = find_calls(func, _OF_FUNCTION if verb == "vjp" else _make_point_key(verb, options))
    return None if found is None else found.calls


def _make_point_key(verb: str, options: dict[str, Any]) -> Any:
    return _read((verb, *options.items()))[0]


_OF_FUNCTION = ()  # the key of calls of a function itself, which `make_replayable` replays


def _make_transform_key(how: tuple) -> Any:
    """Return a key that is equal for equal options; None if an option has no key."""
    try:
        return _make_value_key(how)
    except TypeError:
        return None


def is_tensor_option(value: Any) -> bool:
    """Return True if replay takes an option for an argument of the transformed function's calls."""
    return type(value) in PLAIN


def _hide_tensor(option: Any) -> Any:
    """Return a transform's name or option; in the place of a tensor, that there is one."""
    is_tensor = type(option) is tuple and is_tensor_option(option[1])
    return (option[0], (TENSOR_OPTION,)) if is_tensor else option


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
    if kind is float:
        return kind.__name__, value.hex()  # 0.0 and -0.0 are not the same, and nan is
    if kind is Chunks:
        return kind.__name__, *[_make_value_key(getattr(value, f.name)) for f in fields(Chunks)]
    if is_placement_class(kind):
        return kind.__name__, value
    if is_mesh_class(kind):
        from forall._mesh.rank_group import list_rank_groups  # imports torch.distributed

        handles = (ranks.handle for ranks in list_rank_groups(value))
        return kind.__name__, value.mesh_dim_names, *handles
    raise TypeError


_WORDS = frozenset({bool, int, str})  # classes whose equal values are the same option
TENSOR_OPTION = "a tensor"  # in the key, in the place of one that replayed calls take
_UNTOLD: Any = object()  # among a template's options, so that it has no key


def _read(how: tuple) -> tuple[Any, bool]:
    """Return the key of a transform's options, and True if these may change.

    Some programs make a transform for each call, with the very same options each time.
    """
    try:
        marks = marshal.dumps(how, 2)  # equal for equal values of the same types
    except ValueError:  # options of other kinds
        marks = None
    known = _keys.get(marks)
    if known is not None:
        return known, False
    key, may_change = _make_transform_key(how), _has_mutable_options(how)
    if key is not None and marks is not None and _is_of_words(how):
        if len(_keys) >= _MOST_KEYS:
            _keys.clear()
        _keys[marks] = key
    return key, may_change


_keys: dict[bytes | None, Any] = {}
_MOST_KEYS = 1000


def _is_of_words(value: Any) -> bool:
    """Return True for options that never change."""
    if type(value) is tuple:
        return all(map(_is_of_words, value))
    return value is None or type(value) is float or type(value) in _WORDS


def _has_mutable_options(value: Any) -> bool:
    """Return True if the options hold a list or dict, which the transform reads in each call."""
    if type(value) is tuple:
        return any(map(_has_mutable_options, value))
    return type(value) in (list, dict)


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
    # Not by its identity: a function that was pickled by value holds a copy of `_UNTOLD`.
    options = dict([x for x in how[1:] if type(x) is tuple])
    tensors = [*filter(is_tensor_option, options.values())]

    def call_traced(*args: Any, **kwargs: Any) -> Any:
        """Run the call where Dynamo traces it."""
        if verb in dynamo_call.VERBS and not functorch_interop.must_hand_over():
            return dynamo_call.call_transform(verb, options, func, args, kwargs)
        return eager(func, *tensors, *args, **kwargs)

    if is_compiling():
        return call_traced
    hidden = how if not tensors else (*map(_hide_tensor, how),)
    key, may_change = _read(hidden)
    finder = None if slot.make_finder is None else slot.make_finder(func, key)
    fixed = None if finder is None else finder.find_fixed()
    last: ReplayableCalls | None = None

    @functools.wraps(func, updated=())
    def call_transformed(*args: Any, **kwargs: Any) -> Any:
        nonlocal last
        if is_compiling():
            return call_traced(*args, **kwargs)
        if tensors:
            args = (*tensors, *args)
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
            if finder is None or not can_replay() or (last is not None and last.skips_call()):
                return call_transform(eager, func, *args, **kwargs)
            if may_change and key != _make_transform_key(hidden):
                return call_transform(eager, func, *args, **kwargs)
            calls, given = fixed or finder.find()
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

    def calls() -> ReplayableCalls | None:
        return None if finder is None else (fixed or finder.find()).calls

    vars(call_transformed)["__forall_transform__"] = Transform(
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
    record: Transform = vars(transformed)["__forall_transform__"]
    calls = record.calls()
    if calls is None:
        return ""
    calls.find_obstacle(record.func, record.eager)
    return calls.describe_replay()
