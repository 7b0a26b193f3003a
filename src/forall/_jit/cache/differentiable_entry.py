"""A recorded call with a derivative outside: a program in two halves, one node of torch's graph.

NOTE [a program's derivative]
    Where something outside requires grad, the first call is also pulled back once, and that is
    recorded as well. The two halves are one program, cleaned as one and cut in two: what the second
    reads of the first is what the call saves. So custom Functions, ``no_grad`` and detached values
    mean in a replayed backward pass what they meant in the recorded one.

    The second half is for cotangents of the results that had one when it was recorded. A zero in
    the place of one that is missing would not do: torch leaves such paths out, and zero times an
    infinite slope is nan. Other cotangents, and whatever acts on them as a transform does, are left
    to the function itself, run once more as it was called. The next call is recorded for what was
    asked.

    A backward pass that records itself is a node too (`Pulled`): most have a history that nobody
    follows. Who does has the function run once more as well.
"""

from __future__ import annotations

from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forall._compat import rng_state
from forall._compat.ambient_settings import settings_now
from forall._compat.dispatch_state import (
    autocast_state,
    functions_off,
    is_autocast,
    torch_funcs,
    users_tangents,
)
from forall._compat.private_api import PLAIN, version
from forall._core.recompute import where_it_first_ran
from forall._jit.cache.eager_derivative import Call, stood_in
from forall._jit.cache.entry import Recorded, Results
from forall._jit.tracing.joint_graph import Pass

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forall._jit.cache.entry import Met
    from forall._jit.graph import Layout, Program
    from forall._jit.guards.build import Guards
    from forall._jit.tracing.joint_graph import Pullback
    from forall._jit.tracing.output_views import Opened

    Tensor = torch.Tensor

_FEW = 2  # backward passes that the function makes again, besides one in so many:
_WORTH = 32
_TURNS = 8  # recordings of one kind, each for other cotangents


class Again(NamedTuple):
    """How the function is called once more, where and under what settings it was recorded."""

    run: Callable
    settings: Any

    @classmethod
    def of(cls, again: Callable) -> Again:
        """Taken where the call is recorded: it may be written down later."""
        return cls(where_it_first_ran(partial(stood_in, again), recomputes=False), settings_now())


class Differentiated(Recorded):
    """A program with its pull-back. ``again`` calls the function, of tensors in the inputs' place.

    What is at hand when it has run are ``given``, its outputs, and ``fresh``, in this order; of
    these the second half reads ``saved``.
    """

    asked: Pass | None = None  # the backward pass that there was, where it was another
    passes = 0  # backward passes so far
    missed = 0  # of these, such as the function had to make again

    def __init__(
        self,
        program: Program,
        guards: Guards,
        results: Results,
        met: Met,
        write: Callable,
        back: Pullback,
        again: Again,
        views: Opened | None = None,
    ) -> None:
        self.back = back
        self.again, self.settings = again
        second = {id(node) for node in back.nodes}
        first = [node for node in program.nodes if id(node) not in second]
        self.halves = first, [node for node in program.nodes if id(node) in second]
        self.outputs = [*dict.fromkeys(program.outputs)]
        place, live = _places(self.outputs), {*back.live}
        self._order = [place[n] for n in program.outputs]
        self.moves = [place[program.outputs[i]] for i in back.moved]
        self.live = [i in live for i in back.moved]
        self.constant = {*range(len(self.outputs))} - {*self.moves}
        super().__init__(program, guards, results, met, write)
        self._is_plain = False
        self.open = None if views is None else views.run
        place = _places(self.given)
        self._viewed = _picked([place[n] for n in views.given] if views else ())

    def _compiled(self) -> Callable:
        first, last = self.halves
        found = [n for n in self.back.gradients if n is not None]
        made = {n for node in first for n in node.makes()}
        read = dict.fromkeys([*(n for node in last for n in node.reads()), *found])
        given, outputs = {*self.given}, {*self.outputs}
        saved = [n for n in read if n in made or n in given]
        fresh = [n for n in saved if n in made and n not in outputs]
        hand = _places([*self.given, *self.outputs, *fresh])
        self.saved = _picked([hand[n] for n in saved])
        kept, wanted = _places(saved), _places(self.back.wanted)
        self.others = _picked([i for i, n in enumerate(self.given) if n not in kept])
        self.places = [kept.get(n, -1) for n in self.given]
        self.gradients = [wanted.get(n) for n in self.given]
        self.backward = self.write(self.program, last, [*saved, *self.back.cotangents], found)
        return self.write(self.program, first, self.given, [*self.outputs, *fresh])

    def is_current(self, tensors: Sequence[Tensor], nodes: Sequence[Any] = ()) -> bool:
        if self.asked is not None or (self.certain and self.is_in_vain()):
            return False
        return super().is_current(tensors, nodes)

    def is_in_vain(self) -> bool:
        """Whether what is recorded of the backward pass is hardly ever of use."""
        return self.missed > _FEW + self.passes // _WORTH

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        given = (*tensors, *self.captured)
        outs = Replayed.apply(self, *given)
        found = [outs[i] for i in self._order]
        return self.results.tree(self.open(*self._viewed(given), *found) if self.open else found)

    def serves_backward(self, cotangents: Sequence[Tensor | None]) -> bool:
        """Whether the second half is what these are pulled back by."""
        live = [*map(_is_given, cotangents)]
        self.passes += 1
        graph, casts = torch.is_grad_enabled(), autocast_state() if is_autocast() else ()
        if live != self.live or (graph, casts) != (self.back.graph, self.back.casts):
            if self.times < _TURNS:
                moved = zip(self.back.moved, live, strict=True)
                self.asked = Pass([i for i, c in moved if c], graph, casts)
            else:
                self.missed += 1
            return False
        plain = all(type(c) in PLAIN and not torch_funcs(c) for c in filter(_is_given, cotangents))
        return plain and not (graph and users_tangents())

    def pulled(
        self, saved: Sequence[Tensor], cotangents: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """The gradients of what is wanted."""
        values, numbers = self.program.values, self.back.cotangents
        live = filter(_is_given, cotangents)
        laid = [_laid_out(c, values[n].layout) for c, n in zip(live, numbers, strict=True)]
        with functions_off():  # who listens to a pass listens to the user's
            found = iter(self.backward(*saved, *laid))
        return [None if n is None else next(found) for n in self.back.gradients]


def _is_given(cotangent: Tensor | None) -> bool:
    return cotangent is not None


def _places(numbers: Sequence[int]) -> dict[int, int]:
    """Where each of these stands first."""
    return {n: i for i, n in reversed([*enumerate(numbers)])}


def _picked(places: Sequence[int]) -> Callable[[Sequence], tuple]:
    if len(places) > 1:
        return itemgetter(*places)
    return (lambda hand: (hand[places[0]],)) if places else (lambda _: ())


def _laid_out(t: Tensor, layout: Layout) -> Tensor:
    """A cotangent with the strides of the one that was recorded."""
    if t.stride() == layout.strides and not (t.is_conj() or t.is_neg()):
        return t
    made = torch.empty_strided(
        layout.shape, layout.strides, dtype=layout.dtype, device=layout.device
    )
    return made.copy_(t)


class Replayed(torch.autograd.Function):
    """A recorded call as one node of the graph around it."""

    does_the_same = True  # whether its backward pass is recorded or not

    @staticmethod
    def forward(ctx: Any, recorded: Differentiated, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.recorded = recorded
        ctx.drawn = rng_state.states(tensors) if recorded.draws else None
        found = recorded.run(*tensors)
        outs = found[: len(recorded.outputs)]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*recorded.saved((*tensors, *found)))
        # What the second half does not read may change, unless the function is to run again.
        ctx.others = recorded.others(tensors)
        ctx.versions = [*map(version, ctx.others)]
        ctx.mark_non_differentiable(*(outs[i] for i in recorded.constant))
        return outs

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        recorded: Differentiated = ctx.recorded
        given = [cotangents[i] for i in recorded.moves]
        if all(c is None for c in given):
            return (None,) * (1 + len(recorded.given))
        served, saved = recorded.serves_backward(given), ctx.saved_tensors
        if served and not torch.is_grad_enabled():
            found = recorded.pulled(saved, given)
        else:
            others = iter(ctx.others)
            tensors = [saved[i] if i >= 0 else next(others) for i in recorded.places]
            call = Call(recorded, ctx.drawn, [*map(version, ctx.others)] == ctx.versions)
            found = (
                Pulled.apply(call, saved, *given, *tensors)
                if served
                else call.pulled(tensors, given)
            )
        return (None, *(None if i is None else found[i] for i in recorded.gradients))


class Pulled(torch.autograd.Function):
    """A recorded backward pass as one node of the graph; its derivative is the function's."""

    does_the_same = True

    @staticmethod
    def forward(ctx: Any, call: Call, saved: Sequence[Tensor], *given: Tensor | None) -> tuple:
        ctx.call, ctx.count = call, len(call.recorded.moves)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*given)
        met, found = {*map(id, given)}, call.recorded.pulled(saved, given[: ctx.count])
        for i, g in enumerate(found):  # a node's results are tensors of their own
            if g is not None and id(g) in met:
                found[i] = g.clone()
            met.add(id(g))
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor | None) -> tuple[Tensor | None, ...]:
        call, given = ctx.call, ctx.saved_tensors
        call.recorded.missed += 1
        return (None, None, *call.twice(given[ctx.count :], given[: ctx.count], slopes))
