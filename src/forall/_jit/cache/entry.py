"""Cache entries: a recorded call's program, its guards, and how it is run."""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forall._compat import pytree, rng_state
from forall._compat.op_schema import get_facts
from forall._compat.storage import get_storage_id, has_memory
from forall._core import rank_ops
from forall._core.errors import CollectiveError
from forall._jit.backends.python_source import compile_python
from forall._jit.cache.call_key import FREE_TESTS, make_fast_tests
from forall._jit.graph import Subgraph
from forall._jit.guards.codegen import GuardTests
from forall._jit.tracing.tracer import ASSERT_OPS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forall._jit.cache.call_state import CallInfo
    from forall._jit.graph import Program
    from forall._jit.guards.build import Guards
    from forall._mesh.rank_program import RankProgram

    Tensor = torch.Tensor
    Meetings = list[list[tuple[int, int]]]
    Ones = list[tuple[int, int]]


MISSED: Any = object()
_FEW = 4  # the most tensors that are tested one by one
_CALL = "outline, leaves, tensors, nodes=()"


def _is_never(*_: Any) -> bool:
    return False


@dataclass(slots=True)
class EntryHistory:
    """The recordings and calls of an entry's key so far, as far as a cache asks for them."""

    arguments: str = ""  # of the recorded call, as text
    times: int = 1  # recordings for this key: captured values may change
    failed: bool = False  # True once a recorded answer was another one
    certain: bool = False  # True for auto-replay, where purity is proved and not promised
    due: Any = None  # the state of the key before it was recorded
    since: int = 0  # the function's replayed calls when this was recorded
    used: int = 0  # the number of the look that found this entry last


class ProgramTraits(NamedTuple):
    """The properties of a program that decide how it is called."""

    asks: bool  # True if it asserts answers
    may_fail: bool  # where an operator fails for a call's data, the function raises its own error
    draws: bool
    writes_outside: bool
    communicates: bool  # with the other ranks of a mesh

    @classmethod
    def read_program(cls, program: Program) -> ProgramTraits:
        roots = [v.root for v in program.values]
        writes = not program.find_written_roots().isdisjoint(roots[n] for n in program.given_values)
        asks = any(node.op in ASSERT_OPS for node in program.nodes)
        computes = (node for node in program.nodes if not get_facts(node.op).communicates)
        may_fail = asks or (not writes and any(map(program.may_raise, computes)))
        draws = any(get_facts(node.op).seeded for node in program.nodes)
        communicates = any(get_facts(node.op).communicates for node in program.nodes)
        return cls(asks, may_fail, draws, writes, communicates)


class FastTests(NamedTuple):
    """Generated tests of a call's arguments, which an entry makes from a call that it serves."""

    glance: Callable  # includes the guards, if these can be tested as fast
    like: Callable  # of the arguments alone


_NO_TESTS = FastTests(_is_never, _is_never)


class CacheEntry:
    """A cache entry: a program, and the tests that tell whether it serves a call."""

    def __init__(
        self,
        program: Program,
        guards: Guards,
        results: ResultTree,
        overlaps: ArgumentOverlaps,
        compile_graph: Callable[[Subgraph], Callable] = compile_python,
    ) -> None:
        self.program = program
        self.guards = guards
        self.captured = [*program.captured.values()]
        self.traits = ProgramTraits.read_program(program)
        self.history = EntryHistory()
        self.over_ranks = _make_rank_program(program, self.traits)
        self.run = self._compile_program(compile_graph)
        self.build = itemgetter(0) if results.is_single_tensor() else results.build_tree
        self.overlaps = overlaps
        self._is_plain = not (self.traits.asks or overlaps.may_vary(self.traits))
        self._fast_tests = _NO_TESTS

    def serves_at_a_glance(
        self,
        outline: Any,
        leaves: Sequence[Any],
        tensors: Sequence[Tensor],
        nodes: Sequence[Any] = (),
    ) -> bool:
        """True if a fast test shows that this entry serves a call; False is not certain.

        For positional tensors alone, the test includes that no transform or mode is active.
        """
        tests = self._fast_tests
        return (
            tests.glance(outline, leaves, tensors, nodes)
            or (tests.like(outline, leaves, tensors, nodes) and self.guards.hold())
        ) and (self._is_plain or self.is_current(tensors, nodes))

    def make_fast_test(
        self,
        outline: Any,
        leaves: Sequence[Any],
        tensors: Sequence[Tensor],
        nodes: Sequence[Any] = (),
    ) -> None:
        """Generate the fast test from a call that this entry serves."""
        if (
            self._fast_tests is _NO_TESTS
            and (tests := make_fast_tests(outline, leaves, tensors)) is not None
        ):
            tests = FREE_TESTS + tests if type(outline) is int else tests
            tests += self.overlaps.make_fast_tests(tensors, nodes)
            self._fast_tests = FastTests(
                glance=(tests + self.guards.get_fast_tests()).compile_tests(_CALL),
                like=tests.compile_tests(_CALL),
            )

    def serves_call(self, tensors: Sequence[Tensor], nodes: Sequence[Any] = ()) -> bool:
        """True if the entry serves a call with these arguments, which have its key."""
        return self.is_current(tensors, nodes) and self.guards.hold()

    def is_current(self, tensors: Sequence[Tensor], nodes: Sequence[Any] = ()) -> bool:
        """True if the entry serves such a call, provided that the guards hold."""
        return not self.history.failed and self.overlaps.recur(tensors, nodes, self.traits)

    def make_call(self, call: CallInfo, cache: Any) -> Any:
        """Return the result of a call with this entry's key, replayed if the entry serves it."""
        if not self.serves_call(call.tensors, call.nodes):
            return cache.run_stale(call, self)
        if self is cache.newest:
            self.make_fast_test(call.outline, call.leaves, call.tensors, call.nodes)
        cache.newest = self
        cache.note_use(call.key, self)
        return cache.replay_entry(self, call.tensors, call.instead)

    def _compile_program(self, compile_graph: Callable[[Subgraph], Callable]) -> Callable:
        program = self.program
        return compile_graph(
            Subgraph(program, program.nodes, program.given_values, program.outputs)
        )

    def try_replay(self, tensors: Sequence[Tensor]) -> tuple[Any, Any]:
        """Run the program; return the result and the generators' states before.

        Where the program fails, the result is `MISSED`, and the states are restored. A program that
        communicates runs within the call of a transform, which keeps its messages.
        """
        draws = self.traits.draws
        drawn = rng_state.save_states([*tensors, *self.guards.generators]) if draws else None
        try:
            return self._run_program(tensors), drawn
        except Exception as error:
            if self._is_final(error):
                raise
            if drawn is not None:
                rng_state.restore_states(drawn)
            self.note_failure()
            return MISSED, drawn

    def _run_program(self, tensors: Sequence[Tensor]) -> Any:
        return (
            self(tensors) if self.over_ranks is None else self.over_ranks.run_program(self, tensors)
        )

    def _is_final(self, error: Exception) -> bool:
        """Return True if the function cannot run after the program, which has communicated."""
        if isinstance(error, (CollectiveError, rank_ops.OtherSizesError)):
            return isinstance(error, CollectiveError)
        return self.traits.communicates and not self.traits.may_fail

    def note_failure(self) -> None:
        """Note that the program failed on a call's data, so that the function has to run."""
        self.history.failed = self.traits.asks

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        return self.build(self.run(*tensors, *self.captured))


def _make_rank_program(program: Program, traits: ProgramTraits) -> RankProgram | None:
    if not traits.communicates:
        return None
    from forall._mesh.rank_program import RankProgram  # imports torch.distributed

    calls = (node for node in program.nodes if node.op is rank_ops.BEGIN)
    return RankProgram([*dict.fromkeys(node.args[2] for node in calls)], traits.may_fail)


class ArgumentOverlaps(NamedTuple):
    """The overlaps of a recorded call's arguments with what the function reaches.

    An argument may share memory with a captured tensor: a write into one is seen in the other. So
    later calls have to share memory in the same way. The function may also reach an argument by
    other ways: code may compare the two by ``is``.
    """

    known: Sequence[Tensor]  # captured tensors
    meetings: Meetings
    reached: Any  # the ids of all objects that the guards have visited
    ones: Ones  # the arguments among these

    @classmethod
    def find_overlaps(
        cls, tensors: Sequence[Tensor], nodes: Sequence[Any], guards: Guards
    ) -> ArgumentOverlaps:
        reached, known = guards.collect_ids(), [*guards.tensors.values()]
        met = find_shared_memory(tensors, known)
        return cls(known, met, reached, find_reached_arguments(tensors, nodes, reached))

    def may_vary(self, traits: ProgramTraits) -> bool:
        """True if each call has to be tested by `recur`."""
        return bool(self.meetings or self.ones) or traits.writes_outside

    def recur(self, tensors: Sequence[Tensor], nodes: Sequence[Any], traits: ProgramTraits) -> bool:
        """True if the arguments of another call have the same overlaps."""
        is_asked = self.meetings or traits.writes_outside
        if is_asked and find_shared_memory(tensors, self.known) != self.meetings:
            return False
        return find_reached_arguments(tensors, nodes, self.reached) == self.ones

    def make_fast_tests(self, tensors: Sequence[Tensor], nodes: Sequence[Any]) -> GuardTests:
        """Tests that no argument is an object that the function reaches by another way."""
        if self.ones or not self.reached:
            return GuardTests([], {})
        tests: list[str] = []
        for room, things in (("nodes", nodes), ("tensors", tensors if self.known else ())):
            if len(things) <= _FEW:
                tests += [f"id({room}[{i}]) not in reached" for i, _ in enumerate(things)]
            else:
                tests.append(f"apart(map(id, {room}))")
        given = {"apart": self.reached.isdisjoint, "reached": self.reached, "map": map, "id": id}
        return GuardTests(tests, given)


def find_reached_arguments(tensors: Sequence[Tensor], nodes: Sequence[Any], reached: Any) -> Ones:
    """The tensors and containers of a call that the function reaches, by position and id."""
    if reached.isdisjoint(map(id, tensors)) and reached.isdisjoint(map(id, nodes)):
        return []
    given = (*map(id, tensors), *map(id, nodes))
    return [(i, x) for i, x in enumerate(given) if x in reached]


def find_shared_memory(tensors: Sequence[Tensor], known: Sequence[Tensor]) -> Meetings:
    """Groups of tensors that share memory with a captured tensor, with their storage offsets."""
    rooms: dict[int, list[tuple[int, int]]] = {}
    for i, t in enumerate((*tensors, *known)):
        rooms.setdefault(_get_memory_id(t), []).append(
            (i, t.storage_offset() if has_memory(t) else 0)
        )
    return [room for room in rooms.values() if len(room) > 1 and room[-1][0] >= len(tensors)]


def _get_memory_id(t: Tensor) -> int:
    return get_storage_id(t) if has_memory(t) else id(t)


class ResultTree(NamedTuple):
    """The tree of a call's result; its leaves are positions of tensors, or constants."""

    leaves: list
    spec: Any
    has_contexts: bool  # True if the tree has containers that each call makes anew

    @classmethod
    def from_leaves(cls, leaves: list, spec: Any) -> ResultTree:
        count = iter(range(len(leaves)))
        places = [_ResultIndex(next(count)) if isinstance(x, torch.Tensor) else x for x in leaves]
        own = pytree.copy_contexts(spec)  # the user may change their own
        return cls(places, own, own is not spec)

    def is_single_tensor(self) -> bool:
        """True if the result is a single tensor."""
        return self.spec.type is None and type(self.leaves[0]) is _ResultIndex

    def build_tree(self, tensors: Sequence[Tensor]) -> Any:
        leaves = [tensors[x] if type(x) is _ResultIndex else x for x in self.leaves]
        return pytree.unflatten(
            leaves, pytree.copy_contexts(self.spec) if self.has_contexts else self.spec
        )


class _ResultIndex(int):
    """The position of a tensor among a program's results."""
