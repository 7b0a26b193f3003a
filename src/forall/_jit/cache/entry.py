"""One recorded kind of call: its program, the guards that it stands on, and how it is run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forall._compat import pytree, rng_state
from forall._compat.op_schema import facts
from forall._compat.storage import has_memory, storage_of
from forall._jit.backends.python_source import function
from forall._jit.cache.call_key import FREE, like
from forall._jit.guards.codegen import Tests
from forall._jit.tracing.tracer import ASSERTED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forall._jit.graph import Program
    from forall._jit.guards.build import Guards

    Tensor = torch.Tensor
    Meetings = list[list[tuple[int, int]]]
    Ones = list[tuple[int, int]]


MISSED: Any = object()
_FEW = 4  # tensors, each of which is asked for by itself
_CALL = "outline, leaves, tensors, nodes=()"


def _never(*_: Any) -> bool:
    return False


class Recorded:
    """A program, and what tells whether it still stands."""

    arguments = ""  # of the call that was recorded, in words
    times = 1  # that this kind was recorded: what it captures may change
    certain = False  # nobody has said that the function is pure
    due: Any = None  # how its kind was met
    since = 0  # calls of the function that had been replayed when this was recorded
    used = 0  # the look at a call that found it last

    def __init__(
        self,
        program: Program,
        guards: Guards,
        results: Results,
        met: Met,
        write: Callable = function,
    ) -> None:
        self.program = program
        self.write = write  # makes a function of operators
        self.guards = guards
        self.results = results
        self.captured = [*program.captured.values()]
        self.given = [*program.inputs, *program.captured]
        self.asks = any(node.op in ASSERTED for node in program.nodes)
        # Of one that may fail by a call's numbers, the function is to say what is wrong.
        raises = any(map(program.may_raise, program.nodes)) and not self.writes_outside()
        self.may_fail = self.asks or raises
        self.failed = False  # to give the answers that were recorded
        self.draws = any(facts(node.op).seeded for node in program.nodes)
        self.run = self._compiled()
        self._is_one = results.is_one()
        # An argument that is also captured is one tensor to the recording. And what is written to
        # the one is seen in the other.
        self._known = [*guards.tensors.values()]
        self._met = met.meetings
        self._meet = bool(self._met) or self.writes_outside()
        # Which arguments are what the function reaches: `is` asks for it.
        self._reached, self._ones = met.reached, met.ones
        self._is_plain = not (self.asks or self._meet or self._ones)
        self._like = self._glance = _never

    def serves(
        self,
        outline: Any,
        leaves: Sequence[Any],
        tensors: Sequence[Tensor],
        nodes: Sequence[Any] = (),
    ) -> bool:
        """Whether it is certain, at a glance, that this is the program of a call.

        Of tensors alone it is not yet known that they are given to a call that stands alone.
        """
        return (
            self._glance(outline, leaves, tensors, nodes)
            or (self._like(outline, leaves, tensors, nodes) and self.guards.hold())
        ) and (self._is_plain or self.is_current(tensors, nodes))

    def served(
        self,
        outline: Any,
        leaves: Sequence[Any],
        tensors: Sequence[Tensor],
        nodes: Sequence[Any] = (),
    ) -> None:
        """Remember what calls look like that come one after the other."""
        if self._like is _never and (tests := like(outline, leaves, tensors)) is not None:
            tests = FREE + tests if type(outline) is int else tests
            tests += self._is_apart(tensors, nodes)
            self._like = tests.written_out(_CALL)
            self._glance = (tests + self.guards.at_once()).written_out(_CALL)

    def _is_apart(self, tensors: Sequence[Tensor], nodes: Sequence[Any]) -> Tests:
        """Tests that no argument is anything that the function reaches."""
        if self._ones or not self._reached:
            return Tests([], {})
        tests: list[str] = []
        for room, things in (("nodes", nodes), ("tensors", tensors if self._known else ())):
            if len(things) <= _FEW:
                tests += [f"id({room}[{i}]) not in reached" for i, _ in enumerate(things)]
            else:
                tests.append(f"apart(map(id, {room}))")
        given = {"apart": self._reached.isdisjoint, "reached": self._reached, "map": map, "id": id}
        return Tests(tests, given)

    def stands(self, tensors: Sequence[Tensor], nodes: Sequence[Any] = ()) -> bool:
        """Whether a call with these arguments is the one that was recorded."""
        return self.is_current(tensors, nodes) and self.guards.hold()

    def is_current(self, tensors: Sequence[Tensor], nodes: Sequence[Any] = ()) -> bool:
        """The same, where the guards are known to hold."""
        return (
            not self.failed
            and (not self._meet or meetings(tensors, self._known) == self._met)
            and found_again(tensors, nodes, self._reached) == self._ones
        )

    def writes_outside(self) -> bool:
        roots = [v.root for v in self.program.values]
        return not self.program.written().isdisjoint(roots[n] for n in self.given)

    def _compiled(self) -> Callable:
        return self.write(self.program, self.program.nodes, self.given, self.program.outputs)

    def attempt(self, tensors: Sequence[Tensor]) -> tuple[Any, Any]:
        """What a call gives, and the generators' states before it; `MISSED` where it fails."""
        drawn = rng_state.states([*tensors, *self.guards.generators]) if self.draws else None
        try:
            return self(tensors), drawn
        except Exception:  # noqa: BLE001 - the function itself tells what is wrong, and for whom
            if drawn is not None:
                rng_state.restore(drawn)
            self.has_failed()
            return MISSED, drawn

    def has_failed(self) -> None:
        """Note that a call has to be made by the function itself, as its numbers do not fit."""
        self.failed = self.asks

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        outs = self.run(*tensors, *self.captured)
        return outs[0] if self._is_one else self.results.tree(outs)


class Met(NamedTuple):
    """How the arguments of a call meet with what the function reaches, when it is recorded."""

    meetings: Meetings
    reached: Any  # the identities of all that the guards have met
    ones: Ones

    @classmethod
    def of(cls, tensors: Sequence[Tensor], nodes: Sequence[Any], guards: Guards) -> Met:
        reached = guards.identities()
        found = meetings(tensors, [*guards.tensors.values()])
        return cls(found, reached, found_again(tensors, nodes, reached))


def found_again(tensors: Sequence[Tensor], nodes: Sequence[Any], reached: Any) -> Ones:
    """Which tensors and containers of a call the function reaches by another way."""
    if reached.isdisjoint(map(id, tensors)) and reached.isdisjoint(map(id, nodes)):
        return []
    given = (*map(id, tensors), *map(id, nodes))
    return [(i, x) for i, x in enumerate(given) if x in reached]


def meetings(tensors: Sequence[Tensor], known: Sequence[Tensor]) -> Meetings:
    """Who shares memory with something that the function captures, and from where on."""
    rooms: dict[int, list[tuple[int, int]]] = {}
    for i, t in enumerate((*tensors, *known)):
        rooms.setdefault(_memory(t), []).append((i, t.storage_offset() if has_memory(t) else 0))
    return [room for room in rooms.values() if len(room) > 1 and room[-1][0] >= len(tensors)]


def _memory(t: Tensor) -> int:
    return storage_of(t) if has_memory(t) else id(t)


class Results(NamedTuple):
    """How a call's result hangs together: a tensor's place among the program's, or what it is."""

    leaves: list
    spec: Any
    has_contexts: bool  # with containers that each call makes anew

    @classmethod
    def of(cls, leaves: list, spec: Any) -> Results:
        count = iter(range(len(leaves)))
        places = [_Place(next(count)) if isinstance(x, torch.Tensor) else x for x in leaves]
        own = pytree.fresh(spec)  # what the user has is theirs to change
        return cls(places, own, own is not spec)

    def is_one(self) -> bool:
        """Whether it is a tensor, and not a tree of some."""
        return self.spec.type is None and type(self.leaves[0]) is _Place

    def tree(self, tensors: Sequence[Tensor]) -> Any:
        leaves = [tensors[x] if type(x) is _Place else x for x in self.leaves]
        return pytree.unflatten(leaves, pytree.fresh(self.spec) if self.has_contexts else self.spec)


class _Place(int):
    """The number of a tensor among a program's results."""
