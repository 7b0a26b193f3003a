"""One recorded kind of call: its program, the guards that it stands on, and how it is run.

NOTE [a program's derivative]
    Where something outside requires grad, the first call is also pulled back once, and that is
    recorded as well. The two halves are one program, cleaned as one and cut in two: what the second
    reads of the first is what the call saves. So custom Functions, ``no_grad`` and detached values
    mean in a replayed backward pass what they meant in the recorded one. A derivative of that
    backward pass runs the function itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forall._programs.signature import Like
from forall._programs.writing import function
from forall._torch import generators, trees
from forall._torch.memory import has_memory, storage_of
from forall._torch.schema import facts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forall._programs.guards import Guards
    from forall._programs.program import Layout, Node, Program

    Tensor = torch.Tensor


class Recorded:
    """A program, and what tells whether it still stands."""

    arguments = ""  # of the call that was recorded, in words
    times = 1  # that this kind was recorded: what it captures may change

    def __init__(
        self,
        program: Program,
        guards: Guards,
        results: Results,
        tensors: Sequence[Tensor],
        write: Callable = function,
    ) -> None:
        self.program = program
        self.write = write  # makes a function of operators
        self.guards = guards
        self.results = results
        self.captured = [*program.captured.values()]
        self.given = [*program.inputs, *program.captured]
        self.draws = any(facts(node.op).seeded for node in program.nodes)
        self._run = self._compiled()
        self._is_one = results.is_one()
        # An argument that is also captured is one tensor to the recording. And what is written to
        # the one is seen in the other.
        self._known = [*guards.tensors.values()]
        self._met = self._meetings(tensors)
        self._meet = bool(self._met) or self.writes_outside()
        self._like: Like | None = None

    def serves(self, outline: Any, leaves: Sequence[Any], tensors: Sequence[Tensor]) -> bool:
        """Whether it is certain, at a glance, that this is the program of a call."""
        like = self._like
        return like is not None and like.holds(outline, leaves, tensors) and self.stands(tensors)

    def served(self, outline: Any, leaves: Sequence[Any], tensors: Sequence[Tensor]) -> None:
        """Remember what calls look like that come one after the other."""
        if self._like is None:
            self._like = Like(outline, leaves, tensors)

    def stands(self, tensors: Sequence[Tensor]) -> bool:
        """Whether a call with these arguments is the one that was recorded."""
        if not self.guards.hold():
            return False
        return not self._meet or self._meetings(tensors) == self._met

    def _meetings(self, tensors: Sequence[Tensor]) -> set[tuple[int, int]]:
        """Which arguments share memory with what the function captures."""
        given: dict[int, list[int]] = {}
        for i, t in enumerate(tensors):
            given.setdefault(_memory(t), []).append(i)
        return {(i, n) for n, t in enumerate(self._known) for i in given.get(_memory(t), ())}

    def writes_outside(self) -> bool:
        roots = [v.root for v in self.program.values]
        return not self.program.written().isdisjoint(roots[n] for n in self.given)

    def _compiled(self) -> Callable:
        return self.write(self.program, self.program.nodes, self.given, self.program.outputs)

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        outs = self._run(*tensors, *self.captured)
        return outs[0] if self._is_one else self.results.tree(outs)


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


class Pullback(NamedTuple):
    """The second half of a recorded call: from cotangents to what they are pulled back to."""

    nodes: list[Node]
    moved: list[int]  # the places of the results that have a derivative
    cotangents: list[int]  # what stands for theirs
    wanted: list[int]  # the inputs and captured tensors that require grad
    gradients: list[int | None]  # of these; None where nothing depends on one


class Differentiated(Recorded):
    """A program with its pull-back. ``again`` calls the function, of tensors in the inputs' place.

    What it saves are ``given``, the outputs that are ``shown`` to the second half, and ``fresh``,
    in this order: values of the first half.
    """

    def __init__(
        self,
        program: Program,
        guards: Guards,
        results: Results,
        tensors: Sequence[Tensor],
        write: Callable,
        back: Pullback,
        again: Callable,
    ) -> None:
        self.back = back
        self.again = again
        second = {id(node) for node in back.nodes}
        first = [node for node in program.nodes if id(node) not in second]
        self.halves = first, [node for node in program.nodes if id(node) in second]
        self.outputs = [*dict.fromkeys(program.outputs)]
        self._order = [self.outputs.index(n) for n in program.outputs]
        self.moves = [self.outputs.index(program.outputs[i]) for i in back.moved]
        super().__init__(program, guards, results, tensors, write)

    def _compiled(self) -> Callable:
        first, last = self.halves
        found = [n for n in self.back.gradients if n is not None]
        made = {n for node in first for n in node.makes()}
        read = dict.fromkeys([*(n for node in last for n in node.reads()), *found])
        self.saved = [n for n in read if n in made or n in self.given]
        self.fresh = [n for n in self.saved if n in made and n not in self.outputs]
        self.shown = [i for i, n in enumerate(self.outputs) if n in self.saved]
        self.backward = self.write(self.program, last, [*self.saved, *self.back.cotangents], found)
        return self.write(self.program, first, self.given, [*self.outputs, *self.fresh])

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return self._run(*tensors)

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        outs = Replayed.apply(self, *tensors, *self.captured)
        return self.results.tree([outs[i] for i in self._order])

    def pulled(self, saved: Sequence[Tensor], cotangents: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients of what is wanted."""
        names = (*self.given, *(self.outputs[i] for i in self.shown), *self.fresh)
        env = dict(zip(names, saved, strict=True))
        found = iter(self.backward(*(env[n] for n in self.saved), *cotangents))
        return [None if n is None else next(found) for n in self.back.gradients]

    def cotangents(self, given: Sequence[Tensor | None]) -> list[Tensor]:
        """Those of the results that have a derivative, laid out as they were recorded."""
        layouts = [self.program.values[n].layout for n in self.back.cotangents]
        return [_laid_out(given[i], y) for i, y in zip(self.moves, layouts, strict=True)]


def _laid_out(t: Tensor | None, layout: Layout) -> Tensor:
    if t is not None and t.stride() == layout.strides and not (t.is_conj() or t.is_neg()):
        return t
    made = torch.empty_strided(
        layout.shape, layout.strides, dtype=layout.dtype, device=layout.device
    )
    return made.zero_() if t is None else made.copy_(t)


class Replayed(torch.autograd.Function):
    """A recorded call as one node of the graph around it."""

    @staticmethod
    def forward(ctx: Any, recorded: Differentiated, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.recorded = recorded
        ctx.drawn = generators.states(tensors) if recorded.draws else None
        found = recorded.forward(tensors)
        count = len(recorded.outputs)
        outs = found[:count]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *(outs[i] for i in recorded.shown), *found[count:])
        moves = set(recorded.moves)
        ctx.mark_non_differentiable(*(y for i, y in enumerate(outs) if i not in moves))
        return outs

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        recorded: Differentiated = ctx.recorded
        saved = ctx.saved_tensors
        tensors = saved[: len(recorded.given)]
        given = recorded.cotangents(cotangents)
        if torch.is_grad_enabled():
            found = _again(ctx, tensors, given)
        else:
            found = recorded.pulled(saved, given)
        gradients: list[Tensor | None] = [None] * len(tensors)
        for n, g in zip(recorded.back.wanted, found, strict=True):
            gradients[recorded.given.index(n)] = g
        return (None, *gradients)


def _again(ctx: Any, tensors: Sequence[Tensor], cotangents: Sequence[Tensor]) -> Sequence[Any]:
    """The pull-back by the function itself, to be differentiated once more."""
    recorded: Differentiated = ctx.recorded
    now = generators.states(tensors) if ctx.drawn is not None else None
    if ctx.drawn is not None:
        generators.restore(ctx.drawn)
    try:
        inputs = [
            t.view_as(t) if t.requires_grad else t for t in tensors[: len(recorded.program.inputs)]
        ]
        results = recorded.again(inputs)
    finally:
        if now is not None:
            generators.restore(now)
    given = [*inputs, *tensors[len(inputs) :]]
    ends = [results[i] for i in recorded.back.moved]
    live = [(y, c) for y, c in zip(ends, cotangents, strict=True) if y.requires_grad]
    return torch.autograd.grad(
        [y for y, _ in live],
        [given[recorded.given.index(n)] for n in recorded.back.wanted],
        [c for _, c in live],
        create_graph=True,
        allow_unused=True,
    )
