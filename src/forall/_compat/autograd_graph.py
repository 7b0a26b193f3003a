"""The graph that torch's autograd keeps of where tensors come from."""

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

WRITTEN = BackwardCFunction  # nodes whose formula is written in Python

_MOST = 100_000  # nodes that are looked at


def are_apart(tensors: Sequence[Tensor]) -> bool:
    """Whether it is certain that none of these was made of another, or of a view of one."""
    own = {id(node): node for node in map(node_of, tensors) if node is not None}
    if len(own) < 2 or not any(t.grad_fn is not None for t in tensors):
        return True
    before = [GradientEdge(*edge) for node in own.values() for edge in node.next_functions]
    behind = [*islice(nodes(before), _MOST)]
    return len(behind) < _MOST and all(id(n) not in own for n in behind)


def has_pythons(ends: Iterable[Tensor], stops: Iterable[Tensor]) -> bool:
    """Whether a node between these may run Python that is not ours."""
    stop = {id(node): node for node in map(node_of, stops)}
    way = [*islice(nodes(ends, lambda node: id(node) in stop), _MOST)]
    return len(way) == _MOST or any(
        isinstance(node, WRITTEN)
        and id(node) not in stop
        and not node._forward_cls.__module__.startswith("forall.")  # pyright: ignore[reportAttributeAccessIssue]
        for node in way
    )


def nodes(ends: Iterable[End], stops: Callable[[Any], bool] | None = None) -> Iterator[Any]:
    """Every node of the graphs that lead to ``ends``, none behind one that ``stops``."""
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


def gradients(
    outputs: tuple, stops: Iterable[End], given: Any, retain_graph: bool, create_graph: bool
) -> tuple[Tensor | None, ...]:
    """torch.autograd.grad in the answer to a call of it: no function mode is asked once more.

    But those that wait stay on for what the user's own backwards do: torch's name leads there
    (`checkpoints`), and `run_backward` does not.
    """
    with functions_off():
        cotangents = torch.autograd._tensor_or_tensors_to_tuple(given, len(outputs))
        cotangents = torch.autograd._make_grads(outputs, cotangents, is_grads_batched=False)
    return gradients_of(
        outputs, stops, cotangents, retain_graph=retain_graph, create_graph=create_graph
    )


def gradients_of(
    outputs: Sequence[Tensor],
    stops: Iterable[End],
    cotangents: Sequence[Tensor | None],
    *,
    create_graph: bool,
    retain_graph: bool = True,
) -> tuple[Tensor | None, ...]:
    """torch.autograd.grad of cotangents that are known to be of the outputs' kinds.

    Torch compares their shapes by what imports sympy on its first use: half a second.
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


def node_of(t: Tensor) -> Any:
    """The node that gradients of a tensor arrive at; None where none ever do.

    That is a view which is older than that its base requires grad.
    """
    if t.grad_fn is not None:
        return t.grad_fn
    with torch.inference_mode(False), torch.enable_grad():
        after = t.view_as(t).grad_fn
    return None if after is None else after.next_functions[0][0]


def is_view_of(t: Tensor, root: Tensor) -> bool:
    """Whether the history of ``t`` is that of a view of ``root``, and nothing else's."""
    start, node, number = node_of(root), t.grad_fn, t.output_nr
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


def base_of(t: Tensor) -> Tensor:
    """What a view is one of."""
    return t if t._base is None else t._base


class Gate:
    """Within it no gradient goes on from what has been led through it to what that was made of."""

    closed = False

    def through(self, t: Tensor) -> Tensor:
        """The tensor itself, with its history behind the gate."""
        return _Through.apply(self, t)

    def __enter__(self) -> None:
        self.closed = True

    def __exit__(self, *_: object) -> None:
        self.closed = False


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Gate, t: Tensor) -> Tensor:
        ctx.gate = gate
        return t.view_as(t)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None]:
        return None, None if ctx.gate.closed else gradient
