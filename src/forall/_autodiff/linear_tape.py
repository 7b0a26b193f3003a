"""The tangent program of a function: the operators that forward mode runs on a tangent, recorded.

`linearize` runs its function once with a tape tensor as tangent. PyTorch's forward formulas use it
as any tensor, and every operator that they call on it is recorded. The graph is a linear program in
the tangent. Its constants are the primal values with their autograd history, so its results are
differentiable with respect to the point of linearisation too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from forall._compat.dispatch_state import functions_off
from forall._compat.documented_error import documented_error
from forall._compat.op_schema import get_facts, map_arguments
from forall._compat.private_api import OpOverload, functions_pass, split_tangent
from forall._compat.storage import get_storage_id, has_memory
from forall._compat.symbolic_zeros import LINEAR, simplify_linear
from forall._compat.wrapper_tensor import Wrapper, make_shell, unwrap_all
from forall._core.host_reads import format_numbers
from forall._core.levels import Level, apply_at_level, find_innermost_of
from forall._core.sparse_operands import is_sparse
from forall._jit.graph import FusedNode, Graph, OpNode, Ref

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

aten = torch.ops.aten


@dataclass(slots=True)
class LinearProgram(Graph):
    """A tangent program, which is linear in its first inputs, the tangents.

    While it is recorded, the other values that it reads are ``constants``. `extract_program` makes
    them further inputs, so that all calls of a kind can share the program. Tangents first get these
    ``strides``, with conjugation resolved. They are copied if any step writes: the step would
    change the user's tensor, and its entries may overlap.
    """

    count: int  # of its values
    strides: tuple
    writes: bool = False  # True if a step writes into a tangent

    def find_roots(self) -> list[int]:
        return [0] * self.count  # aliases are not recorded, so that every write is kept

    def may_raise(self, node: OpNode) -> bool:
        return False  # the same constants have raised nothing when it was recorded

    def is_plain(self) -> bool:
        """True if all steps are operators, none a function that a call has made."""
        return not any(isinstance(node, FusedNode) for node in self.nodes)

    def play(self, constants: list[torch.Tensor], seeds: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run the program on other tangents."""
        tangents = map(self._lay_out_seed, seeds, self.strides)
        env = dict(zip(self.inputs, (*tangents, *constants), strict=True))
        for node in self.nodes:
            node.run(env)
        return [env[n] for n in self.outputs]

    def _lay_out_seed(self, seed: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
        seed = seed.resolve_conj().resolve_neg()
        if seed.stride() == strides and not self.writes:
            return seed
        return seed.new_empty_strided(seed.shape, strides).copy_(seed)


@dataclass(slots=True)
class _ConstantNumbers:
    """The numbers of the constants of a program that is being recorded."""

    by_id: dict[int, int] = field(default_factory=dict)
    by_storage: dict[int | None, list[int]] = field(default_factory=dict)
    indexed: int = 0  # the values with a lower number are in ``by_storage``


class TapeLevel(Level):
    """The level of tape tensors. It is never on the stack, so it counts as inside all levels."""

    ends = False

    def __init__(self, parent: Level | None, seeds: list[torch.Tensor]) -> None:
        super().__init__(parent)
        strides = tuple(seed.stride() for seed in seeds)
        self.program = LinearProgram([*range(len(seeds))], {}, {}, [], [], len(seeds), strides)
        self._numbers = _ConstantNumbers()

    def run(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run one operator on the values and record it as a step."""
        if func in _QUESTIONS:
            return _QUESTIONS[func](*args)
        if func is aten._reshape_alias.default:  # reshape calls it where autograd is off
            func, args = aten.view.default, args[:2]
        if func in LINEAR:
            # A formula's zeros are ordinary tensors, and no fake tensor can be added to one.
            with functions_off():
                known = simplify_linear(func, args, kwargs)
            if isinstance(known, torch.Tensor):
                return known
            func, args, kwargs = known or (func, args, kwargs)
        values, named = map_arguments(_to_value, args, kwargs)
        out = func(*values, **named)
        given = map_arguments(self._make_ref, args, kwargs)
        if not isinstance(func, OpOverload):
            return self._add_node(FusedNode(func, *given, None, []), out)
        node, fact = OpNode(func, *given, None), get_facts(func)
        if not fact.mutates:
            return self._add_node(node, out)
        target = args[fact.mutates[0]] if isinstance(fact.mutates[0], int) else None
        if not isinstance(target, Tape):
            raise documented_error(NotImplementedError, "tangent-lost")(
                f"linearize: {func} writes a tangent into a tensor that has none.\n"
                "Use the form that returns a new tensor."
            )
        node.outs = target.slot
        self.program.nodes.append(node)
        target.look_like_value()
        return target

    def apply_further_out(self, h: Any, args: tuple) -> tuple:
        """Run ``h``, which is linear in its tapes, as one step of the program."""

        def step(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(apply_at_level(find_innermost_of(given), h, given))

        return self.record_step(step, args)

    def record_step(self, step: Callable, args: Sequence) -> Any:
        """Call ``step`` on the values and record it as one step of the program."""
        out = step(*map(_to_value, args))
        return self._add_node(FusedNode(step, tuple(map(self._make_ref, args)), {}, None, []), out)

    def copy_constants(self, written: list[torch.Tensor]) -> None:
        """Copy the constants whose memory the function is about to write to."""
        constants, numbers = self.program.constants, self._numbers
        for n in range(numbers.indexed, self.program.count):
            if n in constants:
                numbers.by_storage.setdefault(_get_storage(constants[n]), []).append(n)
        numbers.indexed = self.program.count
        for storage in {_get_storage(t) for t in written}:
            for n in numbers.by_storage.pop(storage, ()):
                del numbers.by_id[id(constants[n])]
                constants[n] = _to_primal(constants[n]).clone()

    def drop_tangents(self) -> None:
        """Remove tangents from the constants. It has to be called while forward mode is on.

        A formula may use its operator's result, which then gets a tape as tangent. If the program
        ran inside another jvp, such a constant would record again.
        """
        constants = self.program.constants
        constants.update({n: _to_primal(t) for n, t in constants.items()})
        self._numbers.by_id = {id(t): n for n, t in constants.items()}

    def lift_one_level(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor  # a constant of the program

    def apply_to_inner(self, tensors: list, f: Any) -> Any:
        """Run ``f``, which is linear in the tapes, as one step."""
        return self.record_step(f, tensors)

    def add_constant(self, t: torch.Tensor) -> int:
        """The number of a constant, which is entered with its first use."""
        n = self._numbers.by_id.get(id(t))
        if n is None:
            n = self._numbers.by_id[id(t)] = self.add_value()
            self.program.constants[n] = t
        return n

    def _make_ref(self, a: Any) -> Any:
        if not isinstance(a, torch.Tensor):
            return a
        return Ref(a.slot if isinstance(a, Tape) else self.add_constant(a))

    def add_value(self) -> int:
        self.program.count += 1
        return self.program.count - 1

    def _add_node(self, node: OpNode, out: Any) -> Any:
        wrapped, node.outs = self._wrap_results(out)
        self.program.nodes.append(node)
        return wrapped

    def _wrap_results(self, out: Any) -> tuple[Any, Any]:
        """The results of a step as tapes, and their numbers."""
        if isinstance(out, torch.Tensor):
            n = self.add_value()
            return make_tape(out, n, self), n
        if isinstance(out, (list, tuple)):
            found = [self._wrap_results(o) for o in out]
            return type(out)(o for o, _ in found), [n for _, n in found]
        return out, None


class Tape(Wrapper):
    """A tangent that records the operators run on it; ``slot`` is its number in the program."""

    value: torch.Tensor
    slot: int

    def graph_free(self) -> Tape:
        return self

    def lay_out_alone(self, gaps: bool = False) -> bool:
        _lay_out_in_place(self.value, gaps)
        refs, named, n = (Ref(self.slot),), {"gaps": gaps}, self.slot
        self.level.program.nodes.append(FusedNode(_lay_out_in_place, refs, named, n, [n]))
        self.look_like_value()
        return True

    def describe(self) -> str:
        return f"Tape({self.slot}, {format_numbers(self.value)})"

    __torch_function__ = functions_pass  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        for a in (*args, *(kwargs or {}).values()):
            for b in a if isinstance(a, (list, tuple)) else (a,):
                if isinstance(b, Tape):
                    return b.level.run(func, args, kwargs or {})
        raise AssertionError("a tape was dispatched to and is not among the arguments")


def make_tape(value: torch.Tensor, slot: int, level: TapeLevel) -> Tape:
    t = make_shell(Tape, value)
    t.__dict__.update(value=value, slot=slot, level=level)
    return t


_QUESTIONS = {
    aten.is_same_size.default: lambda a, b: a.shape == b.shape,
    aten._has_same_storage_numel.default: lambda a, b: True,
}


def _get_storage(t: torch.Tensor) -> int | None:
    """The storage of a tensor, or None if it has none, as a sparse tensor."""
    t = unwrap_all(t)
    return get_storage_id(t) if has_memory(t) else None


def _to_value(a: Any) -> Any:
    return a.value if isinstance(a, Tape) else a


def _to_primal(a: torch.Tensor) -> torch.Tensor:
    if is_sparse(a):  # these have no tangent
        return a
    primal, tangent = split_tangent(a, level=0)
    return a if tangent is None else primal


def _lay_out_in_place(tangent: torch.Tensor, gaps: bool) -> torch.Tensor:
    """Give a tangent the strides that one example would have, in place, and its views as well."""
    if isinstance(tangent, Wrapper):
        tangent.lay_out_alone(gaps)
    return tangent


def extract_program(level: TapeLevel, pairs: list) -> tuple[LinearProgram, list[torch.Tensor]]:
    """Return the program that computes the tangents of these primals, and its constants.

    A result that does not depend on the tangents is zeros like a constant.
    """
    program = level.program
    for primal, tangent in pairs:
        if isinstance(tangent, Tape):
            program.outputs.append(tangent.slot)
        else:
            like, n = Ref(level.add_constant(primal)), level.add_value()
            program.nodes.append(OpNode(aten.zeros_like.default, (like,), {}, n))
            program.outputs.append(n)
    # Formulas run operators for shapes alone, and zero tensors may even be on another device.
    program.eliminate_dead_code()
    program.writes = any(node.writes() for node in program.nodes)
    program.inputs += program.constants
    constants, program.constants = [*program.constants.values()], {}
    return program, constants
