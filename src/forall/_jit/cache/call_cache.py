"""The cache of one jitted function: a recorded call for each cache key (kind of call)."""

from __future__ import annotations

import sys
from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forall._compat import pytree
from forall._compat.transform_call import call_transform
from forall._core.errors import TransformCall, name_of, warn_slow_path
from forall._core.python_state import UnguardedState
from forall._jit.cache.cache_info import (
    CacheInfo,
    Kind,
    describe_arguments,
    describe_eager_kind,
    describe_entry,
)
from forall._jit.cache.call_key import is_free, make_call_key
from forall._jit.cache.differentiable_entry import DifferentiableEntry
from forall._jit.cache.entry import MISSED, CacheEntry
from forall._jit.guards.build import TOO_MUCH
from forall._jit.guards.identity import UnfitArgument, outline_call
from forall._jit.tracing.coverage import (
    FULL_COVERAGE,
    MOST_OBSERVATIONS,
    FullCoverage,
    ObservedCoverage,
)
from forall._jit.tracing.joint_graph import FIRST_PASS
from forall._jit.tracing.trace_call import make_guards, record

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forall._jit.static_args import StaticArguments

_MOST = 64  # entries that are kept, the last used ones
_TIMES = 4  # recordings of one kind whose data-dependent answers change


class EagerKind(NamedTuple):
    """The cache entry of a kind that cannot be recorded: its calls run eagerly."""

    arguments: str
    why: str
    times: int = 0


class JitCache(UnguardedState):
    """The cache of one function's recorded calls, by the kind of call (the cache key)."""

    def __init__(self, func: Callable, statics: StaticArguments, anew: tuple, **how: Any) -> None:
        self.func = func
        self.anew = anew  # a function and its arguments, which make an empty cache (for pickle)
        self.how = how  # how programs are made: ``write``, ``fastmath``
        self.boxed = statics.box_arguments if statics else None
        self.known: OrderedDict[Any, CacheEntry | EagerKind] = OrderedDict()
        self.newest: CacheEntry | None = None
        # Kinds whose state still changes: the calls so far, and what the last was seen to run.
        self.settling: dict[Any, tuple[int, FullCoverage]] = {}
        self.hits = self.misses = 0

    def __reduce__(self) -> tuple:
        return self.anew  # programs stay where they were recorded

    def clear(self) -> None:
        """Drop all entries, and count from 0."""
        self.known.clear()
        self.settling.clear()
        self.newest = None
        self.hits = self.misses = 0

    def read_counts(self) -> CacheInfo:
        """The numbers of replayed calls, of calls that ran the function, and of kept entries."""
        return CacheInfo(self.hits, self.misses, _MOST, len(self.known))

    def list_kinds(self) -> list[Kind]:
        """The kept entries as `Kind`s, the last used one last."""
        name = name_of(self.func)
        return [
            describe_eager_kind(name, *made[:2])
            if type(made) is EagerKind
            else describe_entry(name, made)
            for made in self.known.values()
        ]

    def run(self, args: tuple, kwargs: dict) -> Any:
        made = self.newest
        if made is not None and not kwargs and made.serves_at_a_glance(len(args), args, args):
            # Positional tensors alone: their number is the structure of the arguments.
            if made.traits.draws:
                return self._replay_entry(made, args, args, kwargs)
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
        try:
            leaves, outline, nodes = outline_call(*given)
            tensors = [x for x in leaves if isinstance(x, torch.Tensor)] if leaves else leaves
            if made is not None and made.serves_at_a_glance(outline, leaves, tensors, nodes):
                return self._replay_entry(made, tensors, args, kwargs)
            kind = make_call_key(outline, leaves, tensors)
        except UnfitArgument as unfit:
            if str(unfit) not in self.known:
                self._keep_eager(str(unfit), given, str(unfit))
            self.misses += 1
            return self.func(*args, **kwargs)
        made = self.known.get(kind)
        if type(made) is EagerKind:
            self.misses += 1
            return self.func(*args, **kwargs)
        if made is None or not made.serves_call(tensors, nodes):
            self.misses += 1
            if made is None or not made.history.failed or made.history.times <= _TIMES:
                return call_transform(self._record_first, kind, given, leaves)
            self._keep_eager(kind, given, "what it asks of numbers changes from call to call")
            return self.func(*args, **kwargs)
        if made is self.newest:
            made.make_fast_test(outline, leaves, tensors, nodes)
        self.newest = made
        with suppress(KeyError):  # another thread's calls may have pushed it out
            self.known.move_to_end(kind)
        return self._replay_entry(made, tensors, args, kwargs)

    def _replay_entry(
        self, made: CacheEntry, tensors: Sequence[torch.Tensor], args: tuple, kwargs: dict
    ) -> Any:
        if made.traits.may_fail:
            result, _ = made.try_replay(tensors)
            if result is MISSED:
                self.misses += 1
                return self.func(*args, **kwargs)
            self.hits += 1
            return result
        self.hits += 1
        return made(tensors)

    def _record_first(self, kind: Any, given: tuple[tuple, dict], leaves: list) -> Any:
        self.newest = None  # it may hold what the function no longer does
        before = self.known.get(kind)
        is_pulled = type(before) is DifferentiableEntry
        asked = (before.derivative.passes.asked if is_pulled else None) or FIRST_PASS
        spec = pytree.flatten(given)[1]
        count, ran = self.settling.pop(kind, (0, FULL_COVERAGE))
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
            if len(self.settling) == _MOST:
                self.settling.clear()
            self.settling[kind] = count + 1, seen
            return made.result
        if made.recorded is None:
            self._keep_eager(kind, given, made.why or "")
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
            self._keep_entry(kind, made.recorded)
        return made.result

    def _keep_eager(self, kind: Any, given: tuple[tuple, dict], why: str) -> EagerKind:
        """Report once why a kind is not recorded, and keep an entry that says so."""
        warn_slow_path(f"{TransformCall('jit', self.func)}: not recorded, so run as it is: {why}.")
        made = EagerKind(describe_arguments(*given), why)
        self._keep_entry(kind, made)
        return made

    def _keep_entry(self, kind: Any, made: CacheEntry | EagerKind) -> None:
        self.known[kind] = made
        self.known.move_to_end(kind)
        if len(self.known) > _MOST:
            self.known.popitem(last=False)
