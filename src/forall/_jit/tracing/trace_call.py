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
from forall._compat.private_api import PLAIN, get_version
from forall._compat.tensor_subclass import get_users_class
from forall._core import communication_log
from forall._jit.backends.fast_calls import choose_calls
from forall._jit.backends.python_source import compile_python
from forall._jit.cache.differentiable_entry import Derivative, DifferentiableEntry, EagerRerun
from forall._jit.cache.entry import ArgumentOverlaps, CacheEntry, EntryHistory, ResultTree
from forall._jit.deadline import (
    NO_DEADLINE,
    TOO_LONG,
    Deadline,
    clock,
)
from forall._jit.guards.build import Guards
from forall._jit.guards.identity import (
    KeyMaker,
    UnfitArgument,
    find_keyed_objects,
    find_result_problem,
    outline_call,
)
from forall._jit.passes.pipeline import iter_passes
from forall._jit.static_args import unbox_static
from forall._jit.tracing.coverage import FULL_COVERAGE, FullCoverage
from forall._jit.tracing.joint_graph import (
    ENTWINED,
    FIRST_PASS,
    SHARED,
    WRITTEN,
    BackwardPass,
    find_entanglement,
    iter_joint_passes,
    record_backward,
)
from forall._jit.tracing.output_views import OutputBases, find_output_bases
from forall._jit.tracing.side_effects import SideEffectMode, activate_tracer
from forall._jit.tracing.tracer import TELLING, Tracer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from forall._compat.call_site import SourceLine
    from forall._jit.graph import Program, Subgraph
    from forall._jit.tracing.joint_graph import BackwardHalf

    Tensor = torch.Tensor


Steps = Generator[float | None, None, CacheEntry]  # yields the next step's seconds, if known
# A backward pass that is not the recorded one runs the function once more, and so its messages.
COMMUNICATES = "ranks communicate in it, with a derivative at stake outside"
PULLED_BACK = "it takes a derivative through the history of a tensor from outside"
_WRITTEN = 3e-5  # seconds of code generation for each operator


class TraceOutcome(NamedTuple):
    """The outcome of a first call: its result, and its program or the reason it has none."""

    result: Any
    steps: Steps | None  # the work left: passes and code generation
    why: str | None
    moved: bool = False  # the reason is a change of Python's state, which a first call may set up
    recorded: CacheEntry | None = None  # the cache entry, when the steps were taken
    operators: int = 0  # that the call ran
    place: SourceLine | None = None  # the user's line that is the reason

    def finish_program(self) -> TraceOutcome:
        """Take all steps; return the outcome with its cache entry."""
        if self.steps is None:
            return self
        return self._replace(recorded=UnfinishedEntry(self.steps).take_steps())


class UnfinishedEntry:
    """A recorded call that waits for its passes and code generation."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.history = EntryHistory()
        self._taken = Lock()  # held by the thread that takes steps

    @property
    def is_exhausted(self) -> bool:
        """True if no step is left; without a program, the steps were broken off."""
        return self.steps.gi_frame is None

    def take_steps(self, until: Deadline = NO_DEADLINE) -> CacheEntry | None:
        """Take a step, and more while there is time for the next; return the entry at the end.

        A step that yields no seconds is expected to be followed by one as long as itself.
        """
        if not self._taken.acquire(blocking=False):
            return None
        try:
            return self._take_steps(until)
        finally:
            self._taken.release()

    def _take_steps(self, until: Deadline) -> CacheEntry | None:
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


def make_guards(
    func: Callable,
    given: tuple[tuple, dict],
    ran: FullCoverage = FULL_COVERAGE,
    until: Deadline = NO_DEADLINE,
) -> Guards:
    """Return the guards of a call: the state besides its tensors that it depends on, as of now."""
    try:
        return Guards(func, map(unbox_static, find_keyed_objects(*given)), ran, until)
    except UnfitArgument as unfit:
        guards = Guards(func, (), ran, until)
        guards.why = str(unfit)
        return guards


class StateBeforeCall:
    """The state before a call: versions of the tensors from outside, and generator states."""

    def __init__(self, leaves: list, guards: Guards) -> None:
        self.outside = [*filter(_is_tensor, leaves), *guards.tensors.values()]
        self.recorder: Tracer | None = None  # the tracer of the call
        self._messages = communication_log.get_position()
        self._drawing = [*self.outside, *guards.generators]
        self._versions = [*map(get_version, self.outside)]
        self._states = rng_state.save_states(self._drawing)

    def has_outside_writes(self) -> bool:
        """True if the call may have written into a tensor from outside."""
        unsaid = self.recorder is not None and self.recorder.notes.writes_unsaid
        return unsaid or [*map(get_version, self.outside)] != self._versions

    def rewind(self) -> None:
        """Go back to the states of generators before the call, and to its messages."""
        rng_state.restore_states(self._states)
        communication_log.rewind_log(self._messages)

    @contextmanager
    def repeat_draws(self) -> Iterator[None]:
        """Return a context that starts from the states before the call.

        At its end the generators have the states that they had at its beginning.
        """
        now = rng_state.save_states(self._drawing)
        self.rewind()
        try:
            yield
        finally:
            rng_state.restore_states(now)


@dataclass
class TracedCall:
    """A call to be recorded: a function, and its arguments as the leaves of the tree ``spec``.

    A backward pass may be recorded with it. With ``certain`` that runs no Python of the user's.
    """

    func: Callable
    leaves: list
    spec: Any
    guards: Guards
    before: StateBeforeCall
    compile_graph: Callable[[Subgraph], Callable] = compile_python
    certain: bool = False
    fastmath: bool = False
    asked: BackwardPass = FIRST_PASS
    until: Deadline = NO_DEADLINE  # the deadline of the recording

    def record(self, given: tuple[tuple, dict] | None) -> TraceOutcome:
        """Run and record the call."""
        made = self._trace(self.leaves, given)
        if made.why != ENTWINED:
            return made
        if self.before.has_outside_writes():
            return made._replace(why=WRITTEN)
        if clock() > self.until.call:
            return made._replace(why=TOO_LONG)
        # Run it once more, unseen by the user, on detached arguments.
        with self.before.repeat_draws():
            alone = self._trace(_detach_leaves(self.leaves), None)
        return made._replace(steps=alone.steps, why=alone.why, place=alone.place)

    def _trace(self, leaves: list, given: tuple[tuple, dict] | None) -> TraceOutcome:
        guards, tensors = self.guards, [*filter(_is_tensor, leaves)]
        recorder = self.before.recorder = Tracer(
            tensors, guards.tensors, guards.generators, self.until
        )
        if guards.why is not None:
            recorder.stop_recording(guards.why)
        outside = [*tensors, *guards.tensors.values()]
        with functorch_interop.run_eagerly(), _watch_history(recorder, outside):
            result = self._call_function(recorder, leaves, given)
        operators = recorder.operators
        found, tree = pytree.flatten(result)
        ends = [*filter(_is_tensor, found)]
        nodes = outline_call(*given)[2] if given is not None else []
        known = guards.collect_ids().union(map(id, tensors))
        why = find_result_problem(result, found, tree, known, nodes if self.certain else None)
        why = why or next(filter(None, map(_find_result_problem, ends)), None)
        if why is not None:
            recorder.stop_recording(why)
        moved = recorder.why is None and not guards.hold()
        if moved:
            what = guards.describe_change() or "a list, an attribute, a global"
            recorder.stop_recording(f"it changes Python's state: {what}")
        if guards.ran.seen and recorder.notes.tells:  # it read one by a name that no code contains
            recorder.stop_recording(TELLING)
        if recorder.notes.communicates and _have_history(ends):
            recorder.stop_recording(COMMUNICATES)
        views = find_output_bases(recorder, ends) if _have_history(ends) else None
        ends = ends if views is None else views.ends
        back = record_backward(recorder, tensors, ends, self.asked, certain=self.certain)
        program = recorder.make_program(ends if views is None else views.numbers)
        if program is None:
            why, place = recorder.why, recorder.place
            return TraceOutcome(result, None, why, moved, operators=operators, place=place)
        if back is None and views is not None:
            return TraceOutcome(result, None, SHARED)
        if back is not None:
            why = find_entanglement(program) or self._find_rebuild_problem(given, nodes)
            if why is not None:
                return TraceOutcome(result, None, why)
        guards.watch_tensors(program.captured.values())
        if recorder.notes.chooses:
            guards.watch_kernels()
        how = (
            guards,
            ResultTree.from_leaves(found, tree),
            ArgumentOverlaps.find_overlaps(tensors, nodes, guards),
            self.compile_graph,
        )
        if back is None:
            return TraceOutcome(result, self._make_steps(program, how), None)
        again = EagerRerun.capture_settings(self._make_rerun(views))
        return TraceOutcome(result, self._make_joint_steps(program, how, back, again, views), None)

    def _make_steps(self, program: Program, how: tuple) -> Steps:
        """Run the passes and generate code, in steps; no step looks at the call's tensors."""
        yield from iter_passes(program, fastmath=self.fastmath)
        yield from choose_calls(program)
        yield _WRITTEN * len(program.nodes)
        return CacheEntry(program, *how)

    def _make_joint_steps(
        self,
        program: Program,
        how: tuple,
        back: BackwardHalf,
        again: EagerRerun,
        views: OutputBases | None,
    ) -> Steps:
        kept = () if views is None else views.given
        back = yield from iter_joint_passes(program, back, kept, fastmath=self.fastmath)
        yield from choose_calls(program)
        yield _WRITTEN * len(program.nodes)
        return DifferentiableEntry(program, *how, Derivative(program, back, again, views))

    def _call_function(
        self, recorder: Tracer, leaves: list, given: tuple[tuple, dict] | None
    ) -> Any:
        """Call the function under the tracer, with the user's own containers if they are at hand.

        A call that changes one of them cannot be recorded.
        """
        if given is not None and all(map(is_, pytree.get_leaves(given), leaves)):
            args, kwargs = given
        else:
            args, kwargs = pytree.unflatten(leaves, self.spec)
        before, was = pytree.get_leaves((args, kwargs)), _outline_arguments(args, kwargs)
        with activate_tracer(recorder), recorder.record_answers(), SideEffectMode(recorder):
            result = self.func(*args, **kwargs)
        after = pytree.get_leaves((args, kwargs))
        try:
            changed = not all(map(is_, after, before)) or _outline_arguments(args, kwargs) != was
        except UnfitArgument:  # it has put in a value that no cache key can have
            changed = True
        if changed:
            recorder.stop_recording("it changes what it is given: a list, a dict, an attribute")
        return result

    def _find_rebuild_problem(
        self, given: tuple[tuple, dict] | None, nodes: Sequence[Any]
    ) -> str | None:
        """The reason why rebuilt arguments would not do for an eager rerun, None if they would."""
        if given is None:
            return None
        args, kwargs = pytree.unflatten(self.leaves, pytree.copy_contexts(self.spec))
        met = not self.guards.collect_ids().isdisjoint(map(id, nodes))
        if met or _outline_arguments(args, kwargs) != _outline_arguments(*given):
            return "an argument is more than its leaves, with a derivative at stake"
        return None

    def _make_rerun(self, views: OutputBases | None) -> Callable[[Sequence[Tensor]], list[Tensor]]:
        """Return a function from other tensors, as arguments, to the ends of the user's function.

        It keeps no tensor of the call.
        """
        func, spec = self.func, pytree.copy_contexts(self.spec)
        leaves = [_TENSOR if _is_tensor(x) else x for x in self.leaves]

        def rerun_function(tensors: Sequence[Tensor]) -> list[Tensor]:
            stand_ins = iter(tensors)
            filled = [next(stand_ins) if x is _TENSOR else x for x in leaves]
            args, kwargs = pytree.unflatten(filled, pytree.copy_contexts(spec))
            results = [*filter(_is_tensor, pytree.get_leaves(func(*args, **kwargs)))]
            return results if views is None else views.find_bases(results)

        return rerun_function


def record(
    func: Callable,
    leaves: list,
    spec: Any,
    guards: Guards | None = None,
    before: StateBeforeCall | None = None,
    *,
    given: tuple[tuple, dict] | None = None,
    **how: Any,
) -> TraceOutcome:
    """Run a call and make its program; ``how`` are the fields of a `TracedCall`.

    ``given`` are the user's own containers of the arguments, if they are at hand.
    """
    guards = guards or make_guards(func, given or pytree.unflatten(leaves, spec))
    leaves = [*map(unbox_static, leaves)]
    before = before or StateBeforeCall(leaves, guards)
    return begin_recording(func, leaves, spec, guards, before, given=given, **how).finish_program()


def begin_recording(
    func: Callable,
    leaves: list,
    spec: Any,
    guards: Guards,
    before: StateBeforeCall,
    *,
    given: tuple[tuple, dict] | None,
    **how: Any,
) -> TraceOutcome:
    """Run and record a call as `record` does, and leave the steps that make its program."""
    return TracedCall(func, leaves, spec, guards, before, **how).record(given)


def _find_result_problem(result: Tensor) -> str | None:
    """The reason why a program cannot make a result: its class or attributes; else None."""
    if type(result) not in PLAIN:
        return f"a result of class {get_users_class(result).__name__}"
    return (
        f"a result with an attribute, .{next(iter(result.__dict__))}" if result.__dict__ else None
    )


def _have_history(ends: Sequence[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in ends)


def _outline_arguments(args: tuple, kwargs: dict) -> Any:
    """The structure of the arguments and the attributes of their tensors, to be compared."""
    leaves, shape, _ = outline_call(args, kwargs)
    attributes = [KeyMaker(leaves).make_key(vars(x)) for x in leaves if _is_tensor(x) and vars(x)]
    return shape, attributes


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


_TENSOR: Any = object()


def _detach_leaves(leaves: list) -> list:
    """The leaves with detached ones in place of tensors that have a `grad_fn`."""
    made = [x for x in leaves if _is_tensor(x) and x.requires_grad and x.grad_fn is not None]
    cut = {id(x): x.detach().requires_grad_() for x in made}
    return [cut.get(id(x), x) for x in leaves]


@contextmanager
def _watch_history(recorder: Tracer, tensors: Sequence[Tensor]) -> Iterator[None]:
    """Watch these tensors: the recording ends if the history of one is changed, or pulled back.

    Tensors with other histories have the same key, so a program may not depend on a history.
    """
    histories = [t.grad_fn for t in tensors]

    def refuse(_: object) -> None:
        recorder.stop_recording(PULLED_BACK)

    hooks = [node.register_prehook(refuse) for node in {*histories} - {None}]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    if any(t.grad_fn is not history for t, history in zip(tensors, histories, strict=True)):
        recorder.stop_recording(WRITTEN)
