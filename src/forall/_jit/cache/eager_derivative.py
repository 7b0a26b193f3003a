"""Eager recomputation of a recorded call, for derivatives that its program does not have."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from forall._compat import rng_state
from forall._compat.ambient_settings import apply_settings
from forall._compat.autograd_graph import GradientGate
from forall._compat.dispatch_state import (
    functions_on,
    in_torch_func,
    outside_torch_func,
    run_backward,
)
from forall._compat.documented_error import documented_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Tensor = torch.Tensor


class Repeatable(Protocol):
    """A recorded call that knows how to be made once more, and where its gradients go."""

    program: Any
    guards: Any
    captured: Any
    derivative: Any


class RecordedCall(NamedTuple):
    """A recorded call, to be recomputed eagerly with its inputs and its random draws."""

    recorded: Repeatable
    drawn: Any  # the states of the generators before the call
    unchanged: bool  # False if a tensor that the call read was written into since

    def pull_back_eagerly(
        self, tensors: Sequence[Tensor], cotangents: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        """Pull cotangents back to the tensors that want a gradient."""
        graph, gate = torch.is_grad_enabled(), GradientGate()
        ends, stops = self._rerun_function(tensors, gate.lead_through if graph else _make_leaf)
        with gate:
            return _pull_ends_back(ends, cotangents, stops, graph=graph)

    def pull_back_twice(
        self,
        tensors: Sequence[Tensor],
        cotangents: Sequence[Tensor | None],
        slopes: Sequence[Tensor | None],
    ) -> list[Tensor | None]:
        """The second derivative: ``slopes`` pulled back to the cotangents and to the tensors."""
        graph, gate = torch.is_grad_enabled(), GradientGate()
        through = gate.lead_through if graph else _make_leaf
        given = [through(c) if _needs_grad(c) else c for c in cotangents]
        ends, stops = self._rerun_function(tensors, through)
        with gate:
            first = _pull_ends_back(ends, given, stops, graph=True)
            found = iter(
                _pull_ends_back(first, slopes, [*filter(_needs_grad, given), *stops], graph=graph)
            )
        in_cotangents = [next(found) if _needs_grad(c) else None for c in given]
        recorded = self.recorded
        in_wanted = dict(zip(recorded.derivative.back.wanted, found, strict=True))
        return [*in_cotangents, *map(in_wanted.get, recorded.program.given_values)]

    def _rerun_function(
        self, tensors: Sequence[Tensor], through: Callable[[Tensor], Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Run the function; return its differentiable results, and what wants a gradient."""
        recorded, drawn = self.recorded, None
        back, rerun = recorded.derivative.back, recorded.derivative.rerun
        with apply_settings(rerun.settings):  # the guards may compare them
            unchanged = self.unchanged and recorded.guards.hold()
        if not unchanged:
            raise documented_error(RuntimeError, "modified-since")(
                "forall: a derivative needs a recorded call to be made once more, and what the "
                "function captures, or was given, has changed since.\n"
                "Take the derivative before that is changed, or make the call with "
                "forall.config.replay = False, and not by forall.jit."
            )
        if self.drawn is not None:
            drawn = rng_state.save_states(tensors)
            rng_state.restore_states(self.drawn)
        try:  # the call was outside the torch.func transform that may take the derivative now
            with outside_torch_func() if in_torch_func() else nullcontext():
                inputs, results = rerun.run(recorded, tensors, through)
        finally:
            if drawn is not None:
                rng_state.restore_states(drawn)
        wanted = [*inputs, *tensors[len(inputs) :]]
        stops = [wanted[recorded.program.given_values.index(n)] for n in back.wanted]
        return [results[i] for i in back.moved], stops


def _needs_grad(t: Tensor | None) -> bool:
    return t is not None and t.requires_grad


def _pull_ends_back(
    ends: Sequence[Tensor | None],
    cotangents: Sequence[Tensor | None],
    stops: Sequence[Tensor],
    *,
    graph: bool,
) -> Sequence[Tensor | None]:
    """Pull cotangents of ``ends`` back to ``stops``; ends without a cotangent are left out."""
    pairs = zip(ends, cotangents, strict=True)
    live = [(y, c) for y, c in pairs if y is not None and c is not None and y.requires_grad]
    if not live or not stops:
        return [None] * len(stops)
    return run_backward(
        tuple(y for y, _ in live),
        tuple(c for _, c in live),
        tuple(stops),
        retain_graph=graph,
        create_graph=graph,
    )


def rerun_on_leaves(
    again: Callable, recorded: Repeatable, tensors: Sequence[Tensor], through: Callable
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Return new leaves in place of the inputs, and the results of the function on these.

    ``through`` makes the leaf of an input, at which gradients stop as they did in the recording.
    """
    # An argument that is also captured is one tensor, if it was one to the recording.
    one = recorded.guards.tensors.keys() - {*map(id, recorded.captured)}
    given = tensors[: len(recorded.program.inputs)]
    cut = {id(t): through(t) for t in given if t.requires_grad and id(t) not in one}
    for t in given:
        if id(t) in cut and vars(t):  # attributes of the user's
            vars(cut[id(t)]).update(vars(t))
    inputs = [cut.get(id(t), t) for t in given]
    with functions_on(), apply_settings(recorded.derivative.rerun.settings):
        return inputs, again(inputs)


def _make_leaf(t: Tensor) -> Tensor:
    return t.detach().requires_grad_()
