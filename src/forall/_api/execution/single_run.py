"""The first strategy: all examples in one run of the function, which can be undone.

A run ends at a test that its examples answer differently. Its effects are undone, and it raises
`DivergedGroups`, so that another strategy runs the call.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from forall._api import mapped_inputs, ragged
from forall._api.memory_budget import suspend_memory_limit
from forall._api.subclass_arguments import stack_by_class
from forall._compat import functorch_interop, pytree, rng_state, tensordict, trace_modes
from forall._compat.dispatch_state import functions_off
from forall._compat.numpy_interop import is_numpy_number
from forall._compat.private_api import count_dispatch_modes
from forall._compat.storage import is_out_of_memory
from forall._compat.tensor_subclass import is_of_users_class, restore_users_class, strip_users_class
from forall._compat.wrapper_tensor import Wrapper
from forall._core.divergence import TimeExceeded
from forall._core.errors import TransformCall
from forall._core.levels import stack
from forall._core.python_snapshot import PythonSnapshot
from forall._core.sparse_operands import COMPRESSED
from forall._divergence.batched_scalar import BatchedScalar, number_to_tensor
from forall._random.key_scope import enter_scope, scopes
from forall._vmap import boundary
from forall._vmap.batched_tensor import BatchedTensor, replace_ended_args
from forall._vmap.concretize_listeners import StepLimit, TracerListener, add_listeners
from forall._vmap.dispatch import run_vmap_level
from forall._vmap.mutation.mutation_log import (
    get_memory_key,
    make_unrecorded_error,
    take_log_snapshots,
)
from forall._vmap.vmap_level import VmapConfig, VmapLevel

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from forall._api.execution.mapped_call import MappedArguments, MappedCall
    from forall._core.errors import CallOrigin
    from forall._vmap.concretize_listeners import Listener


_NOTHING = nullcontext()


def run_together(call: MappedCall, how: str = "as it is") -> tuple[list, Any]:
    """Run all examples at once, and report that the call ran in this way."""
    report = call.options.report
    try:
        result = run_once(call)
    except DivergedGroups as diverged:
        if report is not None:
            report.note_undone(how, diverged.why)
        raise
    if report is not None:
        report.note_run(how)
    return result


def run_once(call: MappedCall) -> tuple[list, Any]:
    """Run the function once; raise `DivergedGroups` if its examples diverge."""
    config = VmapConfig(call.draws.flag, diverges=call.options.divergence == "split")
    level = VmapLevel(call.arguments.size, config, stack.top)
    level.origin, level.axis = call.origin, call.axis
    scope = level.state.scope = call.draws.scope(level, call.origin.numbers)
    drawing = _NOTHING if scope is scopes.running else enter_scope(scope)
    listening = _listen_to_tests(call, level)
    arguments = call.arguments
    entered = list(arguments.leaves)
    for i, dim in enumerate(arguments.dims):
        if dim is not None:
            leaf = arguments.leaves[i]
            level.state.mutation_log.arguments.append(leaf)
            if leaf.layout in COMPRESSED:
                leaf = leaf.to_sparse()  # only coordinates have one tensor for all examples
            entered[i] = boundary.stack_to_example(leaf, dim, level)
    examples = entered
    if arguments.looks:
        examples = [*entered]
        for i, found in arguments.looks.items():
            examples[i] = found.put_on_example(entered[i], level)
    with (
        Rollback(call, level),
        functorch_interop.run_eagerly(),
        run_vmap_level(level),
        drawing,
        listening,
    ):
        # Classes of the user's may look at examples where they are put together.
        args, kwargs = arguments.unflatten(examples)
        result = call.func(*args, **kwargs)
        captured = _find_written_captures(level) if level.lift_cache else []
    for t, stand_in in captured:
        boundary.hand_back_captured(t, stand_in, level)
    _give_back_history(arguments, entered, level, call.origin)
    is_leaf = type(result) is BatchedTensor
    results, spec = ([result], pytree.LEAF) if is_leaf else pytree.flatten(result)
    if spec.type is not None:
        mapped_inputs.check_contexts(call.places, spec, level)
    left = []
    seen: set[int] = set()
    places = call.places.expand_to_leaves(spec)
    for r, place in zip(results, places, strict=True):
        if type(r) is BatchedScalar:
            r = number_to_tensor(r)
        elif place is not None and not isinstance(r, torch.Tensor) and _is_number(r):
            r = torch.tensor(r)
        result = _take_out_result(r, place, level, call.places, seen)
        if call.options.ragged and place is not None and isinstance(result, torch.Tensor):
            result = ragged.split_examples(result, place)
        left.append(result)
    if spec.type is None:
        return left, spec
    return left, tensordict.make_batch_spec(spec, places, level.size)


def _is_number(r: Any) -> bool:
    return isinstance(r, (int, float, complex)) or is_numpy_number(r)


def _listen_to_tests(call: MappedCall, level: VmapLevel) -> AbstractContextManager:
    """Return a context in which listeners are notified of tests on values."""
    func, options = call.origin.call.func, call.options
    listeners: list[Listener] = []
    if count_dispatch_modes() and trace_modes.is_tracer_on():
        listeners.append(TracerListener(TransformCall("vmap", func)))
    if options.max_steps is not None:
        limited = TransformCall("vmap", func, max_steps=options.max_steps)
        level.state.limit = StepLimit(limited, level, options.max_steps)
        listeners.append(level.state.limit)
    if options.report is not None:
        options.report.begin_run(level)
        listeners.append(options.report)
    return add_listeners(listeners) if listeners else _NOTHING


def _give_back_history(
    arguments: MappedArguments, entered: list, level: VmapLevel, origin: CallOrigin
) -> None:
    """Give the caller's tensors the history of writes into their examples."""
    changed = []
    with functions_off():
        for leaf, dim, example in zip(arguments.leaves, arguments.dims, entered, strict=True):
            if dim is None or example.grad_fn is None:
                continue
            if boundary.hand_back_history(example, leaf, dim, level):
                changed.append(leaf)
    for leaf in changed:
        twins = [x for x in arguments.leaves if isinstance(x, torch.Tensor)]
        if sum(get_memory_key(x) == get_memory_key(leaf) for x in twins) > 1:
            raise mapped_inputs.make_written_twice_error(origin.call, leaf)


def _find_written_captures(level: VmapLevel) -> list[tuple[torch.Tensor, Any]]:
    """The captured tensors that get the history of writes into what stood for them.

    Raises:
        RuntimeError: another captured tensor has the same memory. It got no history of the write.
    """
    with functions_off():
        captured = boundary.list_written_captures(level)
        for t, stand_in in captured:
            others = (o for o, _ in level.lift_cache.values() if o is not t and o.requires_grad)
            if any(get_memory_key(other) == get_memory_key(t) for other in others):
                raise make_unrecorded_error("the function", stand_in)
    return captured


def _take_out_result(
    r: Any, place: int | None, level: VmapLevel, places: mapped_inputs.OutDims, seen: set[int]
) -> Any:
    if not isinstance(r, torch.Tensor):
        return mapped_inputs.pass_through(places, r, level)
    with functions_off():  # who asks a value of an ended level has what is left of it made
        is_nested = r.is_nested
    if is_nested:
        raise mapped_inputs.make_nested_error(places.call, r)
    known = r
    if type(r) is not BatchedTensor and is_of_users_class(r):
        r = strip_users_class(r)
    if isinstance(r, Wrapper) and r.level is not level:
        if r.level.root is level:
            r = r.level.complete_gradient_for(r, level)  # a derivative of some of the examples
        elif place is not None:
            ((r,), _) = replace_ended_args(f"the result of {places.call}", (r,), {})
    if place is None:
        return restore_users_class(mapped_inputs.keep_unmapped(places, r, level), known)
    with functions_off():
        rank = r.dim() + 1
    if not -rank <= place < rank:
        raise mapped_inputs.make_missing_place_error(places.call, r, place)
    made = boundary.example_to_stack(r, place % rank, level)
    memory = id(getattr(r, "family", None) or r)
    if memory in seen:  # a tensor returned twice, or with a view of it: the loop would copy both
        made = made.clone()
    seen.add(memory)
    return made if known is r else stack_by_class(known, made, place % rank, level)


class DivergedGroups(BaseException):
    """A signal that a run was undone because its examples diverged into these groups, and why.

    ``groups`` is None if they are not known. ``why`` is the line where the examples diverged, an
    error, or what prevents the run.
    """

    def __init__(self, groups: list[list[int]] | None, why: Any) -> None:
        super().__init__(groups)
        self.groups: Any = groups
        self.why = why


class StateSnapshot:
    """A snapshot of Python's state, random states and outer logs that a call may change."""

    __slots__ = ("drawn", "marks", "python")

    def __init__(self, call: MappedCall) -> None:
        self.python = PythonSnapshot(call.func, call.arguments.given)
        self.drawn = None
        if call.draws.flag != "error":
            self.drawn = rng_state.save_states(call.arguments.leaves)
        self.marks = () if stack.top is None else take_log_snapshots(stack.top)

    def restore(self) -> None:
        self.python.restore()
        self.draw_again()
        self.forget()

    def forget(self) -> None:
        """Undo what levels further out have logged since."""
        for log, mark in self.marks:
            log.restore_snapshot(mark)

    def record_generators(self) -> AbstractContextManager[None]:
        """Return a context in which generators that draw for the first time are recorded too."""
        return _NOTHING if self.drawn is None else rng_state.record_new_states(self.drawn)

    def draw_again(self) -> None:
        if self.drawn is not None:
            rng_state.restore_states(self.drawn)
        for generator, state in self.python.generators:
            generator.set_state(state)


class Rollback:
    """A context that undoes all side effects of a run if its examples diverge."""

    __slots__ = ("call", "level", "noting", "state")

    def __init__(self, call: MappedCall, level: VmapLevel) -> None:
        self.call, self.level = call, level
        undoable = level.config.diverges or call.options.retries_on_oom
        self.state = StateSnapshot(call) if undoable and level.size > 1 else None
        draws = self.state is not None and self.state.drawn is not None
        self.noting = self.state.record_generators() if draws else _NOTHING
        level.state.mutation_log.undoable = undoable
        if call.options.logs is not None:
            call.options.logs.append(level.state.mutation_log)

    def __enter__(self) -> None:
        self.noting.__enter__()

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.noting.__exit__(None, None, None)
        level = self.level
        log = level.state.mutation_log
        diverged, why = level.state.divergence or (None, None)
        options = self.call.options
        if (
            diverged is None
            and error is not None
            and options.must_rerun is not None
            and options.must_rerun(options, level, error)
        ):
            diverged, why = [[*range(level.size)]], error
        if diverged is None and needs_plain_numbers(error):
            diverged, why = [[n] for n in range(level.size)], error
        if diverged is not None and self.state is not None:
            # Even if the signal did not arrive: a bare `except:` of the user's may have caught it.
            self._undo(self.state)
            raise DivergedGroups(diverged, why) from None
        if (
            error is not None
            and self.state is not None
            and (isinstance(error, TimeExceeded) or must_retry(self.call, error))
        ):
            self._undo(self.state)
            return
        log.unwrap_shared_grads()
        if options.logs is None:
            log.drop_undo_state()

    def _undo(self, state: StateSnapshot) -> None:
        with suspend_memory_limit():
            self.level.state.mutation_log.undo_state.undo()
            state.restore()


def needs_plain_numbers(error: BaseException | None) -> bool:
    """Return True for the error of a function in C that takes Python's own numbers alone."""
    return type(error) in (TypeError, RuntimeError) and BatchedScalar.__name__ in str(error)


def must_retry(call: MappedCall, error: BaseException | None) -> bool:
    """Return True if a run is undone since memory did not suffice, to be retried."""
    return call.options.retries_on_oom and is_out_of_memory(error)
