"""A first call: made as it is, and recorded."""

from __future__ import annotations

from dataclasses import dataclass
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forall._programs.differentiated import Differentiated
from forall._programs.guards import Guards
from forall._programs.open_views import Opened, opened
from forall._programs.passes import clean
from forall._programs.pulling import (
    ENTWINED,
    FIRST,
    SHARED,
    WRITTEN,
    Pass,
    cleaned,
    entangled,
    pulled_back,
)
from forall._programs.ran import EVERYTHING, Everything
from forall._programs.recorder import TELLING, Recorder
from forall._programs.replayed import Recorded, Results
from forall._programs.seeing import Watch, seen_by
from forall._programs.statics import unboxed
from forall._programs.writing import function
from forall._torch import generators, handover, trees
from forall._torch.names import version
from forall._torch.whole import contextmanager

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Tensor = torch.Tensor

# What a result may be besides a tensor: it comes back as it is with each call.
_WORDS = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


class Recording(NamedTuple):
    """A first call: what it gave, and its program; or why it has none."""

    result: Any
    recorded: Recorded | None
    why: str | None
    moved: bool = False  # Python's state alone was in the way, which a first call may set up


def guarding(func: Callable, leaves: list, ran: Everything = EVERYTHING) -> Guards:
    """What a call depends on besides its tensors, as it is now."""
    return Guards(func, [x for x in map(unboxed, leaves) if not _is_tensor(x)], ran)


class Before:
    """What a call finds that is there besides it: whether it writes into that, and its draws."""

    def __init__(self, leaves: list, guards: Guards) -> None:
        self.outside = [*filter(_is_tensor, leaves), *guards.tensors.values()]
        self.recorder: Recorder | None = None  # that sees the call
        self._drawing = [*self.outside, *guards.generators]
        self._versions = [*map(version, self.outside)]
        self._states = generators.states(self._drawing)

    def is_written_to(self) -> bool:
        """Whether the call has written into a tensor from outside, as far as is known."""
        unsaid = self.recorder is not None and self.recorder.writes_unsaid
        return unsaid or [*map(version, self.outside)] != self._versions

    def draw_again(self) -> None:
        generators.restore(self._states)

    @contextmanager
    def drawing_again(self) -> Iterator[None]:
        """What is drawn was drawn by the call, and counts once."""
        now = generators.states(self._drawing)
        self.draw_again()
        try:
            yield
        finally:
            generators.restore(now)


@dataclass
class FirstCall:
    """A call to be recorded: of a function, of leaves hung together as ``spec`` says.

    Its results may be pulled back on the way. With ``certain`` that runs no Python of the user's.
    """

    func: Callable
    leaves: list
    spec: Any
    guards: Guards
    before: Before
    write: Callable = function
    certain: bool = False
    fastmath: bool = False
    asked: Pass = FIRST

    def record(self, given: tuple[tuple, dict] | None) -> Recording:
        """Make the call, and its program, which ``write`` makes a function."""
        made = self._made(self.leaves, given)
        if made.why != ENTWINED:
            return made
        if self.before.is_written_to():
            return made._replace(why=WRITTEN)
        # Made once more, where only we see it, of arguments that are not made of each other.
        with self.before.drawing_again():
            alone = self._made(_apart(self.leaves), None)
        return made._replace(recorded=alone.recorded, why=alone.why)

    def _made(self, leaves: list, given: tuple[tuple, dict] | None) -> Recording:
        guards, tensors = self.guards, [*filter(_is_tensor, leaves)]
        recorder = self.before.recorder = Recorder(tensors, guards.tensors, guards.generators)
        if guards.why is not None:
            recorder.fails(guards.why)
        outside = [*tensors, *guards.tensors.values()]
        with handover.eagerly(), _same_history(recorder, outside):
            result = self._called(recorder, leaves, given)
        found, tree = trees.flatten(result)
        ends = [*filter(_is_tensor, found)]
        odd = next((x for x in found if not isinstance(x, (torch.Tensor, *_WORDS))), None)
        if odd is not None:
            recorder.fails(f"a result of class {type(odd).__name__}")
        moved = recorder.why is None and not guards.hold()
        if moved:
            recorder.fails("it changes Python's state: a list, an attribute, a global")
        if guards.ran.seen and recorder.tells:  # by a name that is written nowhere
            recorder.fails(TELLING)
        views = opened(recorder, ends) if _have_history(ends) else None
        ends = ends if views is None else views.ends
        back = pulled_back(recorder, tensors, ends, self.asked, certain=self.certain)
        program = recorder.program(ends if views is None else views.numbers)
        if program is None:
            return Recording(result, None, recorder.why, moved)
        how = guards, Results.of(found, tree), tensors, self.write
        if back is None and views is not None:
            return Recording(result, None, SHARED)
        if back is None:
            made = Recorded(clean(program, fastmath=self.fastmath), *how)
        elif (why := entangled(program)) is not None:
            return Recording(result, None, why)
        else:
            kept = () if views is None else views.given
            back = cleaned(program, back, kept, fastmath=self.fastmath)
            made = Differentiated(program, *how, back, self._again(views), views)
        guards.watch(program.captured.values())
        if recorder.attends:
            guards.watch_attention()
        return Recording(result, made, None)

    def _called(self, recorder: Recorder, leaves: list, given: tuple[tuple, dict] | None) -> Any:
        """With the user's own lists and dicts, if they are at hand, which no program changes."""
        if given is not None and all(map(is_, trees.leaves(given), leaves)):
            args, kwargs = given
        else:
            args, kwargs = trees.unflatten(leaves, self.spec)
        before, was = trees.flatten((args, kwargs))
        with seen_by(recorder), recorder.hearing(), Watch(recorder):
            result = self.func(*args, **kwargs)
        after, now = trees.flatten((args, kwargs))
        if now != was or not all(map(is_, after, before)):
            recorder.fails("it changes what it is given: a list, a dict")
        return result

    def _again(self, views: Opened | None) -> Callable[[Sequence[Tensor]], list[Tensor]]:
        """The function of tensors in the arguments' place, for its ends; it keeps no tensor."""
        func, spec = self.func, self.spec
        leaves = [_TENSOR if _is_tensor(x) else x for x in self.leaves]

        def again(tensors: Sequence[Tensor]) -> list[Tensor]:
            stand_ins = iter(tensors)
            filled = [next(stand_ins) if x is _TENSOR else x for x in leaves]
            args, kwargs = trees.unflatten(filled, spec)
            results = [*filter(_is_tensor, trees.leaves(func(*args, **kwargs)))]
            return results if views is None else views.of(results)

        return again


def record(
    func: Callable,
    leaves: list,
    spec: Any,
    guards: Guards | None = None,
    before: Before | None = None,
    *,
    given: tuple[tuple, dict] | None = None,
    **how: Any,
) -> Recording:
    """Make a call and its program; ``how`` are the fields of a `FirstCall`.

    ``given`` are the user's own containers of the arguments, if they are at hand.
    """
    guards = guards or guarding(func, leaves)
    leaves = [*map(unboxed, leaves)]
    before = before or Before(leaves, guards)
    return FirstCall(func, leaves, spec, guards, before, **how).record(given)


def _have_history(ends: Sequence[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in ends)


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


_TENSOR: Any = object()


def _apart(leaves: list) -> list:
    """The leaves with others in the place of tensors that have a history, or come twice."""
    seen, found = set(), []
    for x in leaves:
        cut = _is_tensor(x) and x.requires_grad and (x.grad_fn is not None or id(x) in seen)
        found.append(x.detach().requires_grad_() if cut else x)
        seen.add(id(x))
    return found


@contextmanager
def _same_history(recorder: Recorder, tensors: Sequence[Tensor]) -> Iterator[None]:
    """Nothing is written into these tensors from outside that a derivative would have to know."""
    histories = [t.grad_fn for t in tensors]
    yield
    if any(t.grad_fn is not history for t, history in zip(tensors, histories, strict=True)):
        recorder.fails(WRITTEN)
