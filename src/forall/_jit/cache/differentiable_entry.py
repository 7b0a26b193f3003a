"""Cache entries that autograd differentiates: a forward and a backward half, one autograd node.

NOTE [a program's derivative]
    Where an input or a captured tensor requires grad, the first call is also differentiated once,
    and that backward pass is recorded as well. The two halves are one program, optimized as one and
    cut in two: what the backward half reads of the forward half is saved for backward. So custom
    Functions, ``no_grad`` and detached values mean in a replayed backward pass what they meant in
    the recorded one.

    The backward half serves cotangents of the same results as in the recording. A zero in place of
    a missing cotangent would not do: torch leaves such paths out, and zero times an infinite slope
    is nan. For other cotangents, and under transforms of them, the function itself is run once more
    as it was called. The next call is recorded for the cotangents that were asked for.

    A backward pass with ``create_graph`` is a node too (`ReplayBackwardFunction`): most have a
    graph that nobody differentiates. Where somebody does, the function is run once more as well.
"""

from __future__ import annotations

from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forall._compat import rng_state
from forall._compat.ambient_settings import read_settings
from forall._compat.dispatch_state import (
    functions_off,
    get_autocast_state,
    has_users_tangents,
    is_autocast,
    is_functorch_wrapped,
)
from forall._compat.private_api import PLAIN, get_version
from forall._core.recompute import bind_original_context
from forall._jit.cache.eager_derivative import RecordedCall, rerun_on_leaves
from forall._jit.cache.entry import CacheEntry, ResultTree
from forall._jit.graph import Subgraph
from forall._jit.tracing.joint_graph import BackwardPass

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forall._jit.cache.entry import ArgumentOverlaps
    from forall._jit.graph import Layout, OpNode, Program
    from forall._jit.guards.build import Guards
    from forall._jit.tracing.joint_graph import BackwardHalf
    from forall._jit.tracing.output_views import OutputBases

    Tensor = torch.Tensor
    Halves = tuple[list[OpNode], list[OpNode]]

# Recorded backward passes are of use while the eager ones are at most _FEW and one in _WORTH.
_FEW_EAGER_PASSES = 2
_WORTH = 32
_MOST_RECORDINGS = 8  # recordings for one cache key, each for other cotangents


class EagerRerun(NamedTuple):
    """A function that runs the user's function eagerly once more, and the settings for it."""

    run: Callable
    settings: Any

    @classmethod
    def capture_settings(cls, again: Callable) -> EagerRerun:
        """Take the context and settings of now; call this while the call is recorded."""
        return cls(
            bind_original_context(partial(rerun_on_leaves, again), recomputes=False),
            read_settings(),
        )


class BackwardPasses:
    """The backward passes of an entry so far."""

    asked: BackwardPass | None = None  # the last one that the backward half did not serve
    count = 0
    missed = 0  # those for which the function ran eagerly

    def is_backward_unused(self) -> bool:
        """True if the recorded backward pass serves too few of the backward passes."""
        return self.missed > _FEW_EAGER_PASSES + self.count // _WORTH


class OutputMap:
    """The places of a call's results among the outputs of the forward half.

    ``moves`` are the results that move with inputs; ``constant`` are the outputs that do not.
    """

    def __init__(self, program: Program, back: BackwardHalf, views: OutputBases | None) -> None:
        self.numbers = [*dict.fromkeys(program.outputs)]
        place = _index_by_number(self.numbers)
        self._order = [place[n] for n in program.outputs]
        self.moves = [place[program.outputs[i]] for i in back.moved]
        self.constant = {*range(len(self.numbers))} - {*self.moves}
        self._open = None if views is None else views.run
        place = _index_by_number(program.given_values)
        self._viewed = _make_getter([place[n] for n in views.given] if views else ())

    def collect_results(self, given: Sequence[Tensor], outs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the results; those that view arguments or each other are made here."""
        found = [outs[i] for i in self._order]
        return self._open(*self._viewed(given), *found) if self._open else found


class SavedTensors:
    """The tensors that the backward half reads of the forward half.

    After the forward half these are at hand, in this order: what the program is given, the outputs,
    and ``fresh``, which are intermediate results.
    """

    def __init__(self, program: Program, halves: Halves, outputs: OutputMap, found: list) -> None:
        first, last = halves
        made = {n for node in first for n in node.makes()}
        read = dict.fromkeys([*(n for node in last for n in node.reads()), *found])
        given, outside = {*program.given_values}, {*outputs.numbers}
        self.numbers = [n for n in read if n in made or n in given]
        self.fresh = [n for n in self.numbers if n in made and n not in outside]
        hand = _index_by_number([*program.given_values, *outputs.numbers, *self.fresh])
        kept = _index_by_number(self.numbers)
        self.select = _make_getter([hand[n] for n in self.numbers])  # of the tensors at hand
        # Of those given, the ones that are not saved; where each of those given is saved, else -1.
        self.select_others = _make_getter(
            [i for i, n in enumerate(program.given_values) if n not in kept]
        )
        self.places = [kept.get(n, -1) for n in program.given_values]


class Derivative:
    """The backward half of a program, and all that a backward pass takes of the forward half.

    ``rerun`` runs the function eagerly on other inputs.
    """

    def __init__(
        self, program: Program, back: BackwardHalf, rerun: EagerRerun, views: OutputBases | None
    ) -> None:
        self.back, self.rerun, self.passes = back, rerun, BackwardPasses()
        second = {id(node) for node in back.nodes}
        first = [node for node in program.nodes if id(node) not in second]
        self.halves = first, [node for node in program.nodes if id(node) in second]
        self.outputs = OutputMap(program, back, views)
        live = {*back.live}
        self._live = [i in live for i in back.moved]
        self.calls: dict[Any, Any] = {}  # of functions that capture a pull-back of this
        self.plain: tuple[Callable | None] | None = None  # see `replayed_pullback`
        found = [n for n in back.gradients if n is not None]
        self.saved = SavedTensors(program, self.halves, self.outputs, found)
        wanted = _index_by_number(back.wanted)
        self.gradients = [wanted.get(n) for n in program.given_values]
        self._run: Any = None
        self.cotangent_layouts = [program.values[n].layout for n in back.cotangents]

    @property
    def live_places(self) -> list[int]:
        """The places of the outputs that the backward half takes cotangents of, in its order."""
        moves = zip(self.outputs.moves, self._live, strict=True)
        return [place for place, lives in moves if lives]

    def compile_halves(self, program: Program, compile_graph: Callable) -> Callable:
        """Make functions of both halves; return that of the forward half."""
        (first, last), saved = self.halves, self.saved
        found = [n for n in self.back.gradients if n is not None]
        taken, made = [*saved.numbers, *self.back.cotangents], [*self.outputs.numbers, *saved.fresh]
        self._run = compile_graph(Subgraph(program, last, taken, found))
        return compile_graph(Subgraph(program, first, program.given_values, made))

    def serves_backward(self, cotangents: Sequence[Tensor | None], times: int) -> bool:
        """True if the backward half serves a backward pass with these cotangents.

        ``times`` is how often the call was recorded.
        """
        live, back, passes = [*map(_is_given, cotangents)], self.back, self.passes
        passes.count += 1
        graph, casts = torch.is_grad_enabled(), get_autocast_state() if is_autocast() else ()
        if live != self._live or (graph, casts) != (back.graph, back.casts):
            if times < _MOST_RECORDINGS:
                moved = zip(back.moved, live, strict=True)
                passes.asked = BackwardPass([i for i, c in moved if c], graph, casts)
            else:
                passes.missed += 1
            return False
        plain = all(
            type(c) in PLAIN and not is_functorch_wrapped(c) for c in filter(_is_given, cotangents)
        )
        return plain and not (graph and has_users_tangents())

    def run_backward_half(
        self, saved: Sequence[Tensor], cotangents: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Run the backward half; return a gradient or None for each tensor that wants one."""
        live = filter(_is_given, cotangents)
        laid = [
            match_strides(c, layout)
            for c, layout in zip(live, self.cotangent_layouts, strict=False)
        ]
        with functions_off():  # function modes are to see the user's passes alone
            found = iter(self._run(*saved, *laid))
        return [None if n is None else next(found) for n in self.back.gradients]


class DifferentiableEntry(CacheEntry):
    """A program with its backward half."""

    def __init__(
        self,
        program: Program,
        guards: Guards,
        results: ResultTree,
        overlaps: ArgumentOverlaps,
        compile_graph: Callable,
        derivative: Derivative,
    ) -> None:
        self.derivative = derivative
        super().__init__(program, guards, results, overlaps, compile_graph)
        self._is_plain = False

    def _compile_program(self, compile_graph: Callable) -> Callable:
        return self.derivative.compile_halves(self.program, compile_graph)

    def is_current(self, tensors: Sequence[Tensor], nodes: Sequence[Any] = ()) -> bool:
        passes = self.derivative.passes
        if passes.asked is not None or (self.history.certain and passes.is_backward_unused()):
            return False
        return super().is_current(tensors, nodes)

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        given = (*tensors, *self.captured)
        outs = ReplayFunction.apply(self, *given)
        return self.build(self.derivative.outputs.collect_results(given, outs))


def _is_given(cotangent: Tensor | None) -> bool:
    return cotangent is not None


def _index_by_number(numbers: Sequence[int]) -> dict[int, int]:
    """A dict from each number to its first position."""
    return {n: i for i, n in reversed([*enumerate(numbers)])}


def _make_getter(places: Sequence[int]) -> Callable[[Sequence], tuple]:
    if len(places) > 1:
        return itemgetter(*places)
    return (lambda hand: (hand[places[0]],)) if places else (lambda _: ())


def match_strides(t: Tensor, layout: Layout) -> Tensor:
    """Return a cotangent with the strides of the recorded one, copied if necessary."""
    if t.stride() == layout.strides and not (t.is_conj() or t.is_neg()):
        return t
    made = t.new_empty_strided(
        layout.shape, layout.strides, dtype=layout.dtype, device=layout.device
    )
    return made.copy_(t)


class ReplayFunction(torch.autograd.Function):
    """The autograd Function of a replayed call, one node of the graph around it."""

    does_the_same = True  # with `create_graph` and without

    @staticmethod
    def forward(ctx: Any, recorded: DifferentiableEntry, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.recorded, derivative = recorded, recorded.derivative
        ctx.drawn = rng_state.save_states(tensors) if recorded.traits.draws else None
        found = recorded.run(*tensors)
        outs = found[: len(derivative.outputs.numbers)]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*derivative.saved.select((*tensors, *found)))
        # What the second half does not read may change, unless the function is to run again.
        ctx.others = derivative.saved.select_others(tensors)
        ctx.versions = [*map(get_version, ctx.others)]
        ctx.mark_non_differentiable(*(outs[i] for i in derivative.outputs.constant))
        return outs

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        derivative: Derivative = ctx.recorded.derivative
        given = [cotangents[i] for i in derivative.outputs.moves]
        if all(c is None for c in given):
            return (None,) * (1 + len(derivative.gradients))
        served = derivative.serves_backward(given, ctx.recorded.history.times)
        saved = ctx.saved_tensors
        if served and not torch.is_grad_enabled():
            found = derivative.run_backward_half(saved, given)
        else:
            others = iter(ctx.others)
            tensors = [saved[i] if i >= 0 else next(others) for i in derivative.saved.places]
            call = RecordedCall(
                ctx.recorded, ctx.drawn, [*map(get_version, ctx.others)] == ctx.versions
            )
            found = (
                ReplayBackwardFunction.apply(call, saved, *given, *tensors)
                if served
                else call.pull_back_eagerly(tensors, given)
            )
        return (None, *(None if i is None else found[i] for i in derivative.gradients))


class ReplayBackwardFunction(torch.autograd.Function):
    """The autograd Function of a replayed backward pass; its derivative reruns the function."""

    does_the_same = True

    @staticmethod
    def forward(
        ctx: Any, call: RecordedCall, saved: Sequence[Tensor], *given: Tensor | None
    ) -> tuple:
        derivative = call.recorded.derivative
        ctx.call, ctx.count = call, len(derivative.outputs.moves)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*given)
        met, found = {*map(id, given)}, derivative.run_backward_half(saved, given[: ctx.count])
        for i, g in enumerate(found):  # a node's results are tensors of their own
            if g is not None and id(g) in met:
                found[i] = g.clone()
            met.add(id(g))
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor | None) -> tuple[Tensor | None, ...]:
        call, given = ctx.call, ctx.saved_tensors
        call.recorded.derivative.passes.missed += 1
        return (None, None, *call.pull_back_twice(given[ctx.count :], given[: ctx.count], slopes))
