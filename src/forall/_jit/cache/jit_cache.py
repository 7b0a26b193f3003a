"""The cache of one jitted function, which records each kind of call when it first comes."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from forall._compat import pytree
from forall._compat.transform_call import call_transform
from forall._core.errors import TransformCall, format_columns, name_of, warn_slow_path
from forall._jit.cache.cache_info import (
    CacheInfo,
    Kind,
    describe_arguments,
    describe_eager_kind,
    describe_entry,
)
from forall._jit.cache.call_cache import MOST_ENTRIES, CallCache
from forall._jit.cache.call_key import is_free
from forall._jit.cache.call_state import CallInfo, EagerKind
from forall._jit.cache.differentiable_entry import DifferentiableEntry
from forall._jit.cache.entry import MISSED, CacheEntry
from forall._jit.guards.build import TOO_MUCH
from forall._jit.tracing.coverage import (
    FULL_COVERAGE,
    MOST_OBSERVATIONS,
    ObservedCoverage,
)
from forall._jit.tracing.joint_graph import FIRST_PASS
from forall._jit.tracing.trace_call import make_guards, record

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from forall._compat.call_site import SourceLine
    from forall._jit.static_args import StaticArguments

_TIMES = 4  # recordings of one kind whose data-dependent answers change


class JitCache(CallCache):
    """The cache of one function's recorded calls, by the kind of call (the cache key).

    Keys whose state still changes are in ``waiting``: the calls so far, and what the last ran.
    """

    def __init__(self, func: Callable, statics: StaticArguments, anew: tuple, **how: Any) -> None:
        super().__init__(MOST_ENTRIES)
        self.func = func
        self.anew = anew  # a function and its arguments, which make an empty cache (for pickle)
        self.how = how  # how programs are made: ``compile_graph``, ``fastmath``
        self.boxed = statics.box_arguments if statics else None

    def __reduce__(self) -> tuple:
        return self.anew  # programs stay where they were recorded

    def read_counts(self) -> CacheInfo:
        """The numbers of replayed calls, of calls that ran the function, and of kept entries."""
        return CacheInfo(self.hits, self.misses, MOST_ENTRIES, len(self.known))

    def list_kinds(self) -> list[Kind]:
        """The kept entries as `Kind`s, the last used one last."""
        name = name_of(self.func)
        return [
            describe_entry(name, made)
            if isinstance(made, CacheEntry)
            else describe_eager_kind(name, *made)
            for made in self.known.values()
        ]

    def run(self, args: tuple, kwargs: dict) -> Any:
        made = self.newest
        if made is not None and not kwargs and made.serves_at_a_glance(len(args), args, args):
            # Positional tensors alone: their number is the structure of the arguments.
            if made.traits.draws or made.traits.communicates:
                return self.replay_entry(made, args, functools.partial(self.func, *args))
            try:
                result = made(args)
            except Exception:
                if not made.traits.may_fail:
                    raise
                made.note_failure()
                self.misses += 1
            else:
                self.hits += 1
                return result
            return self.func(*args)  # it raises the user's own error
        if not is_free():
            self.misses += 1
            return self.func(*args, **kwargs)
        given = self.boxed(args, kwargs) if self.boxed else (args, kwargs)
        return self.run_by_key(*given, functools.partial(self.func, *args, **kwargs))

    def replay_entry(
        self, entry: CacheEntry, tensors: Sequence[torch.Tensor], instead: Callable[[], Any]
    ) -> Any:
        if entry.traits.communicates:
            return call_transform(self._replay_or_run, entry, tensors, instead)
        if entry.traits.may_fail:
            return self._replay_or_run(entry, tensors, instead)
        self.hits += 1
        return entry(tensors)

    def _replay_or_run(
        self, entry: CacheEntry, tensors: Sequence[torch.Tensor], instead: Callable[[], Any]
    ) -> Any:
        result, _ = entry.try_replay(tensors)
        if result is MISSED:
            self.misses += 1
            return instead()
        self.hits += 1
        return result

    def run_unfit(self, args: tuple, kwargs: dict, why: str, instead: Callable[[], Any]) -> Any:
        if why not in self.known:
            self._keep_eager(why, (args, kwargs), why)
        self.misses += 1
        return instead()

    def run_unknown(self, call: CallInfo) -> Any:
        self.misses += 1
        return call_transform(self._record_first, call)

    def run_stale(self, call: CallInfo, entry: CacheEntry) -> Any:
        if not entry.history.failed or entry.history.times <= _TIMES:
            return self.run_unknown(call)
        given = call.args, call.kwargs
        self._keep_eager(call.key, given, "what it asks of numbers changes from call to call")
        return self.run_eagerly(call)

    def _record_first(self, call: CallInfo) -> Any:
        kind, leaves, given = call.key, call.leaves, (call.args, call.kwargs)
        self.newest = None  # it may hold what the function no longer does
        before = self.known.get(kind)
        is_pulled = type(before) is DifferentiableEntry
        asked = (before.derivative.passes.asked if is_pulled else None) or FIRST_PASS
        spec = pytree.flatten(given)[1]
        count, ran = self.waiting.pop(kind, (0, FULL_COVERAGE))
        with ran.cache_instructions():
            guards = make_guards(self.func, given, ran)
        watches = (ran.seen or guards.why == TOO_MUCH) and sys.gettrace() is None
        seen = ObservedCoverage() if watches else FULL_COVERAGE
        with seen.observe_calls():
            made = record(self.func, leaves, spec, guards, given=given, asked=asked, **self.how)
        # State that is set up once may have changed in this call: a cache, a mask kept on a module,
        # a wrapper that torch makes late. The next call shows whether each call changes it. Where
        # the names of all code are too much to watch, the code that was seen to run names less.
        unsettled = made.moved or (watches and not (ran.seen and seen <= ran))
        if unsettled and count < (MOST_OBSERVATIONS if watches else 1):
            self.waiting.keep_last(kind, (count + 1, seen))
            return made.result
        if made.recorded is None:
            self._keep_eager(kind, given, made.why or "", made.place)
        elif (
            made.recorded.traits.asks and made.recorded.traits.writes_outside
        ):  # half done where it fails
            self._keep_eager(
                kind, given, "it asks for numbers, and writes into a tensor from outside"
            )
        else:
            history = made.recorded.history
            history.arguments = describe_arguments(*given)
            history.times += before.history.times if before is not None else 0
            self.known.keep_last(kind, made.recorded)
        return made.result

    def _keep_eager(
        self, kind: Any, given: tuple[tuple, dict], why: str, place: SourceLine | None = None
    ) -> EagerKind:
        """Report once why a kind is not recorded, and keep an entry that says so."""
        at = ""
        if place is not None and place.text():
            at = format_columns([("at", place.near(), place.text())]) + "\n"
        warn_slow_path(
            f"{TransformCall('jit', self.func)}: not recorded, so run as it is: {why}.\n{at}"
            "Write the function without that, or leave jit out."
        )
        made = EagerKind(describe_arguments(*given), why)
        self.known.keep_last(kind, made)
        return made
