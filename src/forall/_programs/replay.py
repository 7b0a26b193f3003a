"""Calls that nobody called pure, replayed where it is certain that they are.

A transformed function that has taken its time is looked at (`purity`). Where all that it does is
certain, its calls are recorded as `jit` records them, kind by kind, and replayed while the guards
hold: no one can tell, but by the clock. Whatever is in doubt goes on as it is.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forall._core import config
from forall._core.remembering import Unwatched
from forall._programs.differentiated import Differentiated
from forall._programs.guards import Guards
from forall._programs.pulling import FIRST, Pass
from forall._programs.purity import doubt
from forall._programs.ran import EVERYTHING, SEEN, SIGHTS, Everything, Ran
from forall._programs.recording import Before, guarding, record
from forall._programs.replayed import MISSED
from forall._programs.signature import Unfit, ambient, is_free, kind_of
from forall._torch import generators, trees, whole
from forall._torch.history import node_of
from forall._torch.names import has_global_hooks
from forall._torch.unchanged import writes_into

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from forall._programs.recording import Recording
    from forall._programs.replayed import Recorded

_MOST = 16  # kinds of calls that are kept, the last used ones
_MOST_BYTES = 2**24  # of constants that a program keeps
_GLANCE = Everything(most=1000)  # where the next call may be seen: more costs more than it does
_LOSSES = 8  # recordings that may be for nothing
_WORTH = 32  # replayed calls, which make up for one more


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
        self.why: str | None = None
        self.unseen: str | None = None  # what would, had nobody seen what the calls run
        self.known: OrderedDict[Any, Recorded | _Due | str] = OrderedDict()
        self.newest: Recorded | None = None
        self.hits = 0
        self.lost = 0

    def run(self, args: tuple, kwargs: dict, instead: Callable[[], Any]) -> Any:
        if self.why is not None or sys.gettrace() or has_global_hooks():
            return instead()
        recorded = self.newest
        if recorded is not None and not kwargs and recorded.serves(len(args), args, args):
            return self.again(recorded, args, instead)
        if not is_free():
            return instead()
        leaves, outline = trees.outlined(args, kwargs)
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        if recorded is not None and recorded.serves(outline, leaves, tensors):
            return self.again(recorded, tensors, instead)
        try:
            kind = kind_of(outline, leaves, tensors)
        except Unfit:
            return instead()
        recorded = self.known.get(kind, _NEW)
        if type(recorded) is _Due or (recorded is _NEW and config.now.replay == "check"):
            return whole.call(
                self._first, _Call(kind, args, kwargs, instead, *trees.flatten((args, kwargs)))
            )
        if type(recorded) is str:
            return instead()
        if recorded is _NEW or not recorded.stands(tensors):
            self._missed(kind, recorded)
            return instead()
        if recorded is self.newest:
            recorded.served(outline, leaves, tensors)
        self.newest = recorded
        return self.again(recorded, tensors, instead)

    def doubt(self) -> str | None:
        """What stands against replaying calls, as far as is known."""
        if self.why is None and self.unseen is None:
            self.unseen = self._doubt(Guards(self.eager))
        found = (k for k in self.known.values() if type(k) is str)
        return self.why or next(found, None) or (None if self.hits else self.unseen)

    def _doubt(self, guards: Guards) -> str | None:
        if self.leads_back is not None and guards.leads_back():
            self.leads_back()
        return doubt(guards, stands_in=self.stands_in)

    def _missed(self, kind: Any, before: Recorded) -> None:
        """Record the next call of this kind, unless one that was recorded says better not."""
        self.newest = None
        if type(before) is Differentiated and before.is_in_vain():
            self.known[kind] = (
                "derivatives of its backward pass are taken, or of ever other results"
            )
            return
        asked = before.asked if type(before) is Differentiated else None
        self.known[kind] = _Due() if before is _NEW else _Due(asked or FIRST, before.times)
        if len(self.known) > _MOST:
            self.known.popitem(last=False)
        lost = before is not _NEW and asked is None
        self._lose(lost, "what it reaches, or asks of numbers, changes from call to call")

    def _forget(self) -> None:
        self.known.clear()
        self.newest = None

    def _lose(self, lost: bool, why: str) -> None:
        self.lost += lost
        if self.lost > _LOSSES + self.hits // _WORTH:
            self.why = why
            self._forget()

    def _first(self, call: _Call) -> Any:
        due = self.known.get(call.kind)
        due = due if type(due) is _Due else _Due()
        if due.ran.seen or self.unseen is None:
            glance = due.ran if due.ran.seen or not _are_seen(call.leaves) else _GLANCE
            with glance.reading():
                guards = guarding(self.eager, call.leaves, glance)
                why = self._doubt(guards)
            if why is None:
                return self._watched(call, due, guards)
            if due.sights >= SIGHTS or not _are_seen((*call.leaves, *guards.tensors.values())):
                self.why = why
                self._forget()
                return call.instead()
            self.unseen = self.unseen or why
        ran = Ran()
        self.known[call.kind] = due._replace(ran=ran, sights=due.sights + 1)
        with ran.watching():
            return call.instead()

    def _watched(self, call: _Call, due: _Due, guards: Guards) -> Any:
        """Make a call and its program, which has to be of what was seen to run before."""
        if not due.ran.seen:
            return self._record(call, due, guards)
        ran, homes = Ran(), _homes(guards) if self.stands_in else []
        written = [*map(writes_into, homes)]
        with ran.watching():
            result = self._record(call, due, guards)
        if [*map(writes_into, homes)] != written:
            self.known[call.kind] = "it rebinds names of another function's"
        elif not ran <= due.ran and type(self.known.get(call.kind)) is not str:
            self.known[call.kind] = due._replace(ran=ran)
            self._lose(True, "what it runs changes from call to call")
        return result

    def _record(self, call: _Call, due: _Due, guards: Guards) -> Any:
        before = ambient()
        made = self._recorded(call, due.asked, guards)
        if made is None:
            result = call.instead()
            self._lose(True, "it fails where it is recorded, and not as it is")
            return result
        recorded, why = made.recorded, made.why
        if recorded is not None:
            if ambient() != before:
                why = "it changes the state of torch"
            elif recorded.writes_outside():  # half done where an operator fails
                why = "it writes into a tensor from outside"
            elif sum(c.nbytes for c in recorded.program.constants.values()) > _MOST_BYTES:
                why = "its program would keep too much in memory"
            elif not guards.ran.saw(recorded.program.values):
                why = self.unseen
        if recorded is None or why is not None:
            self.known[call.kind] = due if made.moved else why
            self._lose(True, why or "")
        else:
            self.known[call.kind] = recorded
            recorded.certain = True
            recorded.times += due.times
            if config.now.replay == "check":
                tensors = [x for x in call.leaves if isinstance(x, torch.Tensor)]
                _compared(recorded, tensors, made.result)
        return made.result

    def _recorded(self, call: _Call, asked: Pass, guards: Guards) -> Recording | None:
        """None where it fails before it has changed anything: the call itself tells what is wrong.

        Torch leaves out checks of values where calls are recorded, and meets the error elsewhere.
        """
        before = Before(call.leaves, guards)
        try:
            how = {"given": (call.args, call.kwargs), "certain": True, "asked": asked}
            return record(self.eager, call.leaves, call.spec, guards, before, **how)
        except Exception:
            if not guards.hold() or before.is_written_to():
                raise
            before.draw_again()
            return None

    def again(
        self, recorded: Recorded, tensors: Sequence[torch.Tensor], instead: Callable[[], Any]
    ) -> Any:
        result, drawn = recorded.attempt(tensors)
        if result is MISSED:
            return instead()
        self.hits += 1
        if config.now.replay == "check":
            if drawn is not None:
                generators.restore(drawn)
            _same(result, instead(), recorded, tensors)
        return result


_NEW: Any = object()


def _homes(guards: Guards) -> list[dict[str, Any]]:
    """The globals of the functions that run."""
    functions = (f for f in guards.reached() if isinstance(f, FunctionType))
    running = (f.__globals__ for f in functions if guards.ran.holds(f.__code__))
    return [*{id(home): home for home in running}.values()]


def _are_seen(values: Iterable[Any]) -> bool:
    return all(x.device.type in SEEN for x in values if isinstance(x, torch.Tensor))


class _Call(NamedTuple):
    """A call to be recorded, of the arguments that these leaves and this tree say."""

    kind: Any
    args: tuple
    kwargs: dict
    instead: Callable[[], Any]
    leaves: list
    spec: Any


class _Due(NamedTuple):
    """A kind whose next call is to be recorded, with this backward pass."""

    asked: Pass = FIRST
    times: int = 0  # that it was recorded before
    ran: Everything = EVERYTHING  # what the last call was seen to run
    sights: int = 0  # calls that were made to see this


def _compared(recorded: Recorded, tensors: Sequence[torch.Tensor], result: Any) -> None:
    if not recorded.draws:
        _same(recorded(tensors), result, recorded, tensors)


def _same(found: Any, expected: Any, recorded: Recorded, tensors: Sequence[torch.Tensor]) -> None:
    """What `config.replay = "check"` is for: a replayed call against the call itself."""
    ours, tree = trees.flatten(found)
    theirs, wanted = trees.flatten(expected)
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
