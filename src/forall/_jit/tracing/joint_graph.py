"""The joint forward and backward recording: backward to all inputs that require grad, once.

NOTE [whose history is whose]
    A gradient of the program is a gradient along the recorded operators alone. Torch follows every
    path. Where one of the tensors that want a gradient was made of another, torch would go on
    through the user's history, and that gradient would count twice, in the program and outside. So
    nothing is pulled back if any of these tensors was made of another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from forall._compat.ambient_settings import set_autocast
from forall._compat.autograd_graph import (
    are_independent,
    find_autograd_node,
    has_python_nodes,
    run_grad_engine,
)
from forall._jit.passes.pipeline import iter_passes
from forall._jit.tracing.side_effects import activate_tracer
from forall._jit.tracing.tracer import TracingHalted

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Sequence

    from forall._jit.graph import OpNode, Program
    from forall._jit.tracing.tracer import Tracer

    Tensor = torch.Tensor

SHARED = "a result shares memory with another tensor, with a derivative at stake"
WRITTEN = "it writes into a tensor from outside, with a derivative at stake"
ENTWINED = "of what it is to be differentiated in, one is made of another"


class BackwardPass(NamedTuple):
    """A backward pass to be recorded, of the ``live`` results (or all).

    ``graph`` stands for ``create_graph``: with it, torch has other formulas for some operators,
    with other rounding. ``casts`` is the state of autocast in the pass; most passes are made after
    the call's autocast has ended.
    """

    live: Collection[int] = ()
    graph: bool = False
    casts: tuple = ()


FIRST_PASS = BackwardPass()


class BackwardHalf(NamedTuple):
    """The backward half of a recorded call: from cotangents to gradients."""

    nodes: list[OpNode]
    moved: list[int]  # the positions of differentiable results
    live: list[int]  # the positions of results that have a cotangent
    graph: bool  # `create_graph`
    casts: tuple  # the state of autocast in the pass
    cotangents: list[int]  # the values of the cotangents
    wanted: list[int]  # the inputs and captured tensors that require grad
    gradients: list[int | None]  # their gradients; None where no result depends on one


def record_backward(
    recorder: Tracer,
    inputs: Sequence[Tensor],
    ends: Sequence[Tensor],
    asked: BackwardPass,
    *,
    certain: bool,
) -> BackwardHalf | None:
    """Record a backward pass to all inputs and captured tensors that require grad, if any do.

    With ``certain``, only if the pass runs no Python of the user's, who did not ask for this pass.
    """
    moved = {id(y): i for i, y in reversed([*enumerate(ends)]) if y.requires_grad}
    if not torch.is_grad_enabled():  # results that are inputs, or views of them, get no new history
        outside = {id(t) for t in (*inputs, *recorder.traced.captured.values())}
        moved = {k: i for k, i in moved.items() if k not in outside and ends[i].grad_fn is not None}
    places = sorted(moved.values())
    if recorder.why is not None or not moved:
        return None
    ways = [*zip(recorder.traced.inputs, inputs, strict=True), *recorder.traced.captured.items()]
    # A tensor in two places is one, with one gradient, in every call of the kind.
    wanted = [*{id(t): (n, t) for n, t in reversed(ways) if _wants_grad(t)}.values()][::-1]
    asked_of = {*asked.live}
    live = [i for i in places if i in asked_of]
    live = live or [i for i in places if find_autograd_node(ends[i]) is not None]
    _check_backward(recorder, [t for _, t in wanted], [ends[i] for i in live], certain=certain)
    if recorder.why is not None:
        return None
    cotangents = [torch.ones_like(ends[i]) for i in live]
    numbers = [recorder.traced.add(c) for c in cotangents]
    first = len(recorder.nodes)
    with activate_tracer(recorder), recorder.halt_when_late():
        found = _run_backward(
            recorder, [ends[i] for i in live], [t for _, t in wanted], cotangents, asked
        )
    gradients = [None if g is None else recorder.add_result(g) for g in found]
    if recorder.why is not None:
        return None
    nodes, numbered = recorder.nodes[first:], [n for n, _ in wanted]
    return BackwardHalf(nodes, places, live, *asked[1:], numbers, numbered, gradients)


def _wants_grad(t: Tensor) -> bool:
    return t.requires_grad and find_autograd_node(t) is not None


def _run_backward(
    recorder: Tracer,
    ends: Sequence[Tensor],
    wanted: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    asked: BackwardPass,
) -> Sequence[Tensor | None]:
    try:
        with set_autocast(asked.casts):
            return run_grad_engine(ends, wanted, cotangents, create_graph=asked.graph)
    except TracingHalted:
        return ()
    except RuntimeError as error:  # the user's own backward pass would raise it too
        recorder.stop_recording(f"its results cannot be pulled back: {str(error).splitlines()[0]}")
        return ()


def _check_backward(
    recorder: Tracer, wanted: Sequence[Tensor], ends: Sequence[Tensor], *, certain: bool
) -> None:
    if any(t._backward_hooks for t in wanted):
        recorder.stop_recording("a tensor that it is to be differentiated in has a hook")
    elif recorder.notes.makes_leaves or not wanted:
        recorder.stop_recording(
            "a result's history leads to a tensor that the function has made a leaf"
        )
    elif certain and (recorder.notes.makes_hooks or has_python_nodes(ends, wanted)):
        recorder.stop_recording("a backward pass of the user's own is part of its history")
    elif not are_independent(wanted):
        recorder.stop_recording(ENTWINED)


def find_entanglement(program: Program) -> str | None:
    """The reason why one autograd node cannot stand for a program, None if it can."""
    roots = [v.root for v in program.values]
    outside = {roots[n] for n in (*program.inputs, *program.captured)}
    written = program.find_written_roots()
    results = {*program.outputs}
    if written & outside:
        return WRITTEN
    if written & {roots[n] for n in program.constants}:
        return "it writes into a tensor made of numbers, with a derivative at stake"
    if outside & {roots[n] for n in results} or len({roots[n] for n in results}) < len(results):
        return SHARED
    return None


def iter_joint_passes(
    program: Program, back: BackwardHalf, kept: Collection[int], *, fastmath: bool = False
) -> Generator[None, None, BackwardHalf]:
    """Run the passes on both halves as one program; return the backward half.

    Captured tensors that want a gradient stay in the program, as do those in ``kept``.
    """
    captured = dict(program.captured)
    results = len(program.outputs)
    program.inputs += back.cotangents
    program.outputs += [n for n in back.gradients if n is not None]
    yield from iter_passes(program, back.nodes, fastmath=fastmath)
    found = iter(program.outputs[results:])
    del program.outputs[results:]
    del program.inputs[len(program.inputs) - len(back.cotangents) :]
    held = {*back.wanted, *kept}
    program.captured.update({n: t for n, t in captured.items() if n in held})
    return back._replace(gradients=[None if n is None else next(found) for n in back.gradients])
