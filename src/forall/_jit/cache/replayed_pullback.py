"""Pull-backs of replayed calls: linear functions of cotangents and saved tensors, without a graph.

NOTE [the pull-back of one replayed call]
    The graph between fresh variables and the outputs of a replayed call is a single node. Its
    pull-back is the backward half of a program: a straight line of operators. What it depends on
    is in the tensors that the node saved. No state of Python's has a say in it any more.

    So it can be run on examples of cotangents as the functions of a `vmap` are, and functions that
    capture such a pull-back can be recorded as functions of the saved tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from forall._compat.autograd_graph import find_autograd_node
from forall._compat.dispatch_state import functions_off, is_autocast, is_functorch_wrapped
from forall._compat.op_schema import get_facts
from forall._compat.private_api import PLAIN, OpOverload
from forall._jit.backends.python_source import compile_part
from forall._jit.cache.differentiable_entry import (
    Derivative,
    DifferentiableEntry,
    ReplayFunction,
    match_strides,
)
from forall._jit.graph import Subgraph
from forall._jit.tracing.tracer import ASSERT_OPS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from forall._jit.graph import Layout, OpNode, Program

    Tensor = torch.Tensor


class ReplayedPullback(NamedTuple):
    """A pull-back that is the backward half of the program ``recorded``.

    ``outputs`` are the places of its outputs among the results of the node, ``gradients`` those of
    its gradients among what the program makes. ``saved`` are all tensors that the program reads:
    those that the node saved, and the program's constants. They are new objects each time.
    """

    recorded: DifferentiableEntry
    run: Callable
    outputs: tuple[int, ...]
    gradients: tuple[int, ...]
    saved: tuple[Tensor, ...]

    def get_output_layouts(self) -> list[Layout]:
        """Return the layouts of the outputs that cotangents belong to."""
        numbers = self.recorded.derivative.outputs.numbers
        return [self.recorded.program.values[numbers[i]].layout for i in self.outputs]

    def pull_back(self, cotangents: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of all inputs, by operators on the cotangents of all outputs."""
        derivative = self.recorded.derivative
        by_place = dict(zip(self.outputs, cotangents, strict=True))
        live = zip(derivative.live_places, derivative.cotangent_layouts, strict=True)
        with functions_off():
            laid = [match_strides(by_place[i].to(layout.dtype), layout) for i, layout in live]
            found = self.run(*self.saved, *laid)
        return [found[i] for i in self.gradients]


def find_replayed_pullback(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor]
) -> ReplayedPullback | None:
    """Return the pull-back from ``outputs`` to the leaves ``inputs``, if one replay is all of it.

    Return None too if the tensors that it saved are gone, or were written to.
    """
    node: Any = find_autograd_node(outputs[0]) if outputs else None
    if getattr(type(node), "_forward_cls", None) is not ReplayFunction or is_autocast():
        return None
    if any(find_autograd_node(y) is not node for y in outputs):
        return None
    recorded: DifferentiableEntry = node.recorded
    derivative = recorded.derivative
    places = tuple(y.output_nr for y in outputs)
    if sorted(places) != sorted(derivative.live_places) or not recorded.history.certain:
        return None
    gradients, run = _match_inputs(node, derivative, inputs), _get_plain_half(recorded)
    if gradients is None or run is None:
        return None
    try:
        saved = node.saved_tensors
    except RuntimeError:  # the pass of torch's will tell the user
        return None
    if any(type(t) not in PLAIN or is_functorch_wrapped(t) for t in saved):
        return None
    constants = recorded.program.constants
    kept = [constants[n] for n in _list_constants(recorded.program, derivative)]
    tensors = tuple(t.detach() for t in (*saved, *kept))
    return ReplayedPullback(recorded, run, places, gradients, tensors)


def _match_inputs(
    node: Any, derivative: Derivative, inputs: Sequence[Tensor]
) -> tuple[int, ...] | None:
    """Return the places of the inputs' gradients; None if the node leads elsewhere, or not to all.

    A tensor with a history outside has a derivative with respect to that, which needs the graph.
    """
    wanted = {id(x): i for i, x in enumerate(inputs)}
    found: dict[int, int] = {}
    numbers = [n for n in derivative.back.gradients if n is not None]
    for edge, place in zip(node.next_functions, derivative.gradients, strict=True):
        if edge[0] is None:
            continue
        i = wanted.get(id(getattr(edge[0], "variable", None)))
        if i is None or i in found or place is None:
            return None
        number = derivative.back.gradients[place]
        if number is None:
            return None
        found[i] = numbers.index(number)
    return tuple(found[i] for i in range(len(inputs))) if len(found) == len(inputs) else None


def _get_plain_half(recorded: DifferentiableEntry) -> Callable | None:
    """Return the backward half as operators alone, which may be run on examples; None without one.

    Not if it draws or asks for numbers, or writes to what it is given: examples share these.
    """
    derivative = recorded.derivative
    if derivative.plain is None:
        derivative.plain = (_compile_plain_half(recorded.program, derivative),)
    return derivative.plain[0]


def _compile_plain_half(program: Program, derivative: Derivative) -> Callable | None:
    back, nodes = derivative.back, derivative.halves[1]
    given = [
        *derivative.saved.numbers,
        *_list_constants(program, derivative),
        *back.cotangents,
    ]
    roots = program.find_roots()
    shared = {roots[n] for n in given}
    if back.casts or back.graph or not all(map(_is_plain_node, nodes)):
        return None
    if any(roots[n] in shared for node in nodes for n in node.writes()):
        return None
    found = [n for n in back.gradients if n is not None]
    return compile_part(Subgraph(program, nodes, given, found))


def _list_constants(program: Program, derivative: Derivative) -> list[int]:
    """Return the constants that the backward half reads."""
    read = {n for node in derivative.halves[1] for n in node.reads()}
    read.update(n for n in derivative.back.gradients if n is not None)
    return [n for n in program.constants if n in read and n not in derivative.saved.numbers]


def _is_plain_node(node: OpNode) -> bool:
    if not isinstance(node.op, OpOverload) or node.op in ASSERT_OPS:
        return False
    return node.outs is not None and not node.has_effect and not get_facts(node.op).seeded
