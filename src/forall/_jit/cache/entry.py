"""Cache entries: a recorded call's program, its guards, and how it is run."""

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
_FEW = 4  # the most tensors that are tested one by one
_CALL = "outline, leaves, tensors, nodes=()"


def _never(*_: Any) -> bool:
    return False


class Recorded:
    """A cache entry: a program, and the tests that tell whether it serves a call."""

    arguments = ""  # of the recorded call, as text
    times = 1  # recordings for this key: captured values may change
    certain = False  # True for auto-replay, where purity is proved and not promised
    due: Any = None  # the state of its key before it was recorded
    since = 0  # the function's replayed calls when this was recorded
    used = 0  # the number of the look that found this entry last

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
        # Where an operator fails for a call's data, the function is run to raise its own error.
        raises = any(map(program.may_raise, program.nodes)) and not self.writes_outside()
        self.may_fail = self.asks or raises
        self.failed = False  # True once a recorded answer was another one
        self.draws = any(facts(node.op).seeded for node in program.nodes)
        self.run = self._compiled()
        self._is_one = results.is_one()
        # An argument that shares memory with a captured tensor: a write into one is seen in the
        # other. So later calls have to share memory in the same way.
        self._known = [*guards.tensors.values()]
        self._met = met.meetings
        self._meet = bool(self._met) or self.writes_outside()
        # Arguments that the function also reaches by other ways: code may compare them by `is`.
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
        """True if a fast test shows that this entry serves a call; False is not certain.

        For positional tensors alone, the test includes that no transform or mode is active.
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
        """Generate the fast test from a call that this entry serves."""
        if self._like is _never and (tests := like(outline, leaves, tensors)) is not None:
            tests = FREE + tests if type(outline) is int else tests
            tests += self._is_apart(tensors, nodes)
            self._like = tests.written_out(_CALL)
            self._glance = (tests + self.guards.at_once()).written_out(_CALL)

    def _is_apart(self, tensors: Sequence[Tensor], nodes: Sequence[Any]) -> Tests:
        """Tests that no argument is an object that the function reaches by another way."""
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
        """True if the entry serves a call with these arguments, which have its key."""
        return self.is_current(tensors, nodes) and self.guards.hold()

    def is_current(self, tensors: Sequence[Tensor], nodes: Sequence[Any] = ()) -> bool:
        """True if the entry serves such a call, provided that the guards hold."""
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
        """Run the program; return the result and the generators' states before.

        Where the program fails, the result is `MISSED`, and the states are restored.
        """
        drawn = rng_state.states([*tensors, *self.guards.generators]) if self.draws else None
        try:
            return self(tensors), drawn
        except Exception:  # noqa: BLE001 - the function itself raises the user's error
            if drawn is not None:
                rng_state.restore(drawn)
            self.has_failed()
            return MISSED, drawn

    def has_failed(self) -> None:
        """Note that the program failed on a call's data, so that the function has to run."""
        self.failed = self.asks

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        outs = self.run(*tensors, *self.captured)
        return outs[0] if self._is_one else self.results.tree(outs)


class Met(NamedTuple):
    """The overlaps of a recorded call's arguments with what the function reaches."""

    meetings: Meetings
    reached: Any  # the ids of all objects that the guards have visited
    ones: Ones

    @classmethod
    def of(cls, tensors: Sequence[Tensor], nodes: Sequence[Any], guards: Guards) -> Met:
        reached = guards.identities()
        found = meetings(tensors, [*guards.tensors.values()])
        return cls(found, reached, found_again(tensors, nodes, reached))


def found_again(tensors: Sequence[Tensor], nodes: Sequence[Any], reached: Any) -> Ones:
    """The tensors and containers of a call that the function reaches, by position and id."""
    if reached.isdisjoint(map(id, tensors)) and reached.isdisjoint(map(id, nodes)):
        return []
    given = (*map(id, tensors), *map(id, nodes))
    return [(i, x) for i, x in enumerate(given) if x in reached]


def meetings(tensors: Sequence[Tensor], known: Sequence[Tensor]) -> Meetings:
    """Groups of tensors that share memory with a captured tensor, with their storage offsets."""
    rooms: dict[int, list[tuple[int, int]]] = {}
    for i, t in enumerate((*tensors, *known)):
        rooms.setdefault(_memory(t), []).append((i, t.storage_offset() if has_memory(t) else 0))
    return [room for room in rooms.values() if len(room) > 1 and room[-1][0] >= len(tensors)]


def _memory(t: Tensor) -> int:
    return storage_of(t) if has_memory(t) else id(t)


class Results(NamedTuple):
    """The tree of a call's result; its leaves are positions of tensors, or constants."""

    leaves: list
    spec: Any
    has_contexts: bool  # True if the tree has containers that each call makes anew

    @classmethod
    def of(cls, leaves: list, spec: Any) -> Results:
        count = iter(range(len(leaves)))
        places = [_Place(next(count)) if isinstance(x, torch.Tensor) else x for x in leaves]
        own = pytree.fresh(spec)  # the user may change their own
        return cls(places, own, own is not spec)

    def is_one(self) -> bool:
        """True if the result is a single tensor."""
        return self.spec.type is None and type(self.leaves[0]) is _Place

    def tree(self, tensors: Sequence[Tensor]) -> Any:
        leaves = [tensors[x] if type(x) is _Place else x for x in self.leaves]
        return pytree.unflatten(leaves, pytree.fresh(self.spec) if self.has_contexts else self.spec)


class _Place(int):
    """The position of a tensor among a program's results."""
