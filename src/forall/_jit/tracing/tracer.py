"""The tracer: a dispatch mode that records the operators of a call below all transforms.

The recorder is the outermost dispatch mode, so operators reach it on ordinary tensors, after vmap
levels have unwrapped their values and autograd has recorded its graph. The recorded call is a real
one; its results are the user's.

NOTE [what cannot be recorded]
    A program is the same for all data, and knows the origin of each of its tensors: an argument, a
    tensor that the function captures in sight of the guards, or one of its own operators. A tensor
    of any other origin ends the recording, as does an operator that tells Python about data, or one
    whose result has a data-dependent shape. The call then goes on eagerly.

NOTE [answers]
    Most reads of data by Python are tests with the same answer each time: whether arguments are
    valid, whether all entries are finite. A program makes the same test and asserts the answer.
    Where the answer is another one, the program fails before any effect is seen outside, and the
    function is called. An integer is such an answer too (the number of nodes of a graph), and so is
    the shape of what is selected by a mask, which the program computes and asserts. For an answer
    of an accelerator the program waits as the function does, see NOTE [assertions of a device].
"""

from __future__ import annotations

import sys
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forall._compat import pytree
from forall._compat.assertions import REQUIRE, raises_on_host
from forall._compat.call_site import OURS, TORCH, SourceLine, find_users_line
from forall._compat.devices import synchronize_devices
from forall._compat.dispatch_state import functions_off, in_torch_func
from forall._compat.exception_safety import contextmanager
from forall._compat.jagged_layout import Jagged
from forall._compat.lazy_bits import call_with_lazy_bits
from forall._compat.op_schema import OperatorFacts, find_written_args, get_facts
from forall._compat.private_api import DispatchMode
from forall._compat.storage import get_storage_id, has_memory
from forall._compat.tensor_subclass import CALLS_ON
from forall._compat.wrapper_tensor import Wrapper
from forall._core import rank_ops
from forall._core.escaped_values import dispatch_without_mode
from forall._jit.deadline import (
    NO_DEADLINE,
    STEPS_PER_CLOCK_READ,
    TOO_LONG,
    Deadline,
    clock,
)
from forall._jit.graph import OpNode, Program, Ref
from forall._jit.tracing.rng_draws import RecordedDraws
from forall._jit.tracing.traced_values import TracedValues, TraceNotes
from forall._jit.tracing.uninitialized import reads_uninitialized

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

aten = torch.ops.aten
_INDEX = aten.index.Tensor
_INDEXING = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
_LIFT_FRESH_OPS = (aten.lift_fresh.default, aten.lift_fresh_copy.default)

_HANDED_ON = f"{TORCH}_ops.py"  # the file of `OpOverload.__call__`

_SEED = "it sets the state of a random generator"
TORCHS = "a transform of torch.func's runs in it"
_ANSWER = "an answer is another one than when this was recorded"
TELLING = "it asks for what tells of a tensor more than its kind"
_LEFT = "it takes a derivative in inference mode, or leaves that mode otherwise"

# Operators that tell Python about data, or change a tensor's metadata, without a tag for it.
_UNFIT_OPS = {
    getattr(getattr(aten, name), overload)
    for name, overload in (
        ("equal", "default"),
        ("is_nonzero", "default"),
        ("item", "default"),
        ("_local_scalar_dense", "default"),
        ("set_", "source_Tensor"),
        ("set_", "source_Storage"),
        ("set_", "source_Storage_storage_offset"),
        ("resize_", "default"),
        ("resize_as_", "default"),
    )
}

# Operators that return a number to Python. A program asserts bools and ints, see NOTE [answers].
_READ_OPS = {aten._local_scalar_dense.default, aten.item.default, aten.is_nonzero.default}
_EQUAL, _SAME, _ALL = aten.equal.default, aten.eq.Tensor, aten.all.default
_NOT, _HOLDS, _SHAPED = (
    aten.logical_not.default,
    aten._assert_async.default,
    aten._assert_tensor_metadata.default,
)
ASSERT_OPS = frozenset({_HOLDS, REQUIRE, _SHAPED})

# Operators that give a tensor another shape in place, and the view that does the same.
_AS_VIEWS = {
    aten.squeeze_.default: aten.squeeze.default,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims,
    aten.unsqueeze_.default: aten.unsqueeze.default,
    aten.t_.default: aten.t.default,
    aten.transpose_.default: aten.transpose.int,
}

# Operators that read layouts and dtypes: for one cache key their answer is always the same.
_METADATA_OPS = {
    aten.is_same_size.default,
    aten._has_same_storage_numel.default,
    aten.can_cast.default,
    aten.promote_types.default,
    *(getattr(aten.result_type, name) for name in aten.result_type.overloads()),
}


class TracingHalted(Exception):  # noqa: N818 - no error: the pass runs for the recorder alone
    """Signal that a backward pass takes too long to record, to break it off."""


class _Phase(Enum):
    """The part of a recording that is under way."""

    ANSWERS = auto()  # reads of data are recorded as assertions
    HALTS = auto()  # after the deadline, an exception ends the run


class Tracer(DispatchMode):
    """A dispatch mode that records the nodes and values of one call.

    ``why`` is the reason if the call cannot be recorded.
    """

    def __init__(
        self,
        inputs: Sequence[torch.Tensor],
        known: dict[int, torch.Tensor],
        generators: Sequence[torch.Generator],
        until: Deadline = NO_DEADLINE,
    ) -> None:
        super().__init__()
        self.until = until  # the deadline of the recording
        self.operators = 0  # that were called so far
        self.traced = TracedValues(known)
        self.traced.add_inputs(inputs)
        self.notes = TraceNotes()
        self.nodes: list[OpNode] = []
        self.why: str | None = None
        self.place: SourceLine | None = None  # the user's line that is the reason
        self.given: Any = None  # function, args and kwargs of the torch call that is under way
        self._draws = RecordedDraws(inputs, generators)
        self._phase: _Phase | None = None
        self._inference = torch.is_inference_mode_enabled()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if types and any(issubclass(t, Wrapper) for t in types):
            if Jagged in types:
                return NotImplemented  # the wrappers' classes know what torch's class gets wrong
            with self:  # a level that has exited unwraps its values
                return dispatch_without_mode(func, args, kwargs)
        if torch.is_inference_mode_enabled() is not self._inference:
            self.stop_recording(_LEFT)
        self.operators += 1
        known = _OP_FACTS.get(id(func)) or _OpFacts.look_up(func)
        if known.statistics:
            written = len(find_written_args(func, args))
            self.notes.writes_unsaid |= written > len(known.facts.mutates)
        if self.why is not None or known.aside:
            with functions_off():  # function modes are to see the user's calls alone
                return call_with_lazy_bits(func, args, kwargs)
        if in_torch_func():  # torch.func's wrappers have no memory, and we may not unwrap them
            self.stop_recording(TORCHS)
            return func(*args, **kwargs)
        if known.fresh and self._may_read_tensors(sys._getframe()):
            self.stop_recording("the numbers of tensors are read to make another")
        if known.reads and self._phase is _Phase.ANSWERS and holds_integers(args[0]):
            return self._record_answer(func, args[0])
        if func is _EQUAL and self._phase is _Phase.ANSWERS:
            return self._record_equal(*args)
        with functions_off():  # a backward pass has function modes on; they are not to see ours
            node = self._make_node(func, known, args, kwargs)
            out = call_with_lazy_bits(func, args, kwargs)
            if node is not None:
                if known.facts.seeded:
                    self._draws.note_draw()
                before = len(self.traced.values)
                if func is rank_ops.BEGIN:
                    node.args = (*node.args[:-1], out.tolist())  # the sizes that are expected
                if node.op is func:
                    node.outs = self._number_outs(node, args, out)
                else:
                    node.outs = self.traced.add(out, self._find_root(node, args, out))
                # Else the result is an alias. An operator without a result is there to raise.
                if out is None or len(self.traced.values) > before or node.writes():
                    self.nodes.append(node)
                    if not len(self.nodes) % STEPS_PER_CLOCK_READ:
                        self._check_deadline()
                if known.facts.dynamic and _has_dynamic_shape(func, args):
                    self._assert_shapes(out)
        return out

    def _may_read_tensors(self, frame: Any) -> bool:
        """True if a tensor may be made of numbers that torch reads from tensors in a list."""
        maker = _find_maker_frame(frame)
        name, file = maker.f_code.co_name, maker.f_code.co_filename
        if file.startswith(OURS) and name != "__torch_function__":
            return False  # our own call; a function mode of ours calls for the user
        seen = self.given is not None and file.startswith((OURS, TORCH))
        return not seen or _holds_tensors(self.given)

    def _assert_shapes(self, out: Any) -> None:
        for t in pytree.get_leaves(out):
            if isinstance(t, torch.Tensor):
                self.__torch_dispatch__(_SHAPED, (), (t, [*t.shape]))

    def _check_deadline(self) -> None:
        if self._phase is _Phase.HALTS:
            if clock() > self.until.work:
                self.stop_recording(TOO_LONG)
                raise TracingHalted
        elif self.until.is_over(self.operators):
            self.stop_recording(TOO_LONG)

    def halt_when_late(self) -> AbstractContextManager:
        """Return a context for runs that serve the recorder alone: after the deadline, raise.

        The exception is `TracingHalted`.
        """
        return self._enter_phase(_Phase.HALTS)

    def record_answers(self) -> AbstractContextManager:
        """Return a context within which reads of data are recorded as assertions.

        A backward pass is outside of it: a failed assertion there has no call to rerun.
        """
        return self._enter_phase(_Phase.ANSWERS)

    @contextmanager
    def _enter_phase(self, phase: _Phase) -> Iterator[None]:
        self._phase = phase
        try:
            yield
        finally:
            self._phase = None

    def _record_answer(self, func: Any, t: Any) -> Any:
        answer = func(t)
        with functions_off():
            if t.dtype is not torch.bool:
                t = self.__torch_dispatch__(aten.eq.Scalar, (), (t, aten.item.default(t)))
                self._assert_answer(t, True)
            else:
                self._assert_answer(t, answer)
        return answer

    def _assert_answer(self, t: torch.Tensor, answer: bool) -> None:
        """Record the assertion that a test has the answer that it has now."""
        if not answer:
            t = self.__torch_dispatch__(_NOT, (), (t,))
        is_torchs = raises_on_host(t)
        self.__torch_dispatch__(*((_HOLDS, (), (t,)) if is_torchs else (REQUIRE, (), (t, _ANSWER))))

    def _record_equal(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        """Record `torch.equal`; where shapes differ, its answer does not depend on the data."""
        with functions_off():
            answer = _EQUAL(a, b)
            if a.shape == b.shape:
                t = self.__torch_dispatch__(_SAME, (), (a, b))
                self._assert_answer(self.__torch_dispatch__(_ALL, (), (t,)), answer)
        return answer

    def stop_recording(self, why: str) -> None:
        if self.why is None:
            self.why = why
            self.place = find_users_line() if self._phase is _Phase.ANSWERS else None
        self.nodes, self.traced.constants = [], {}

    def add_hidden_constant(self, t: torch.Tensor) -> None:
        """Enter a tensor of our own as a constant: it is the same in each call, unseen by modes."""
        if self.why is None:
            self.traced.add_constant(t)

    def make_program(self, outputs: Iterable[torch.Tensor | int]) -> Program | None:
        """The recorded program with these results; None where ``why`` is the reason against it."""
        if self._draws.has_stray_draw():
            self.stop_recording(_SEED)
        numbers = [t if isinstance(t, int) else self.add_result(t) for t in outputs]
        found = [n for n in numbers if n is not None]
        traced = self.traced
        seen = (*found, *traced.inputs, *traced.captured)
        if self.why is None and reads_uninitialized(self.nodes, traced.values, seen):
            self.stop_recording("memory is written where no operator tells")
        if self.why is not None:
            return None
        synchronize_devices(traced.constants.values())
        return Program(
            values=traced.values,
            inputs=traced.inputs,
            captured=traced.captured,
            constants=traced.constants,
            nodes=self.nodes,
            outputs=found,
        )

    def add_result(self, t: torch.Tensor) -> int | None:
        """The value of a result, with a detach or an alias recorded where it needs its own."""
        n = self.traced.find(t) if has_memory(t) else None
        if n is None:
            self.stop_recording("a result comes from where no operator was seen")
        elif n in self.traced.aliases:
            return n
        elif self.why is None and not t.requires_grad and self._is_view_of_outside(n):
            return self._add_alias(n, t, aten.detach.default)
        elif self.why is None and self.traced.get_tensor(n) is not t:  # the user sees two tensors
            return self._add_alias(n, t, aten.alias.default)
        return n

    def _is_view_of_outside(self, n: int) -> bool:
        """True if a value is a view of a tensor from outside that requires grad."""
        root = self.traced.values[n].root
        known = self.traced.get_tensor(root)
        return known is not None and known.requires_grad and self.traced.is_from_outside(known)

    def _add_alias(self, n: int, t: torch.Tensor, op: Any) -> int:
        named = self.traced.add(t, self.traced.values[n].root)
        self.nodes.append(OpNode(op, (Ref(n),), {}, named))
        self.traced.aliases.add(named)
        return named

    def _make_node(self, func: Any, known: _OpFacts, args: tuple, kwargs: dict) -> OpNode | None:
        fact = known.facts
        if fact.is_collective:  # it has not waited when it returns, and ranks have not agreed
            self.stop_recording(f"{func} communicates between processes")
            return None
        self.notes.communicates |= fact.communicates
        hears = self._phase is _Phase.ANSWERS
        looks = fact.dynamic and not hears and _has_dynamic_shape(func, args)
        changes = known.changes
        if changes and not self.traced.is_from_outside(args[0]):
            func = _AS_VIEWS.get(func, func)  # from now on the tensor is a view of its old value
            changes = torch.Tag.inplace_view in func.tags
        if known.unfit or looks or changes:
            self.stop_recording(f"{func} looks at numbers, or changes what a tensor is")
            return None
        if fact.seeded and (
            self._draws.has_stray_draw() or self._draws.uses_unknown_generator((args, kwargs))
        ):
            self.stop_recording(_SEED)
        if known.fresh and self.traced.find(args[0]) is None:  # just made of Python numbers
            self.traced.add_constant(args[0])
        args = tuple([self._convert_argument(a) for a in args])
        kwargs = (
            {name: self._convert_argument(a) for name, a in kwargs.items()} if kwargs else kwargs
        )
        return None if self.why is not None else OpNode(func, args, kwargs, None)

    def _convert_argument(self, a: Any) -> Any:
        if isinstance(a, torch.Tensor):
            return self._make_ref(a)
        return pytree.map_tensors(self._make_ref, a) if isinstance(a, _TREES) else a

    def _make_ref(self, t: torch.Tensor) -> Ref | None:
        """The reference that stands for a tensor argument; unknown tensors end the recording."""
        n = self.traced.find(t) if has_memory(t) else None
        if n is None:
            self.stop_recording(
                f"a tensor of class {type(t).__name__}, {t.layout}, {t.dtype}"
                if not has_memory(t)
                else f"a tensor {t.dtype} {[*t.shape]} that is captured where it is not seen"
            )
        return None if n is None else Ref(n)

    def _number_outs(self, node: OpNode, args: tuple, out: Any) -> Any:
        if isinstance(out, torch.Tensor):
            if not has_memory(out):
                self.stop_recording(f"{node.op} returns a tensor of {out.layout}, {out.dtype}")
                return None
            n = self.traced.find(out)
            return self.traced.add(out, self._find_root(node, args, out)) if n is None else n
        if isinstance(out, (tuple, list)):
            return [self._number_outs(node, args, o) for o in out]
        if out is not None:
            self.stop_recording(f"{node.op} returns {type(out).__name__}")
        return None

    def _find_root(self, node: OpNode, args: tuple, out: torch.Tensor) -> int | None:
        """The root of the argument that a result shares memory with."""
        place = get_storage_id(out)
        if not self.traced.find_in_storage(place):  # new memory, of no argument
            return None
        tensors = [a for a in pytree.get_leaves((args, node.kwargs)) if isinstance(a, torch.Tensor)]
        for n, a in zip(node.reads(), tensors, strict=False):
            if get_storage_id(a) == place:
                return self.traced.values[n].root
        return None


class _OpFacts(NamedTuple):
    """Facts about an operator that each call needs, looked up by id.

    To hash an operator takes as long as this look-up.
    """

    func: Any  # kept alive, so that no other gets the same id
    facts: OperatorFacts
    aside: bool
    fresh: bool
    reads: bool
    unfit: bool
    changes: bool  # True if the operator changes a tensor's metadata
    statistics: bool

    @classmethod
    def look_up(cls, func: Any) -> _OpFacts:
        known = _OP_FACTS[id(func)] = cls(
            func,
            get_facts(func),
            aside=func in _METADATA_OPS or func.namespace == "profiler",
            fresh=func in _LIFT_FRESH_OPS,
            reads=func in _READ_OPS,
            unfit=func in _UNFIT_OPS,
            changes=torch.Tag.inplace_view in func.tags,
            statistics=bool(get_facts(func).statistics),
        )
        return known


_OP_FACTS: dict[int, _OpFacts] = {}
_TREES = (list, tuple, dict)


def _has_dynamic_shape(func: Any, args: tuple) -> bool:
    """True if the shape of the result depends on data."""
    return get_facts(func).dynamic and not (func is _INDEX and not _has_mask(args[1]))


def _find_maker_frame(frame: Any) -> Any:
    """The frame that calls for a tensor of Python's numbers.

    ``frame`` is that of the `__torch_dispatch__` that has the operator. A level passes the operator
    on, so its caller is the frame that is looked for, or the next level's `__torch_dispatch__`.
    """
    while True:
        while frame.f_code.co_name != "__torch_dispatch__":
            frame = frame.f_back
        frame = frame.f_back
        if frame.f_code.co_filename != _HANDED_ON:
            return frame.f_back if frame.f_code is CALLS_ON else frame


def _holds_tensors(given: tuple) -> bool:
    """True if torch may read numbers of tensors in a list, which no operator shows.

    In an index, a tuple holds tensors as indices, and a list or tuple inside it holds numbers.
    """
    func, args, kwargs = given
    rows = [a for a in (*args, *kwargs.values()) if isinstance(a, (list, tuple))]
    if func in _INDEXING:
        rows = [
            [b for b in row if isinstance(b, (list, tuple))] if type(row) is tuple else row
            for row in rows
        ]
    return any(isinstance(x, torch.Tensor) for x in pytree.get_leaves(rows))


def holds_integers(t: torch.Tensor) -> bool:
    """Return True for a tensor of integers or bools, whose data Python may read."""
    return not (t.is_floating_point() or t.is_complex())


def _has_mask(indices: Any) -> bool:
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)
