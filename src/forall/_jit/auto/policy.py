"""Calls that nobody called pure, replayed where it is certain that they are.

A transformed function that has taken its time is looked at (`purity`). Where all that it does is
certain, its calls are recorded as `jit` records them, kind by kind, and replayed while the guards
hold: no one can tell, but by the clock. Whatever is in doubt goes on as it is.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from contextlib import suppress
from math import inf
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch

from forall._compat import pytree, rng_state
from forall._compat.autograd_graph import node_of
from forall._compat.native_guards import writes_into
from forall._compat.private_api import has_global_hooks
from forall._compat.transform_call import call_transform
from forall._core import config
from forall._core.python_state import Unwatched
from forall._jit.auto.purity import doubt
from forall._jit.cache.call_key import ambient, is_free, kind_of
from forall._jit.cache.differentiable_entry import Differentiated
from forall._jit.cache.entry import MISSED
from forall._jit.guards.build import Guards
from forall._jit.guards.identity import Unfit, objects_of, outlined
from forall._jit.search_budget import (
    NEVER,
    TOO_LONG,
    WORTH,
    Attempts,
    Deadline,
    clock,
    without_collections,
)
from forall._jit.tracing.coverage import (
    EVERYTHING,
    SIGHTS,
    Everything,
    Ran,
)
from forall._jit.tracing.joint_graph import FIRST, Pass
from forall._jit.tracing.trace_call import (
    Before,
    Unfinished,
    begun,
    guarding,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forall._jit.cache.entry import Recorded
    from forall._jit.tracing.trace_call import Recording

_MOST = 64  # kinds of calls that are kept
_MOST_DUE = 256  # kinds that were seen, the last ones
_LONG = 1024  # looks at calls after which a kind that was not met makes room for another
_AT_ONCE = 6  # attempts in a row for one kind
_LATER = 4  # calls until one is recorded again that took too long
_MOST_BYTES = 2**24  # of constants that a program keeps
_GLANCE = Everything(most=1000)  # where the next call may be seen: more costs more than it does
_CHANGES = "what it reaches, or asks of numbers, changes from call to call"
_RUNS_OTHERS = "what it runs changes from call to call"
_FAILS = "it fails where it is recorded, and not as it is"


class Replays(Unwatched):
    """The calls of one transformed function; ``why`` tells what stands against replaying them.

    What is recorded is ``eager``; a call that cannot be replayed is made by its ``instead``. These
    are two where ``eager`` is of a function that stands in for others.
    """

    def __init__(
        self, eager: Callable, leads_back: Callable[[], None] | None = None, *, stands_in=False
    ) -> None:
        self.eager = eager
        self.leads_back = leads_back  # to be told that a program will hold what is held weakly
        self.stands_in = stands_in
        self.unseen: str | None = None  # what would, had nobody seen what the calls run
        self.known: dict[Any, Recorded | _Begun] = {}
        self.due: OrderedDict[Any, _Due] = OrderedDict()  # kinds that were met
        self.newest: Recorded | None = None
        self.hits = 0
        self.attempts = Attempts()

    def run(self, args: tuple, kwargs: dict, instead: Callable[[], Any]) -> Any:
        if sys.gettrace() or has_global_hooks():
            return instead()
        recorded = self.newest
        if recorded is not None and not kwargs and recorded.serves(len(args), args, args):
            return self.again(recorded, args, instead)
        passes = self.passes()
        if (passes and recorded is None) or not is_free():
            return instead()
        try:
            leaves, outline, nodes = outlined(args, kwargs)
            tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
            if recorded is not None and recorded.serves(outline, leaves, tensors, nodes):
                return self.again(recorded, tensors, instead)
            if passes:
                return instead()
            self.attempts.looks += 1
            kind = kind_of(outline, leaves, tensors)
        except Unfit:
            self.attempts.missed(self.hits)
            return instead()
        recorded = self.known.get(kind)
        if recorded is None:
            return call_transform(self._not_known, _Call(kind, args, kwargs, instead, leaves))
        recorded.used = self.attempts.looks
        if type(recorded) is _Begun:
            return call_transform(self._one_more_step, kind, recorded, instead)
        if not recorded.stands(tensors, nodes):
            self._changed(kind, recorded)
            return instead()
        if recorded is self.newest:
            recorded.served(outline, leaves, tensors, nodes)
        self.newest = recorded
        return self.again(recorded, tensors, instead)

    def passes(self) -> bool:
        """Whether a call is not looked at, which is counted."""
        return self.attempts.rest > 0 and self.attempts.passes(self.hits)

    @property
    def why(self) -> str | None:
        """What stands against replaying calls of the kinds that were met, if none is replayed."""
        found = (due.why for due in reversed([*self.due.values()]) if due.why is not None)
        return None if self.known else next(found, None)

    def doubt(self) -> str | None:
        """What stands against replaying calls, as far as is known."""
        if self.unseen is None:
            self.unseen = self._doubt(Guards(self.eager))
        found = (due.why for due in [*self.due.values()] if due.why is not None)
        return next(found, None) or (None if self.hits else self.unseen)

    def _doubt(self, guards: Guards) -> str | None:
        if self.leads_back is not None and guards.leads_back():
            self.leads_back()
        return doubt(guards, stands_in=self.stands_in)

    def _not_known(self, call: _Call) -> Any:
        """A call of a kind of which there is no program (yet)."""
        due = self.due.get(call.kind)
        try:
            things = objects_of(call.args, call.kwargs)
        except Unfit:
            self.attempts.missed(self.hits)
            return call.instead()
        if due is None or not due.is_of(things):  # others lived where these live now
            is_due = config.now.replay == "check"  # at once
            due = _Due(things=tuple(map(_weakly, things)))
        else:
            is_due = not due.wait and not due.refused
        if is_due and self._may_begin():
            return self._first(call, due)
        self.attempts.missed(self.hits)
        start = clock()
        result = call.instead()
        taken = clock() - start
        seconds, spent = min(due.seconds, taken), due.spent + taken
        self._put(call.kind, due._replace(seconds=seconds, spent=spent, wait=max(0, due.wait - 1)))
        return result

    def _put(self, kind: Any, due: _Due) -> None:
        self.due[kind] = due
        with suppress(KeyError):  # another thread's calls may have pushed it out
            self.due.move_to_end(kind)
            if len(self.due) > _MOST_DUE:
                self.due.popitem(last=False)

    def _refuse(self, kind: Any, due: _Due, why: str | None) -> None:
        """Leave this kind as it is from now on."""
        self.known.pop(kind, None)
        self._put(kind, due._replace(why=why, refused=True, ran=EVERYTHING))

    def _put_off(self, kind: Any, due: _Due, why: str | None) -> None:
        """Try this kind again, some times at once, then after twice as many calls each time.

        Where it took too long, never at once.
        """
        self.known.pop(kind, None)
        at_once = (1 << max(0, due.tries - _AT_ONCE)) - 1
        wait = _LATER << due.tries if why == TOO_LONG else at_once
        spent = due.spent if why == TOO_LONG else 0.0
        why = why if due.tries else None  # a first call may have set things up
        self._put(kind, due._replace(why=why, tries=due.tries + 1, wait=wait, spent=spent))

    def _may_begin(self) -> bool:
        """Whether an attempt to record a call is worth it, and there is room for a program."""
        oldest = None
        if len(self.known) >= _MOST:
            oldest, found = min(self.known.copy().items(), key=lambda item: item[1].used)
            if found is self.newest or self.attempts.looks - found.used < _LONG:
                return False
        if not self.attempts.may_begin(self.hits):
            return False
        self.known.pop(oldest, None)
        return True

    def _changed(self, kind: Any, before: Recorded) -> None:
        """Record the next call of this kind, unless one that was recorded says better not."""
        self.newest = None
        self.known.pop(kind, None)
        self.attempts.missed(self.hits)
        due = before.due._replace(times=before.times, ran=EVERYTHING, sights=0)
        if type(before) is Differentiated and before.is_in_vain():
            self._refuse(
                kind, due, "derivatives of its backward pass are taken, or of ever other results"
            )
        elif type(before) is Differentiated and before.asked is not None:
            self._put(kind, due._replace(asked=before.asked))
        else:
            paid = self.hits - before.since >= WORTH
            self._put_off(kind, due._replace(tries=0) if paid else due, _CHANGES)

    def _first(self, call: _Call, due: _Due) -> Any:
        until = NEVER
        if config.now.replay != "check":
            until = Deadline.of(due.seconds, due.operators, due.spent)
        if due.ran.seen or self.unseen is None:
            glance = due.ran if due.ran.seen else _GLANCE
            with glance.reading():
                guards = guarding(self.eager, (call.args, call.kwargs), glance, until)
                why = self._doubt(guards)
            if why is None:
                with without_collections():  # nothing of what garbage runs is to be seen
                    result = self._watched(call, due, guards, until)
                    self._goes_on_at_once(call, result, until)
                return result
            if why == TOO_LONG:
                self._put_off(call.kind, due, why)
                return call.instead()
            if due.sights >= SIGHTS:
                self._refuse(call.kind, due, why)
                return call.instead()
            self.unseen = self.unseen or why
        ran = Ran(until)
        with ran.watching():
            result = call.instead()
        if ran.why == TOO_LONG:
            self._put_off(call.kind, due, ran.why)
        else:
            self._put(call.kind, due._replace(ran=ran, sights=due.sights + 1))
        return result

    def _watched(self, call: _Call, due: _Due, guards: Guards, until: Deadline) -> Any:
        """Make a call and its program, which has to be of what was seen to run before."""
        if not due.ran.seen:
            return self._record(call, due, guards, until)
        ran, homes = Ran(until), _homes(guards) if self.stands_in else []
        written = [*map(writes_into, homes)]
        with ran.watching():
            result = self._record(call, due, guards, until)
        if [*map(writes_into, homes)] != written:
            self._refuse(call.kind, due, "it rebinds names of another function's")
        elif not ran <= due.ran:
            now = self.due.get(call.kind)
            if ran.why == TOO_LONG:
                self._put_off(call.kind, due, TOO_LONG)
            elif now is None:
                self._put_off(call.kind, due._replace(ran=ran), _RUNS_OTHERS)
            elif not now.refused:
                self._put(call.kind, now._replace(ran=ran))
        return result

    def _record(self, call: _Call, due: _Due, guards: Guards, until: Deadline) -> Any:
        before = ambient()
        made = self._begun(call, due.asked, guards, until)
        if made is None:
            self._put_off(call.kind, due, _FAILS)
            return call.instead()
        if made.steps is None or ambient() != before:
            why = "it changes the state of torch" if made.steps else made.why
            if made.moved:
                self._put_off(call.kind, due, why)
            elif why == TOO_LONG:
                due = due._replace(operators=made.operators)
                self._put_off(call.kind, due, why)
            else:
                self._refuse(call.kind, due, why)
            return made.result
        unfinished = _Begun(made.steps, due, guards)
        unfinished.used = self.attempts.looks
        self.known[call.kind] = unfinished
        self.due.pop(call.kind, None)
        return made.result

    def _goes_on_at_once(self, call: _Call, result: Any, until: Deadline) -> None:
        """What of a program can be made in the call that was recorded, if one was."""
        unfinished = self.known.get(call.kind)
        if type(unfinished) is not _Begun:
            return
        recorded = self._goes_on(call.kind, unfinished, until)
        if recorded is not None and config.now.replay == "check":
            tensors = [x for x in call.leaves if isinstance(x, torch.Tensor)]
            _compared(recorded, tensors, result)

    def _begun(self, call: _Call, asked: Pass, guards: Guards, until: Deadline) -> Recording | None:
        """None where it fails before it has changed anything: the call itself tells what is wrong.

        Torch leaves out checks of values where calls are recorded, and meets the error elsewhere.
        """
        before = Before(call.leaves, guards)
        try:
            how = {"given": (call.args, call.kwargs), "certain": True, "asked": asked}
            spec = pytree.flatten((call.args, call.kwargs))[1]
            return begun(self.eager, call.leaves, spec, guards, before, until=until, **how)
        except Exception:
            if not guards.hold() or before.is_written_to():
                raise
            before.draw_again()
            return None

    def _one_more_step(self, kind: Any, unfinished: _Begun, instead: Callable[[], Any]) -> Any:
        start = clock()
        result = instead()
        with without_collections():
            until = Deadline.of(clock() - start)
            self._goes_on(kind, unfinished, until._replace(work=until.call))
        return result

    def _goes_on(self, kind: Any, unfinished: _Begun, until: Deadline) -> Recorded | None:
        """Clean a program and write it down, as far as there is time for that."""
        due = unfinished.due
        try:
            recorded = unfinished.go_on(until)
        except Exception as error:  # noqa: BLE001 - of ours, and the call is the user's
            self._refuse(kind, due, f"its program cannot be made: {error}")
            return None
        if recorded is None:
            if unfinished.is_broken and self.known.get(kind) is unfinished:
                self._put_off(kind, due, "its program was not finished")
            return None
        why = None
        if recorded.writes_outside():  # half done where an operator fails
            why = "it writes into a tensor from outside"
        elif sum(c.nbytes for c in recorded.program.constants.values()) > _MOST_BYTES:
            why = "its program would keep too much in memory"
        if why is not None:
            self._refuse(kind, due, why)
            return None
        recorded.certain = True
        recorded.times += due.times
        recorded.due, recorded.since, recorded.used = due, self.hits, unfinished.used
        self.known[kind] = recorded
        return recorded

    def again(
        self, recorded: Recorded, tensors: Sequence[torch.Tensor], instead: Callable[[], Any]
    ) -> Any:
        result, drawn = recorded.attempt(tensors)
        if result is MISSED:
            return instead()
        self.hits += 1
        if config.now.replay == "check":
            if drawn is not None:
                rng_state.restore(drawn)
            _same(result, instead(), recorded, tensors)
        return result


def _homes(guards: Guards) -> list[dict[str, Any]]:
    """The globals of the functions that run."""
    functions = (f for f in guards.reached() if isinstance(f, FunctionType))
    running = (f.__globals__ for f in functions if guards.ran.holds(f.__code__))
    return [*{id(home): home for home in running}.values()]


class _Call(NamedTuple):
    """A call to be recorded, of the arguments that these leaves and this tree say."""

    kind: Any
    args: tuple
    kwargs: dict
    instead: Callable[[], Any]
    leaves: list


class _Due(NamedTuple):
    """A kind that was met: its next call is to be recorded, with this backward pass."""

    asked: Pass = FIRST
    times: int = 0  # that it was recorded before
    ran: Everything = EVERYTHING  # what the last call was seen to run
    sights: int = 0  # calls that were made to see this
    seconds: float = inf  # that a call takes as it is
    spent: float = 0.0  # seconds that calls have taken as they are since one was recorded
    operators: int = 0  # that it came to where that was broken off
    things: tuple = ()  # the arguments that the kind knows by identity, held weakly
    tries: int = 0  # in a row that came to nothing
    wait: int = 0  # calls that are to pass before the next one
    why: str | None = None
    refused: bool = False  # for good

    def is_of(self, things: Sequence[Any]) -> bool:
        """Whether these are the things that it was met with, and not others in their place."""
        pairs = zip(self.things, things, strict=False)
        same = all(thing is None or thing() is x for thing, x in pairs)
        return same and len(self.things) == len(things)


def _weakly(x: Any) -> ref | None:
    try:
        return ref(x)
    except TypeError:
        return None  # it cannot be told from another


class _Begun(Unfinished):
    """A recorded call of a kind that was due, under guards."""

    def __init__(self, steps: Any, due: _Due, guards: Guards) -> None:
        super().__init__(steps)
        self.due, self.guards = due, guards


def _compared(recorded: Recorded, tensors: Sequence[torch.Tensor], result: Any) -> None:
    if not recorded.draws:
        _same(recorded(tensors), result, recorded, tensors)


def _same(found: Any, expected: Any, recorded: Recorded, tensors: Sequence[torch.Tensor]) -> None:
    """What `config.replay = "check"` is for: a replayed call against the call itself."""
    ours, tree = pytree.flatten(found)
    theirs, wanted = pytree.flatten(expected)
    if tree != wanted or not all(map(_is_same, ours, theirs)):
        raise RuntimeError(f"forall: a replayed call gave\n{found}\nand not\n{expected}")
    if isinstance(recorded, Differentiated):
        given = [t for t in (*tensors, *recorded.captured) if t.requires_grad]
        slopes, expected = (_slopes(leaves, given) for leaves in (ours, theirs))
        if not all(map(_is_same, slopes, expected)):
            raise RuntimeError(f"forall: a replayed pull-back gave\n{slopes}\nand not\n{expected}")


def _slopes(leaves: list, given: list[torch.Tensor]) -> list[torch.Tensor | None]:
    tensors = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
    ends = [x for x in tensors if node_of(x) is not None]
    cotangents = [torch.ones_like(y) for y in ends]
    slopes = torch.autograd.grad(ends, given, cotangents, retain_graph=True, allow_unused=True)
    return [*slopes]


def _is_close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, but for rounding: some pull-backs (`prod`) have two formulas in torch.

    It takes the one that looks at no values where calls are recorded.
    """
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    if a.dtype.itemsize == 1:  # of which few operators have a kernel
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    finite = b.isfinite()
    scale = b[finite].abs().max().item() if finite.any() else 0.0
    room = 64 * torch.finfo(a.dtype).eps * scale
    return torch.allclose(a, b, rtol=0, atol=room, equal_nan=True)


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        kinds = ((x.dtype, x.shape, x.requires_grad) for x in (a, b))
        return len({*kinds}) == 1 and _is_close(a, b)
    return type(a) is type(b) and (repr(a) == repr(b))
