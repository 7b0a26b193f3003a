"""Tracing of a first call: the function runs eagerly, and its operators are recorded."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from operator import is_
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forall._compat import functorch_interop, pytree, rng_state
from forall._compat.dispatch_state import functions_off
from forall._compat.exception_safety import contextmanager
from forall._compat.private_api import PLAIN, version
from forall._compat.tensor_subclass import kind_of
from forall._jit.backends.fast_calls import asking
from forall._jit.backends.python_source import function
from forall._jit.cache.differentiable_entry import Again, Differentiated
from forall._jit.cache.entry import Met, Recorded, Results
from forall._jit.guards.build import Guards
from forall._jit.guards.identity import (
    Reading,
    Unfit,
    objects_of,
    outlined,
    unlike_others,
)
from forall._jit.passes.pipeline import cleaning
from forall._jit.search_budget import (
    NEVER,
    TOO_LONG,
    Deadline,
    clock,
)
from forall._jit.static_args import unboxed
from forall._jit.tracing.coverage import EVERYTHING, Everything
from forall._jit.tracing.joint_graph import (
    ENTWINED,
    FIRST,
    SHARED,
    WRITTEN,
    Pass,
    cleaning_both,
    entangled,
    pulled_back,
)
from forall._jit.tracing.output_views import Opened, opened
from forall._jit.tracing.side_effects import Watch, seen_by
from forall._jit.tracing.tracer import TELLING, Recorder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from forall._jit.graph import Program
    from forall._jit.tracing.joint_graph import Pullback

    Tensor = torch.Tensor


Steps = Generator[float | None, None, Recorded]  # yields the next step's seconds, if known
_WRITTEN = 3e-5  # seconds of code generation for each operator


class Recording(NamedTuple):
    """The outcome of a first call: its result, and its program or the reason it has none."""

    result: Any
    steps: Steps | None  # the work left: passes and code generation
    why: str | None
    moved: bool = False  # the reason is a change of Python's state, which a first call may set up
    recorded: Recorded | None = None  # the cache entry, when the steps were taken
    operators: int = 0  # that the call ran

    def finished(self) -> Recording:
        """Take all steps; return the outcome with its cache entry."""
        if self.steps is None:
            return self
        return self._replace(recorded=Unfinished(self.steps).go_on())


class Unfinished:
    """A recorded call that waits for its passes and code generation."""

    used = 0  # the number of the look that found this entry last

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self._taken = Lock()  # held by the thread that takes steps

    @property
    def is_broken(self) -> bool:
        """True if no step is left; without a program, the steps were broken off."""
        return self.steps.gi_frame is None

    def go_on(self, until: Deadline = NEVER) -> Recorded | None:
        """Take a step, and more while there is time for the next; return the entry at the end.

        A step that yields no seconds is expected to be followed by one as long as itself.
        """
        if not self._taken.acquire(blocking=False):
            return None
        try:
            return self._go_on(until)
        finally:
            self._taken.release()

    def _go_on(self, until: Deadline) -> Recorded | None:
        while True:
            start = clock()
            try:
                with functions_off():  # tensors made here are not for the user's default device
                    expected = next(self.steps)
            except StopIteration as done:
                return done.value
            now = clock()
            if now + (expected or now - start) > until.work:
                return None


def guarding(
    func: Callable,
    given: tuple[tuple, dict],
    ran: Everything = EVERYTHING,
    until: Deadline = NEVER,
) -> Guards:
    """Return the guards of a call: the state besides its tensors that it depends on, as of now."""
    try:
        return Guards(func, map(unboxed, objects_of(*given)), ran, until)
    except Unfit as unfit:
        guards = Guards(func, (), ran, until)
        guards.why = str(unfit)
        return guards


class Before:
    """The state before a call: versions of the tensors from outside, and generator states."""

    def __init__(self, leaves: list, guards: Guards) -> None:
        self.outside = [*filter(_is_tensor, leaves), *guards.tensors.values()]
        self.recorder: Recorder | None = None  # the tracer of the call
        self._drawing = [*self.outside, *guards.generators]
        self._versions = [*map(version, self.outside)]
        self._states = rng_state.states(self._drawing)

    def is_written_to(self) -> bool:
        """True if the call may have written into a tensor from outside."""
        unsaid = self.recorder is not None and self.recorder.writes_unsaid
        return unsaid or [*map(version, self.outside)] != self._versions

    def draw_again(self) -> None:
        rng_state.restore(self._states)

    @contextmanager
    def drawing_again(self) -> Iterator[None]:
        """Return a context that starts from the states before the call.

        At its end the generators have the states that they had at its beginning.
        """
        now = rng_state.states(self._drawing)
        self.draw_again()
        try:
            yield
        finally:
            rng_state.restore(now)


@dataclass
class FirstCall:
    """A call to be recorded: a function, and its arguments as the leaves of the tree ``spec``.

    A backward pass may be recorded with it. With ``certain`` that runs no Python of the user's.
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
    until: Deadline = NEVER  # the deadline of the recording

    def record(self, given: tuple[tuple, dict] | None) -> Recording:
        """Run and record the call."""
        made = self._made(self.leaves, given)
        if made.why != ENTWINED:
            return made
        if self.before.is_written_to():
            return made._replace(why=WRITTEN)
        if clock() > self.until.call:
            return made._replace(why=TOO_LONG)
        # Run it once more, unseen by the user, on detached arguments.
        with self.before.drawing_again():
            alone = self._made(_apart(self.leaves), None)
        return made._replace(steps=alone.steps, why=alone.why)

    def _made(self, leaves: list, given: tuple[tuple, dict] | None) -> Recording:
        guards, tensors = self.guards, [*filter(_is_tensor, leaves)]
        recorder = self.before.recorder = Recorder(
            tensors, guards.tensors, guards.generators, self.until
        )
        if guards.why is not None:
            recorder.fails(guards.why)
        outside = [*tensors, *guards.tensors.values()]
        with functorch_interop.eagerly(), _same_history(recorder, outside):
            result = self._called(recorder, leaves, given)
        operators = recorder.operators
        found, tree = pytree.flatten(result)
        ends = [*filter(_is_tensor, found)]
        nodes = outlined(*given)[2] if given is not None else []
        known = guards.identities().union(map(id, tensors))
        why = unlike_others(result, found, tree, known, nodes if self.certain else None)
        why = why or next(filter(None, map(_users_own, ends)), None)
        if why is not None:
            recorder.fails(why)
        moved = recorder.why is None and not guards.hold()
        if moved:
            recorder.fails("it changes Python's state: a list, an attribute, a global")
        if guards.ran.seen and recorder.tells:  # it read one by a name that no code contains
            recorder.fails(TELLING)
        views = opened(recorder, ends) if _have_history(ends) else None
        ends = ends if views is None else views.ends
        back = pulled_back(recorder, tensors, ends, self.asked, certain=self.certain)
        program = recorder.program(ends if views is None else views.numbers)
        if program is None:
            return Recording(result, None, recorder.why, moved, operators=operators)
        if back is None and views is not None:
            return Recording(result, None, SHARED)
        if back is not None:
            why = entangled(program) or self._unlike_again(given, nodes)
            if why is not None:
                return Recording(result, None, why)
        guards.watch(program.captured.values())
        if recorder.chooses:
            guards.watch_kernels()
        how = guards, Results.of(found, tree), Met.of(tensors, nodes, guards), self.write
        if back is None:
            return Recording(result, self._steps(program, how), None)
        again = Again.of(self._again(views))
        return Recording(result, self._steps_of_both(program, how, back, again, views), None)

    def _steps(self, program: Program, how: tuple) -> Steps:
        """Run the passes and generate code, in steps; no step looks at the call's tensors."""
        yield from cleaning(program, fastmath=self.fastmath)
        yield from asking(program)
        yield _WRITTEN * len(program.nodes)
        return Recorded(program, *how)

    def _steps_of_both(
        self, program: Program, how: tuple, back: Pullback, again: Again, views: Opened | None
    ) -> Steps:
        kept = () if views is None else views.given
        back = yield from cleaning_both(program, back, kept, fastmath=self.fastmath)
        yield from asking(program)
        yield _WRITTEN * len(program.nodes)
        return Differentiated(program, *how, back, again, views)

    def _called(self, recorder: Recorder, leaves: list, given: tuple[tuple, dict] | None) -> Any:
        """Call the function under the tracer, with the user's own containers if they are at hand.

        A call that changes one of them cannot be recorded.
        """
        if given is not None and all(map(is_, pytree.leaves(given), leaves)):
            args, kwargs = given
        else:
            args, kwargs = pytree.unflatten(leaves, self.spec)
        before, was = pytree.leaves((args, kwargs)), _told(args, kwargs)
        with seen_by(recorder), recorder.hearing(), Watch(recorder):
            result = self.func(*args, **kwargs)
        after = pytree.leaves((args, kwargs))
        try:
            changed = not all(map(is_, after, before)) or _told(args, kwargs) != was
        except Unfit:  # it has put in a value that no cache key can have
            changed = True
        if changed:
            recorder.fails("it changes what it is given: a list, a dict, an attribute")
        return result

    def _unlike_again(self, given: tuple[tuple, dict] | None, nodes: Sequence[Any]) -> str | None:
        """The reason why rebuilt arguments would not do for an eager rerun, None if they would."""
        if given is None:
            return None
        args, kwargs = pytree.unflatten(self.leaves, pytree.fresh(self.spec))
        met = not self.guards.identities().isdisjoint(map(id, nodes))
        if met or _told(args, kwargs) != _told(*given):
            return "an argument is more than its leaves, with a derivative at stake"
        return None

    def _again(self, views: Opened | None) -> Callable[[Sequence[Tensor]], list[Tensor]]:
        """Return a function from other tensors, as arguments, to the ends of the user's function.

        It keeps no tensor of the call.
        """
        func, spec = self.func, pytree.fresh(self.spec)
        leaves = [_TENSOR if _is_tensor(x) else x for x in self.leaves]

        def again(tensors: Sequence[Tensor]) -> list[Tensor]:
            stand_ins = iter(tensors)
            filled = [next(stand_ins) if x is _TENSOR else x for x in leaves]
            args, kwargs = pytree.unflatten(filled, pytree.fresh(spec))
            results = [*filter(_is_tensor, pytree.leaves(func(*args, **kwargs)))]
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
    """Run a call and make its program; ``how`` are the fields of a `FirstCall`.

    ``given`` are the user's own containers of the arguments, if they are at hand.
    """
    guards = guards or guarding(func, given or pytree.unflatten(leaves, spec))
    leaves = [*map(unboxed, leaves)]
    before = before or Before(leaves, guards)
    return begun(func, leaves, spec, guards, before, given=given, **how).finished()


def begun(
    func: Callable,
    leaves: list,
    spec: Any,
    guards: Guards,
    before: Before,
    *,
    given: tuple[tuple, dict] | None,
    **how: Any,
) -> Recording:
    """Run and record a call as `record` does, and leave the steps that make its program."""
    return FirstCall(func, leaves, spec, guards, before, **how).record(given)


def _users_own(result: Tensor) -> str | None:
    """The reason why a program cannot make a result: its class or attributes; else None."""
    if type(result) not in PLAIN:
        return f"a result of class {kind_of(result).__name__}"
    return (
        f"a result with an attribute, .{next(iter(result.__dict__))}" if result.__dict__ else None
    )


def _have_history(ends: Sequence[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in ends)


def _told(args: tuple, kwargs: dict) -> Any:
    """The structure of the arguments and the attributes of their tensors, to be compared."""
    leaves, shape, _ = outlined(args, kwargs)
    attributes = [Reading(leaves).value(vars(x)) for x in leaves if _is_tensor(x) and vars(x)]
    return shape, attributes


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


_TENSOR: Any = object()


def _apart(leaves: list) -> list:
    """The leaves with detached ones in place of tensors that have a `grad_fn`."""
    made = [x for x in leaves if _is_tensor(x) and x.requires_grad and x.grad_fn is not None]
    cut = {id(x): x.detach().requires_grad_() for x in made}
    return [cut.get(id(x), x) for x in leaves]


@contextmanager
def _same_history(recorder: Recorder, tensors: Sequence[Tensor]) -> Iterator[None]:
    """Watch these tensors: a write that changes the history of one ends the recording."""
    histories = [t.grad_fn for t in tensors]
    yield
    if any(t.grad_fn is not history for t, history in zip(tensors, histories, strict=True)):
        recorder.fails(WRITTEN)
