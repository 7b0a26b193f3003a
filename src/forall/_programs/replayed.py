"""One recorded kind of call: its program, the guards that it stands on, and how it is run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forall._programs.recorder import ASSERTED
from forall._programs.signature import FREE, like
from forall._programs.writing import function
from forall._torch import generators, trees
from forall._torch.memory import has_memory, storage_of
from forall._torch.schema import facts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forall._programs.guards import Guards
    from forall._programs.program import Program

    Tensor = torch.Tensor
    Meetings = list[list[tuple[int, int]]]


MISSED: Any = object()
_CALL = "outline, leaves, tensors"


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
        met: Meetings,
        write: Callable = function,
    ) -> None:
        self.program = program
        self.write = write  # makes a function of operators
        self.guards = guards
        self.results = results
        self.captured = [*program.captured.values()]
        self.given = [*program.inputs, *program.captured]
        self.asks = any(node.op in ASSERTED for node in program.nodes)
        self.failed = False  # to give the answers that were recorded
        self.draws = any(facts(node.op).seeded for node in program.nodes)
        self.run = self._compiled()
        self._is_one = results.is_one()
        # An argument that is also captured is one tensor to the recording. And what is written to
        # the one is seen in the other.
        self._known = [*guards.tensors.values()]
        self._met = met
        self._meet = bool(self._met) or self.writes_outside()
        self._is_plain = not (self.asks or self._meet)
        self._like = self._glance = _never

    def serves(self, outline: Any, leaves: Sequence[Any], tensors: Sequence[Tensor]) -> bool:
        """Whether it is certain, at a glance, that this is the program of a call.

        Of tensors alone it is not yet known that they are given to a call that stands alone.
        """
        return (
            self._glance(outline, leaves, tensors)
            or (self._like(outline, leaves, tensors) and self.guards.hold())
        ) and (self._is_plain or self.is_current(tensors))

    def served(self, outline: Any, leaves: Sequence[Any], tensors: Sequence[Tensor]) -> None:
        """Remember what calls look like that come one after the other."""
        if self._like is _never and (tests := like(outline, leaves, tensors)) is not None:
            tests = FREE + tests if type(outline) is int else tests
            self._like = tests.written_out(_CALL)
            self._glance = (tests + self.guards.at_once()).written_out(_CALL)

    def stands(self, tensors: Sequence[Tensor]) -> bool:
        """Whether a call with these arguments is the one that was recorded."""
        return self.is_current(tensors) and self.guards.hold()

    def is_current(self, tensors: Sequence[Tensor]) -> bool:
        """The same, where the guards are known to hold."""
        return not self.failed and (not self._meet or meetings(tensors, self._known) == self._met)

    def writes_outside(self) -> bool:
        roots = [v.root for v in self.program.values]
        return not self.program.written().isdisjoint(roots[n] for n in self.given)

    def _compiled(self) -> Callable:
        return self.write(self.program, self.program.nodes, self.given, self.program.outputs)

    def attempt(self, tensors: Sequence[Tensor]) -> tuple[Any, Any]:
        """What a call gives, and the generators' states before it; `MISSED` where it fails."""
        drawn = generators.states([*tensors, *self.guards.generators]) if self.draws else None
        try:
            return self(tensors), drawn
        except Exception:  # noqa: BLE001 - the function itself tells what is wrong, and for whom
            if drawn is not None:
                generators.restore(drawn)
            self.failed = self.asks
            return MISSED, drawn

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        outs = self.run(*tensors, *self.captured)
        return outs[0] if self._is_one else self.results.tree(outs)


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

    @classmethod
    def of(cls, leaves: list, spec: Any) -> Results:
        count = iter(range(len(leaves)))
        return cls(
            [_Place(next(count)) if isinstance(x, torch.Tensor) else x for x in leaves], spec
        )

    def is_one(self) -> bool:
        """Whether it is a tensor, and not a tree of some."""
        return self.spec.type is None and type(self.leaves[0]) is _Place

    def tree(self, tensors: Sequence[Tensor]) -> Any:
        leaves = [tensors[x] if type(x) is _Place else x for x in self.leaves]
        return trees.unflatten(leaves, self.spec)


class _Place(int):
    """The number of a tensor among a program's results."""
