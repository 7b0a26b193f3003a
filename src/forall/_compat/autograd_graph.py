"""The graph that autograd records: walks over its nodes, and backward passes through it."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from forall._compat.dispatch_state import functions_off

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    Tensor = torch.Tensor
    End = Tensor | GradientEdge

WRITTEN = BackwardCFunction  # nodes whose backward is a user's Python function

_MOST = 100_000  # nodes that are visited


def are_independent(tensors: Sequence[Tensor]) -> bool:
    """Return True if none of these tensors can have been computed from another, or a view of it."""
    own = {id(node): node for node in map(find_autograd_node, tensors) if node is not None}
    if len(own) < 2 or not any(t.grad_fn is not None for t in tensors):
        return True
    before = [GradientEdge(*edge) for node in own.values() for edge in node.next_functions]
    behind = [*islice(iterate_nodes(before), _MOST)]
    return len(behind) < _MOST and all(id(n) not in own for n in behind)


def has_python_nodes(ends: Iterable[Tensor], stops: Iterable[Tensor]) -> bool:
    """Return True if a node between these tensors may run Python that is not forall's."""
    stop = {id(node): node for node in map(find_autograd_node, stops)}
    way = [*islice(iterate_nodes(ends, lambda node: id(node) in stop), _MOST)]
    return len(way) == _MOST or any(
        isinstance(node, WRITTEN)
        and id(node) not in stop
        and not node._forward_cls.__module__.startswith("forall.")  # pyright: ignore[reportAttributeAccessIssue]
        for node in way
    )


def iterate_nodes(ends: Iterable[End], stops: Callable[[Any], bool] | None = None) -> Iterator[Any]:
    """Yield every node of the graphs that lead to ``ends``, none behind one that ``stops``."""
    starts = [e.grad_fn if isinstance(e, torch.Tensor) else e.node for e in ends]
    todo: list[Any] = [node for node in starts if node is not None]
    seen = {None, *todo}
    while todo:
        node = todo.pop()
        yield node
        if stops is not None and stops(node):
            continue
        for following, _ in node.next_functions:
            if following not in seen:
                seen.add(following)
                todo.append(following)


def call_autograd_grad(
    outputs: tuple, stops: Iterable[End], given: Any, retain_graph: bool, create_graph: bool
) -> tuple[Tensor | None, ...]:
    """Run torch.autograd.grad as the implementation of a user's call of it.

    Function modes are not asked again about the call itself. They stay on for the user's own
    backwards: torch's name leads there (`checkpoint`), and `run_backward` does not.
    """
    cotangents = cotangents_of(outputs, given)
    return run_grad_engine(
        outputs, stops, cotangents, retain_graph=retain_graph, create_graph=create_graph
    )


def cotangents_of(outputs: tuple, given: Any) -> list[Any]:
    """Return one for each output: what torch.autograd.grad was given, or else ones."""
    # Ones have no history, and what they are made like may come from outside of a level.
    with functions_off(), torch.no_grad():
        cotangents = torch.autograd._tensor_or_tensors_to_tuple(given, len(outputs))
        return [*torch.autograd._make_grads(outputs, cotangents, is_grads_batched=False)]


def run_grad_engine(
    outputs: Sequence[Tensor],
    stops: Iterable[End],
    cotangents: Sequence[Tensor | None],
    *,
    create_graph: bool,
    retain_graph: bool = True,
) -> tuple[Tensor | None, ...]:
    """Run torch.autograd.grad for cotangents that are known to match the outputs.

    torch's own check of their shapes imports sympy on its first use, which takes half a second.
    """
    return torch.autograd._engine_run_backward(
        tuple(outputs),
        tuple(cotangents),
        retain_graph,
        create_graph,
        tuple(stops),
        allow_unreachable=True,
        accumulate_grad=False,
    )


def find_autograd_node(t: Tensor) -> Any:
    """Return the node that gradients of a tensor arrive at; None if none ever do.

    It is None for a view that was made before its base required grad.
    """
    if t.grad_fn is not None:
        return t.grad_fn
    with torch.inference_mode(False), torch.enable_grad():
        after = t.view_as(t).grad_fn
    return None if after is None else after.next_functions[0][0]


def is_view_of(t: Tensor, root: Tensor) -> bool:
    """Return True if the history of ``t`` is that of a view of ``root``, and nothing else."""
    start, node, number = find_autograd_node(root), t.grad_fn, t.output_nr
    while node is not None and not (node is start and number == root.output_nr):
        if node.name().rstrip("0123456789") not in _VIEWS or len(node.next_functions) != 1:
            return False
        node, number = node.next_functions[0]
    return node is not None


_KINDS = """
    Alias AsStrided Diagonal Expand FwPrimal Narrow Permute ReshapeAlias Select Slice Split
    SplitWithSizes Squeeze T Transpose Unbind Unfold Unsqueeze UnsafeView View
"""
_VIEWS = frozenset({*(f"{kind}Backward" for kind in _KINDS.split()), "torch::autograd::Identity"})


def get_base(t: Tensor) -> Tensor:
    """Return the base of a view; any other tensor as it is."""
    return t if t._base is None else t._base


class GradientGate:
    """A block in which no gradient passes from tensors led through the gate to their inputs."""

    closed = False

    def lead_through(self, t: Tensor) -> Tensor:
        """Return a view of the tensor, whose history is behind the gate."""
        return _GatedView.apply(self, t)

    def __enter__(self) -> None:
        self.closed = True

    def __exit__(self, *_: object) -> None:
        self.closed = False


class _GatedView(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: GradientGate, t: Tensor) -> Tensor:
        ctx.gate = gate
        return t.view_as(t)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None]:
        return None, None if ctx.gate.closed else gradient
