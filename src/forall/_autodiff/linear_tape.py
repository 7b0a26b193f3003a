"""The tangent program of a function: the operators that forward mode runs on a tangent, recorded.

`linearize` runs its function once with a tape tensor as tangent. PyTorch's forward formulas use it
as any tensor, and every operator that they call on it is recorded. The list is a linear program in
the tangent. Its constants are the primal values with their autograd history, so its results are
differentiable with respect to the point of linearisation too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._compat.dispatch_state import functions_off
from forall._compat.op_schema import flatten_tensors, get_facts, map_arguments
from forall._compat.private_api import OpOverload, functions_pass, split_tangent
from forall._compat.storage import get_storage_id, has_memory
from forall._compat.symbolic_zeros import LINEAR, simplify_linear
from forall._compat.wrapper_tensor import Wrapper, make_shell, unwrap_all
from forall._core.host_reads import format_numbers
from forall._core.levels import Level, apply_at_level, find_innermost_of
from forall._core.sparse_operands import is_sparse

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten


class TapeLevel(Level):
    """The level of tape tensors. It is never on the stack, so it counts as inside all levels."""

    ends = False

    def __init__(self, parent: Level | None) -> None:
        super().__init__(parent)
        self.steps: list[tuple[Any, tuple, dict, int]] = []
        self.count = 0
        self._by_room: dict[int | None, list[int]] = {}  # steps, by the memory of their constants
        self._looked_at = 0

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
        self.steps.append((func, *map_arguments(_to_slot, args, kwargs), self.count))
        fact = get_facts(func) if isinstance(func, OpOverload) else None
        if fact is not None and fact.mutates:
            target = args[fact.mutates[0]] if isinstance(fact.mutates[0], int) else None
            if not isinstance(target, Tape):
                raise NotImplementedError(
                    f"linearize: {func} writes a tangent into a tensor that has none.\n"
                    "Use the form that returns a new tensor."
                )
            self.count += 1
            target.look_like_value()
            return target
        return self._wrap_results(out)

    def apply_further_out(self, h: Any, args: tuple) -> tuple:
        """Run ``h``, which is linear in its tapes, as one step of the program."""

        def step(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(apply_at_level(find_innermost_of(given), h, given))

        return self.record_step(step, args)

    def record_step(self, step: Callable[..., tuple], args: tuple) -> tuple:
        """Call ``step`` on the values and record it as one step of the program."""
        out = step(*map_arguments(_to_value, args, {})[0])
        self.steps.append((step, *map_arguments(_to_slot, args, {}), self.count))
        return self._wrap_results(out)

    def copy_constants(self, written: list[torch.Tensor]) -> None:
        """Copy the constants whose memory the function is about to write to."""
        for i, (_, args, kwargs, _) in enumerate(self.steps[self._looked_at :], self._looked_at):
            for room in {_get_storage(t) for t in flatten_tensors((*args, *kwargs.values()))}:
                self._by_room.setdefault(room, []).append(i)
        self._looked_at = len(self.steps)
        rooms, copies = {_get_storage(t) for t in written}, {}

        def copy_written(a: Any) -> Any:
            if not isinstance(a, torch.Tensor) or _get_storage(a) not in rooms:
                return a
            if id(a) not in copies:
                copies[id(a)] = _to_primal(a).clone()
            return copies[id(a)]

        for i in {i for room in rooms for i in self._by_room.pop(room, ())}:
            func, args, kwargs, slot = self.steps[i]
            self.steps[i] = (func, *map_arguments(copy_written, args, kwargs), slot)

    def lift_one_level(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor  # a constant of the program

    def apply_to_inner(self, tensors: list, f: Any) -> Any:
        """Run ``f``, which is linear in the tapes, as one step."""
        out = f(*map(_to_value, tensors))
        self.steps.append((f, tuple(map(_to_slot, tensors)), {}, self.count))
        return self._wrap_results(out)

    def _wrap_results(self, out: Any) -> Any:
        if isinstance(out, torch.Tensor):
            self.count += 1
            return make_tape(out, self.count - 1, self)
        if isinstance(out, (list, tuple)):
            return type(out)(self._wrap_results(o) for o in out)
        self.count += 1
        return out


class Tape(Wrapper):
    """A tangent that records the operators run on it; ``slot`` is its number in the program."""

    value: torch.Tensor
    slot: int

    def graph_free(self) -> Tape:
        return self

    def lay_out_alone(self, gaps: bool = False) -> bool:
        self.level.run(_lay_out_in_place, (self,), {"gaps": gaps})
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


class TapeSlot(int):
    """The number of a value in the program, which replaces a tape among a step's arguments."""


def _get_storage(t: torch.Tensor) -> int | None:
    """The storage of a tensor, or None if it has none, as a sparse tensor."""
    t = unwrap_all(t)
    return get_storage_id(t) if has_memory(t) else None


def _to_slot(a: Any) -> Any:
    return TapeSlot(a.slot) if isinstance(a, Tape) else a


def _to_value(a: Any) -> Any:
    return a.value if isinstance(a, Tape) else a


def drop_tangents(level: TapeLevel) -> None:
    """Remove tangents from the program's constants. It has to be called while forward mode is on.

    A formula may use its operator's result, which then gets a tape as tangent. If the program ran
    inside another jvp, such a constant would record again.
    """
    level.steps = [
        (func, *map_arguments(_to_primal, args, kwargs), slot)
        for func, args, kwargs, slot in level.steps
    ]


def _to_primal(a: Any) -> Any:
    if not isinstance(a, torch.Tensor) or is_sparse(a):  # these have no tangent
        return a
    primal, tangent = split_tangent(a, level=0)
    return a if tangent is None else primal


def prune_steps(level: TapeLevel, ends: list[int | None]) -> None:
    """Remove the steps that no result needs. It has to be called before the program is extracted.

    Formulas run operators for shapes alone, and zero tensors may even be on another device. Steps
    that write in place are kept, as aliases are not recorded.
    """
    live = {end for end in ends if end is not None}
    kept = []
    after = level.count
    for step in reversed(level.steps):
        func, args, kwargs, slot = step
        if _is_write(func) or not live.isdisjoint(range(slot, after)):
            live.update(_find_slots(args))
            live.update(_find_slots(kwargs.values()))
            kept.append(step)
        after = slot
    level.steps = kept[::-1]


def _lay_out_in_place(tangent: torch.Tensor, gaps: bool) -> torch.Tensor:
    """Give a tangent the strides that one example would have, in place, and its views as well."""
    if isinstance(tangent, Wrapper):
        tangent.lay_out_alone(gaps)
    return tangent


def _is_write(func: Any) -> bool:
    return func is _lay_out_in_place or (
        isinstance(func, OpOverload) and bool(get_facts(func).mutates)
    )


def _find_slots(args: Any) -> list[int]:
    found: list[int] = []
    for a in args:
        if type(a) is TapeSlot:
            found.append(a)
        elif isinstance(a, (list, tuple)):
            found += _find_slots(a)
    return found


class LinearProgram:
    """A tangent program without its constants, whose slots follow those of the steps.

    ``ends`` are the slots of the results. A result that does not depend on the tangents is zeros
    like a constant. Tangents first get these ``strides``, with conjugation resolved. They are
    copied if any step writes: the step would change the user's tensor, and its entries may overlap.
    """

    def __init__(self, steps: tuple, ends: tuple, first: int, strides: tuple) -> None:
        self.steps, self.ends, self.first, self.strides = steps, ends, first, strides
        self.writes = any(_is_write(func) for func, *_ in steps)

    def is_plain(self) -> bool:
        """True if all steps are operators, none a function that a call has made."""
        return all(isinstance(func, OpOverload) for func, *_ in self.steps)

    def play(self, constants: list[torch.Tensor], seeds: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run the program on other tangents."""
        slots: dict[int, Any] = dict(enumerate(map(self._lay_out_seed, seeds, self.strides)))
        slots.update(enumerate(constants, self.first))
        for func, args, kwargs, slot in self.steps:
            filled = [_fill_slots(a, slots) for a in args]
            out = func(*filled, **{k: _fill_slots(a, slots) for k, a in kwargs})
            slots.update(enumerate(out if isinstance(out, (list, tuple)) else (out,), slot))
        return [torch.zeros_like(slots[n]) if n >= self.first else slots[n] for n in self.ends]

    def _lay_out_seed(self, seed: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
        seed = seed.resolve_conj().resolve_neg()
        if seed.stride() == strides and not self.writes:
            return seed
        return seed.new_empty_strided(seed.shape, strides).copy_(seed)


def _fill_slots(a: Any, slots: dict[int, Any]) -> Any:
    """Return a step's argument, with slots replaced by their values."""
    # `map_in_lists` would take an eighth more time. For why it is no function inside another, see
    # NOTE [functions that call themselves].
    if type(a) is TapeSlot:
        return slots[a]
    return [_fill_slots(b, slots) for b in a] if type(a) is tuple else a


class _ConstantSlots:
    """The constants of a program, and their slots, which follow those of the steps."""

    def __init__(self, level: TapeLevel) -> None:
        self.level = level
        self.tensors: list[torch.Tensor] = []
        self._places: dict[int, TapeSlot] = {}

    def assign_slots(self, a: Any) -> Any:
        if isinstance(a, (list, tuple)):
            return tuple(map(self.assign_slots, a))
        if not isinstance(a, torch.Tensor):
            return a
        if isinstance(a, Tape) and a.level is self.level:
            raise AssertionError("a tangent is among the constants: what was done to it is lost")
        if id(a) not in self._places:
            self._places[id(a)] = TapeSlot(self.level.count + len(self.tensors))
            self.tensors.append(a)
        return self._places[id(a)]


def extract_program(
    level: TapeLevel, pairs: list, strides: tuple
) -> tuple[LinearProgram, list[torch.Tensor]]:
    """Return the program that computes the tangents of these primals, and its constants."""
    ends = [t.slot if isinstance(t, Tape) else None for _, t in pairs]
    prune_steps(level, ends)
    constants = _ConstantSlots(level)
    placed = constants.assign_slots
    steps = tuple(
        (func, placed(args), tuple((k, placed(a)) for k, a in kwargs.items()), slot)
        for func, args, kwargs, slot in level.steps
    )
    at_ends = tuple(placed(p) if n is None else n for n, (p, _) in zip(ends, pairs, strict=True))
    return LinearProgram(steps, at_ends, level.count, strides), constants.tensors
