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
from forall._jit.tracing.joint_graph import BackwardPass

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forall._jit.cache.entry import ArgumentOverlaps
    from forall._jit.graph import Layout, Program
    from forall._jit.guards.build import Guards
    from forall._jit.tracing.joint_graph import BackwardHalf
    from forall._jit.tracing.output_views import OutputBases

    Tensor = torch.Tensor

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


class DifferentiableEntry(CacheEntry):
    """A program with its backward half. ``again`` runs the function eagerly on other inputs.

    After the forward half these tensors are at hand, in this order: ``given``, the outputs, and
    ``fresh``, which are intermediate results. The backward half reads ``saved`` of them.
    """

    asked: BackwardPass | None = None  # the last backward pass that the backward half did not serve
    passes = 0  # backward passes so far
    missed = 0  # those of them for which the function ran eagerly

    def __init__(
        self,
        program: Program,
        guards: Guards,
        results: ResultTree,
        met: ArgumentOverlaps,
        write: Callable,
        back: BackwardHalf,
        again: EagerRerun,
        views: OutputBases | None = None,
    ) -> None:
        self.back = back
        self.again, self.settings = again
        second = {id(node) for node in back.nodes}
        first = [node for node in program.nodes if id(node) not in second]
        self.halves = first, [node for node in program.nodes if id(node) in second]
        self.outputs = [*dict.fromkeys(program.outputs)]
        place, live = _index_by_number(self.outputs), {*back.live}
        self._order = [place[n] for n in program.outputs]
        self.moves = [place[program.outputs[i]] for i in back.moved]
        self.live = [i in live for i in back.moved]
        self.constant = {*range(len(self.outputs))} - {*self.moves}
        super().__init__(program, guards, results, met, write)
        self._is_plain = False
        self.open = None if views is None else views.run
        place = _index_by_number(self.given)
        self._viewed = _make_getter([place[n] for n in views.given] if views else ())

    def _compile_program(self) -> Callable:
        first, last = self.halves
        found = [n for n in self.back.gradients if n is not None]
        made = {n for node in first for n in node.makes()}
        read = dict.fromkeys([*(n for node in last for n in node.reads()), *found])
        given, outputs = {*self.given}, {*self.outputs}
        saved = [n for n in read if n in made or n in given]
        fresh = [n for n in saved if n in made and n not in outputs]
        hand = _index_by_number([*self.given, *self.outputs, *fresh])
        self.saved = _make_getter([hand[n] for n in saved])
        kept, wanted = _index_by_number(saved), _index_by_number(self.back.wanted)
        self.others = _make_getter([i for i, n in enumerate(self.given) if n not in kept])
        self.places = [kept.get(n, -1) for n in self.given]
        self.gradients = [wanted.get(n) for n in self.given]
        self.backward = self.write(self.program, last, [*saved, *self.back.cotangents], found)
        return self.write(self.program, first, self.given, [*self.outputs, *fresh])

    def is_current(self, tensors: Sequence[Tensor], nodes: Sequence[Any] = ()) -> bool:
        if self.asked is not None or (self.certain and self.is_backward_unused()):
            return False
        return super().is_current(tensors, nodes)

    def is_backward_unused(self) -> bool:
        """True if the recorded backward pass serves too few of the backward passes."""
        return self.missed > _FEW_EAGER_PASSES + self.passes // _WORTH

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        given = (*tensors, *self.captured)
        outs = ReplayFunction.apply(self, *given)
        found = [outs[i] for i in self._order]
        return self.results.build_tree(
            self.open(*self._viewed(given), *found) if self.open else found
        )

    def serves_backward(self, cotangents: Sequence[Tensor | None]) -> bool:
        """True if the backward half serves a backward pass with these cotangents."""
        live = [*map(_is_given, cotangents)]
        self.passes += 1
        graph, casts = torch.is_grad_enabled(), get_autocast_state() if is_autocast() else ()
        if live != self.live or (graph, casts) != (self.back.graph, self.back.casts):
            if self.times < _MOST_RECORDINGS:
                moved = zip(self.back.moved, live, strict=True)
                self.asked = BackwardPass([i for i, c in moved if c], graph, casts)
            else:
                self.missed += 1
            return False
        plain = all(
            type(c) in PLAIN and not is_functorch_wrapped(c) for c in filter(_is_given, cotangents)
        )
        return plain and not (graph and has_users_tangents())

    def run_backward_half(
        self, saved: Sequence[Tensor], cotangents: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Run the backward half; return a gradient or None for each tensor that wants one."""
        values, numbers = self.program.values, self.back.cotangents
        live = filter(_is_given, cotangents)
        laid = [_match_strides(c, values[n].layout) for c, n in zip(live, numbers, strict=True)]
        with functions_off():  # function modes are to see the user's passes alone
            found = iter(self.backward(*saved, *laid))
        return [None if n is None else next(found) for n in self.back.gradients]


def _is_given(cotangent: Tensor | None) -> bool:
    return cotangent is not None


def _index_by_number(numbers: Sequence[int]) -> dict[int, int]:
    """A dict from each number to its first position."""
    return {n: i for i, n in reversed([*enumerate(numbers)])}


def _make_getter(places: Sequence[int]) -> Callable[[Sequence], tuple]:
    if len(places) > 1:
        return itemgetter(*places)
    return (lambda hand: (hand[places[0]],)) if places else (lambda _: ())


def _match_strides(t: Tensor, layout: Layout) -> Tensor:
    """Return a cotangent with the strides of the recorded one, copied if necessary."""
    if t.stride() == layout.strides and not (t.is_conj() or t.is_neg()):
        return t
    made = torch.empty_strided(
        layout.shape, layout.strides, dtype=layout.dtype, device=layout.device
    )
    return made.copy_(t)


class ReplayFunction(torch.autograd.Function):
    """The autograd Function of a replayed call, one node of the graph around it."""

    does_the_same = True  # with `create_graph` and without

    @staticmethod
    def forward(ctx: Any, recorded: DifferentiableEntry, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.recorded = recorded
        ctx.drawn = rng_state.save_states(tensors) if recorded.draws else None
        found = recorded.run(*tensors)
        outs = found[: len(recorded.outputs)]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*recorded.saved((*tensors, *found)))
        # What the second half does not read may change, unless the function is to run again.
        ctx.others = recorded.others(tensors)
        ctx.versions = [*map(get_version, ctx.others)]
        ctx.mark_non_differentiable(*(outs[i] for i in recorded.constant))
        return outs

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        recorded: DifferentiableEntry = ctx.recorded
        given = [cotangents[i] for i in recorded.moves]
        if all(c is None for c in given):
            return (None,) * (1 + len(recorded.given))
        served, saved = recorded.serves_backward(given), ctx.saved_tensors
        if served and not torch.is_grad_enabled():
            found = recorded.run_backward_half(saved, given)
        else:
            others = iter(ctx.others)
            tensors = [saved[i] if i >= 0 else next(others) for i in recorded.places]
            call = RecordedCall(
                recorded, ctx.drawn, [*map(get_version, ctx.others)] == ctx.versions
            )
            found = (
                ReplayBackwardFunction.apply(call, saved, *given, *tensors)
                if served
                else call.pull_back_eagerly(tensors, given)
            )
        return (None, *(None if i is None else found[i] for i in recorded.gradients))


class ReplayBackwardFunction(torch.autograd.Function):
    """The autograd Function of a replayed backward pass; its derivative reruns the function."""

    does_the_same = True

    @staticmethod
    def forward(
        ctx: Any, call: RecordedCall, saved: Sequence[Tensor], *given: Tensor | None
    ) -> tuple:
        ctx.call, ctx.count = call, len(call.recorded.moves)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*given)
        met, found = {*map(id, given)}, call.recorded.run_backward_half(saved, given[: ctx.count])
        for i, g in enumerate(found):  # a node's results are tensors of their own
            if g is not None and id(g) in met:
                found[i] = g.clone()
            met.add(id(g))
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor | None) -> tuple[Tensor | None, ...]:
        call, given = ctx.call, ctx.saved_tensors
        call.recorded.missed += 1
        return (None, None, *call.pull_back_twice(given[ctx.count :], given[: ctx.count], slopes))
