"""Auto-replay: calls of transformed functions, recorded and replayed without `jit`.

A transformed function that has run for long enough is analyzed (`purity`). Where it is certainly
pure, its calls are recorded as `jit` records them, one entry per kind of call, and replayed while
the guards hold. Apart from the time they take, replayed calls cannot be told from eager ones. A
function that may be impure runs eagerly.
"""

from __future__ import annotations

import sys
from math import inf
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch

from forall._auto_replay.attempt_budget import REPLAYS_PER_ATTEMPT, AttemptBudget, disable_gc
from forall._auto_replay.purity import find_impurity
from forall._compat import pytree, rng_state
from forall._compat.autograd_graph import find_autograd_node
from forall._compat.documented_error import documented_error
from forall._compat.native_guards import get_dict_version
from forall._compat.private_api import has_global_hooks
from forall._compat.transform_call import call_transform
from forall._core import communication_log, config
from forall._jit.cache.call_cache import MOST_ENTRIES, CallCache
from forall._jit.cache.call_key import is_free, read_torch_state
from forall._jit.cache.differentiable_entry import DifferentiableEntry
from forall._jit.cache.entry import MISSED, EntryHistory
from forall._jit.deadline import (
    NO_DEADLINE,
    TOO_LONG,
    Deadline,
    clock,
)
from forall._jit.guards.build import Guards
from forall._jit.guards.identity import UnfitArgument, find_keyed_objects
from forall._jit.tracing.coverage import (
    FULL_COVERAGE,
    MOST_OBSERVATIONS,
    FullCoverage,
    ObservedCoverage,
)
from forall._jit.tracing.joint_graph import FIRST_PASS, BackwardPass
from forall._jit.tracing.trace_call import (
    StateBeforeCall,
    UnfinishedEntry,
    begin_recording,
    make_guards,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forall._jit.cache.call_state import CallInfo
    from forall._jit.cache.entry import CacheEntry
    from forall._jit.tracing.trace_call import TraceOutcome

_MOST_PENDING = 256  # kinds of calls that wait to be recorded, the last ones
_LOOKS_UNTIL_UNUSED = 1024  # looks at calls after which an unused entry makes room for another
_ATTEMPTS_IN_A_ROW = 6  # attempts for one kind before the pauses between them begin
_CALLS_AFTER_TIMEOUT = 4  # calls until the next attempt for a kind that took too long
_MOST_BYTES = 2**24  # of constants that a program keeps
_QUICK_COVERAGE = FullCoverage(
    most=1000
)  # a quick walk: where it fails, the next call is observed instead
_CHANGES = "what it reaches, or asks of numbers, changes from call to call"
_NEW_KINDS = "no two calls are alike: what it is given, or closes over, is new in each"
_RUNS_OTHERS = "what it runs changes from call to call"
_FAILS = "it fails where it is recorded, and not as it is"


class AutoReplayCache(CallCache):
    """The auto-replay cache of one transformed function; ``why`` is the reason against replays.

    The function ``eager`` is recorded; a call that is not replayed is made by its ``instead``. The
    two differ where ``eager`` stands in for several closures.
    """

    def __init__(
        self, eager: Callable, leads_back: Callable[[], None] | None = None, *, stands_in=False
    ) -> None:
        super().__init__(_MOST_PENDING)
        self.eager = eager
        self.leads_back = leads_back  # called if a program will hold a weakly held object
        self.stands_in = stands_in
        self.unseen: str | None = None  # the reason against replays without an observed call
        self.unfit: str | None = None  # the reason why arguments of a call have no key
        self.attempts = AttemptBudget()

    def run(self, args: tuple, kwargs: dict, instead: Callable[[], Any]) -> Any:
        if sys.gettrace() or has_global_hooks():
            return instead()
        recorded = self.newest
        if (
            recorded is not None
            and not kwargs
            and recorded.serves_at_a_glance(len(args), args, args)
        ):
            return self.replay_entry(recorded, args, instead)
        if (recorded is None and self.skips_call()) or not is_free():
            return instead()
        return self.run_by_key(args, kwargs, instead)

    def may_look(self) -> bool:
        if self.newest is not None and self.skips_call():
            return False
        self.attempts.looks += 1
        return True

    def run_unfit(self, args: tuple, kwargs: dict, why: str, instead: Callable[[], Any]) -> Any:
        self.unfit = why
        self.attempts.count_miss(self.hits)
        return instead()

    def note_use(self, key: Any, entry: CacheEntry) -> None:
        entry.history.used = self.attempts.looks

    def run_unknown(self, call: CallInfo) -> Any:
        return call_transform(self._run_waiting, call)

    def skips_call(self) -> bool:
        """True if a call passes without a look, and count it."""
        return self.attempts.rest > 0 and self.attempts.skips_call(self.hits)

    @property
    def why(self) -> str | None:
        """The reason why no call so far was recorded; None if one was, or no reason is known."""
        found = (due.why for due in reversed([*self.waiting.values()]) if due.why is not None)
        return None if self.known else next(found, None)

    def find_obstacle(self) -> str | None:
        """The reason against replaying calls, None if none is known."""
        if self.unseen is None:
            self.unseen = self._analyze_purity(Guards(self.eager))
        found = (due.why for due in [*self.waiting.values()] if due.why is not None)
        return next(found, None) or (None if self.hits else self.unseen)

    def find_futility(self) -> str | None:
        """The reason why calls were looked at in vain where no obstacle is known, else None."""
        if self.hits or self.known or not self.attempts.has_paused():
            return None
        return self.unfit or _NEW_KINDS

    def _analyze_purity(self, guards: Guards) -> str | None:
        if self.leads_back is not None and guards.leads_to_weak():
            self.leads_back()
        return find_impurity(guards, stands_in=self.stands_in)

    def _run_waiting(self, call: CallInfo) -> Any:
        """Make a call of a kind that has no entry: run eagerly, or record it."""
        due = self.waiting.get(call.key)
        try:
            things = find_keyed_objects(call.args, call.kwargs)
        except UnfitArgument:
            self.attempts.count_miss(self.hits)
            return call.instead()
        if due is None or not due.matches_objects(things):  # the ids were of other objects
            is_due = config.now.replay == "check"  # record at the first call
            due = _PendingKind(things=tuple(map(_make_weak_ref, things)))
        else:
            is_due = not due.wait and not due.refused
        if is_due and self._may_record():
            return self._try_recording(call, due)
        self.attempts.count_miss(self.hits)
        start = clock()
        result = call.instead()
        taken = clock() - start
        seconds, spent = min(due.seconds, taken), due.spent + taken
        self.waiting.keep_last(
            call.key, due._replace(seconds=seconds, spent=spent, wait=max(0, due.wait - 1))
        )
        return result

    def _refuse(self, kind: Any, due: _PendingKind, why: str | None) -> None:
        """Run calls of this kind eagerly from now on."""
        self.known.pop(kind, None)
        self.waiting.keep_last(kind, due._replace(why=why, refused=True, ran=FULL_COVERAGE))

    def _postpone(self, kind: Any, due: _PendingKind, why: str | None) -> None:
        """Schedule the next attempt: for some attempts at the next call, then with growing pauses.

        Each pause is twice as many calls as the last. An attempt that took too long always leads to
        a pause.
        """
        self.known.pop(kind, None)
        at_once = (1 << max(0, due.tries - _ATTEMPTS_IN_A_ROW)) - 1
        wait = _CALLS_AFTER_TIMEOUT << due.tries if why == TOO_LONG else at_once
        spent = due.spent if why == TOO_LONG else 0.0
        why = why if due.tries else None  # the first call may have set up state
        self.waiting.keep_last(
            kind, due._replace(why=why, tries=due.tries + 1, wait=wait, spent=spent)
        )

    def _may_record(self) -> bool:
        """True if the budget allows an attempt to record a call, and there is room for an entry."""
        oldest = None
        if len(self.known) >= MOST_ENTRIES:
            oldest, found = min(self.known.list_items(), key=lambda item: item[1].history.used)
            if (
                found is self.newest
                or self.attempts.looks - found.history.used < _LOOKS_UNTIL_UNUSED
            ):
                return False
        if not self.attempts.may_attempt(self.hits):
            return False
        self.known.pop(oldest, None)
        return True

    def run_stale(self, call: CallInfo, entry: CacheEntry) -> Any:
        """Drop an entry whose guards failed; record the next call if that is worth it."""
        kind, self.newest = call.key, None
        self.known.pop(kind, None)
        self.attempts.count_miss(self.hits)
        history = entry.history
        due = history.due._replace(times=history.times, ran=FULL_COVERAGE, sights=0)
        passes = entry.derivative.passes if type(entry) is DifferentiableEntry else None
        if passes is not None and passes.is_backward_unused():
            self._refuse(
                kind, due, "derivatives of its backward pass are taken, or of ever other results"
            )
        elif passes is not None and passes.asked is not None:
            self.waiting.keep_last(kind, due._replace(asked=passes.asked))
        else:
            paid = self.hits - history.since >= REPLAYS_PER_ATTEMPT
            self._postpone(kind, due._replace(tries=0) if paid else due, _CHANGES)
        return call.instead()

    def _try_recording(self, call: CallInfo, due: _PendingKind) -> Any:
        until = NO_DEADLINE
        if config.now.replay != "check":
            until = Deadline.make_for_call(due.seconds, due.operators, due.spent)
        if due.ran.seen or self.unseen is None:
            glance = due.ran if due.ran.seen else _QUICK_COVERAGE
            with glance.cache_instructions():
                guards = make_guards(self.eager, (call.args, call.kwargs), glance, until)
                why = self._analyze_purity(guards)
            if why is None:
                with disable_gc():  # finalizers of garbage are not part of the call
                    result = self._record_observed(call, due, guards, until)
                    self._take_first_steps(call, result, until)
                return result
            if why == TOO_LONG:
                if due.tries and not due.ran.seen:  # an observed call names less to be read
                    self.unseen = self.unseen or why
                self._postpone(call.key, due, why)
                return call.instead()
            if due.sights >= MOST_OBSERVATIONS:
                self._refuse(call.key, due, why)
                return call.instead()
            self.unseen = self.unseen or why
        ran = ObservedCoverage(until)
        with disable_gc(), ran.observe_calls():  # nor are they, or gc.callbacks, here
            result = call.instead()
        if ran.why == TOO_LONG:
            self._postpone(call.key, due, ran.why)
        else:
            self.waiting.keep_last(call.key, due._replace(ran=ran, sights=due.sights + 1))
        return result

    def _record_observed(
        self, call: CallInfo, due: _PendingKind, guards: Guards, until: Deadline
    ) -> Any:
        """Record a call, and check that it runs only code that the last call was seen to run."""
        if not due.ran.seen:
            return self._record(call, due, guards, until)
        ran, homes = ObservedCoverage(until), _collect_globals(guards) if self.stands_in else []
        written = [*map(get_dict_version, homes)]
        with ran.observe_calls():
            result = self._record(call, due, guards, until)
        if [*map(get_dict_version, homes)] != written:
            self._refuse(call.key, due, "it rebinds names of another function's")
        elif not ran <= due.ran:
            now = self.waiting.get(call.key)
            if ran.why == TOO_LONG:
                self._postpone(call.key, due, TOO_LONG)
            elif now is None:
                self._postpone(call.key, due._replace(ran=ran), _RUNS_OTHERS)
            elif not now.refused:
                self.waiting.keep_last(call.key, now._replace(ran=ran))
        return result

    def _record(self, call: CallInfo, due: _PendingKind, guards: Guards, until: Deadline) -> Any:
        before = read_torch_state()
        made = self._begin_recording(call, due.asked, guards, until)
        if made is None:
            self._postpone(call.key, due, _FAILS)
            return call.instead()
        if made.steps is None or read_torch_state() != before:
            why = "it changes the state of torch" if made.steps else made.why
            if made.moved:
                self._postpone(call.key, due, why)
            elif why == TOO_LONG:
                due = due._replace(operators=made.operators)
                self._postpone(call.key, due, why)
            else:
                self._refuse(call.key, due, why)
            return made.result
        unfinished = _UnfinishedReplay(made.steps, due, guards)
        unfinished.history.used = self.attempts.looks
        self.known.keep_last(call.key, unfinished)
        self.waiting.pop(call.key, None)
        return made.result

    def _take_first_steps(self, call: CallInfo, result: Any, until: Deadline) -> None:
        """After a recorded call, take the steps of its program for which there is time."""
        unfinished = self.known.get(call.key)
        if type(unfinished) is not _UnfinishedReplay:
            return
        recorded = self._take_steps(call.key, unfinished, until)
        if recorded is not None and config.now.replay == "check":
            tensors = [x for x in call.leaves if isinstance(x, torch.Tensor)]
            _check_first_replay(recorded, tensors, result)

    def _begin_recording(
        self, call: CallInfo, asked: BackwardPass, guards: Guards, until: Deadline
    ) -> TraceOutcome | None:
        """Record a call; return None if it fails before any effect, so that it can run eagerly.

        The eager call raises the user's own error: under a dispatch mode torch leaves out some
        checks of values, and raises another error later.
        """
        before = StateBeforeCall(call.leaves, guards)
        try:
            how = {"given": (call.args, call.kwargs), "certain": True, "asked": asked}
            spec = pytree.flatten((call.args, call.kwargs))[1]
            return begin_recording(
                self.eager, call.leaves, spec, guards, before, until=until, **how
            )
        except Exception as error:
            if communication_log.is_final(error):
                raise
            if not guards.hold() or before.has_outside_writes():
                raise
            before.rewind()
            return None

    def take_one_step(self, unfinished: _UnfinishedReplay, call: CallInfo) -> Any:
        """Make a call eagerly, and go on with the program of its key while there is time."""
        start = clock()
        result = call.instead()
        with disable_gc():
            until = Deadline.make_for_call(clock() - start)
            self._take_steps(call.key, unfinished, until._replace(work=until.call))
        return result

    def _take_steps(
        self, kind: Any, unfinished: _UnfinishedReplay, until: Deadline
    ) -> CacheEntry | None:
        """Take steps of an unfinished entry until the deadline; return the entry if it is done."""
        due = unfinished.due
        try:
            recorded = unfinished.take_steps(until)
        except Exception as error:  # noqa: BLE001 - a defect of ours is not to fail the user's call
            self._refuse(kind, due, f"its program cannot be made: {error}")
            return None
        if recorded is None:
            if unfinished.is_exhausted and self.known.get(kind) is unfinished:
                self._postpone(kind, due, "its program was not finished")
            return None
        why = None
        if recorded.traits.writes_outside:  # an operator that fails would leave it half done
            why = "it writes into a tensor from outside"
        elif sum(c.nbytes for c in recorded.program.constants.values()) > _MOST_BYTES:
            why = "its program would keep too much in memory"
        if why is not None:
            self._refuse(kind, due, why)
            return None
        recorded.history = EntryHistory(
            times=1 + due.times,
            certain=True,
            due=due,
            since=self.hits,
            used=unfinished.history.used,
        )
        self.known.keep_last(kind, recorded)
        return recorded

    def replay_entry(
        self, entry: CacheEntry, tensors: Sequence[torch.Tensor], instead: Callable[[], Any]
    ) -> Any:
        if entry.traits.communicates:
            return call_transform(self._replay_or_run, entry, tensors, instead)
        return self._replay_or_run(entry, tensors, instead)

    def _replay_or_run(
        self, entry: CacheEntry, tensors: Sequence[torch.Tensor], instead: Callable[[], Any]
    ) -> Any:
        messages = communication_log.get_position() if entry.traits.communicates else 0
        result, drawn = entry.try_replay(tensors)
        if result is MISSED:
            return instead()
        self.hits += 1
        if config.now.replay == "check":
            if drawn is not None:
                rng_state.restore_states(drawn)
            communication_log.rewind_log(messages)
            _check_replay(result, instead(), entry, tensors)
        return result


def _collect_globals(guards: Guards) -> list[dict[str, Any]]:
    """The globals of the functions that ran, each dict once."""
    functions = (f for f in guards.list_visited() if isinstance(f, FunctionType))
    running = (f.__globals__ for f in functions if guards.ran.may_have_run(f.__code__))
    return [*{id(home): home for home in running}.values()]


class _PendingKind(NamedTuple):
    """A kind of call that waits to be recorded, with the backward pass to record."""

    asked: BackwardPass = FIRST_PASS
    times: int = 0  # recordings so far
    ran: FullCoverage = FULL_COVERAGE  # the coverage of the last call
    sights: int = 0  # calls that were observed
    seconds: float = inf  # that an eager call takes
    spent: float = 0.0  # seconds of eager calls since one was recorded
    operators: int = 0  # that a recording which was broken off had run
    things: tuple = ()  # the arguments in the key by identity, held weakly
    tries: int = 0  # failed attempts in a row
    wait: int = 0  # eager calls until the next attempt
    why: str | None = None
    refused: bool = False  # never to be recorded

    def matches_objects(self, things: Sequence[Any]) -> bool:
        """True if these are the objects in the key, not others with the same ids."""
        pairs = zip(self.things, things, strict=False)
        same = all(thing is None or thing() is x for thing, x in pairs)
        return same and len(self.things) == len(things)


def _make_weak_ref(x: Any) -> ref | None:
    try:
        return ref(x)
    except TypeError:
        return None  # its class allows no weak references


class _UnfinishedReplay(UnfinishedEntry):
    """A recorded call that waits for its passes and code generation, with its guards."""

    def __init__(self, steps: Any, due: _PendingKind, guards: Guards) -> None:
        super().__init__(steps)
        self.due, self.guards = due, guards

    def make_call(self, call: CallInfo, cache: AutoReplayCache) -> Any:
        self.history.used = cache.attempts.looks
        return call_transform(cache.take_one_step, self, call)


def _check_first_replay(recorded: CacheEntry, tensors: Sequence[torch.Tensor], result: Any) -> None:
    if not (recorded.traits.draws or recorded.traits.communicates):
        _check_replay(recorded(tensors), result, recorded, tensors)


def _check_replay(
    found: Any, expected: Any, recorded: CacheEntry, tensors: Sequence[torch.Tensor]
) -> None:
    """Compare a replayed call with the eager call, as `config.replay = "check"` asks."""
    ours, tree = pytree.flatten(found)
    theirs, wanted = pytree.flatten(expected)
    if tree != wanted or not all(map(_is_same, ours, theirs)):
        raise documented_error(RuntimeError, "replay-check")(
            f"forall: a replayed call gave\n{found}\nand not\n{expected}"
        )
    if isinstance(recorded, DifferentiableEntry):
        given = [t for t in (*tensors, *recorded.captured) if t.requires_grad]
        slopes, expected = (_compute_gradients(leaves, given) for leaves in (ours, theirs))
        if not all(map(_is_same, slopes, expected)):
            raise documented_error(RuntimeError, "replay-check")(
                f"forall: a replayed pull-back gave\n{slopes}\nand not\n{expected}"
            )


def _compute_gradients(leaves: list, given: list[torch.Tensor]) -> list[torch.Tensor | None]:
    tensors = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
    ends = [x for x in tensors if find_autograd_node(x) is not None]
    cotangents = [torch.ones_like(y) for y in ends]
    slopes = torch.autograd.grad(ends, given, cotangents, retain_graph=True, allow_unused=True)
    return [*slopes]


def _is_close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if tensors are equal up to rounding: some backwards (`prod`) have two formulas in torch.

    Under a dispatch mode torch takes the formula that reads no data.
    """
    if a.is_meta:  # it has no numbers
        return True
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    if a.dtype.itemsize == 1:  # float8: few operators have a kernel for it
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    finite = b.isfinite()
    scale = b[finite].abs().max().item() if finite.any() else 0.0
    room = 64 * torch.finfo(a.dtype).eps * scale
    return torch.allclose(a, b, rtol=0, atol=room, equal_nan=True)


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        kinds = ((x.dtype, x.shape, x.device, x.requires_grad) for x in (a, b))
        return len({*kinds}) == 1 and _is_close(a, b)
    return type(a) is type(b) and (repr(a) == repr(b))
