"""The graph that torch's autograd keeps of where tensors come from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import BackwardCFunction

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    Tensor = torch.Tensor

_MOST = 100_000  # nodes that are looked at


def are_apart(tensors: Sequence[Tensor]) -> bool:
    """Whether it is certain that none of these was made of another, or of a view of one."""
    own = {id(node): node for node in map(node_of, tensors) if node is not None}
    if len(own) < 2 or not any(t.grad_fn is not None for t in tensors):
        return True
    nodes = [n for node in own.values() for n in _before(node)]
    return all(n is not None and id(n) not in own for n in _walk(nodes))


def has_pythons(ends: Iterable[Tensor], stops: Iterable[Tensor]) -> bool:
    """Whether a node between these may run Python that is not ours."""
    stop = {id(node): node for node in map(node_of, stops)}
    nodes = _walk(filter(None, map(node_of, ends)), lambda node: id(node) in stop)
    return any(
        node is None
        or (
            isinstance(node, BackwardCFunction)
            and id(node) not in stop
            and not node._forward_cls.__module__.startswith("forall.")  # pyright: ignore[reportAttributeAccessIssue]
        )
        for node in nodes
    )


def _walk(nodes: Iterable[Any], stops: Callable[[Any], bool] = lambda _: False) -> Iterator[Any]:
    """These and all that they come from; None at the end where there are too many."""
    left = [*nodes]
    seen = {}  # held, so that no other node takes its identity
    while left:
        node = left.pop()
        if id(node) in seen:
            continue
        if len(seen) == _MOST:
            yield None
            return
        seen[id(node)] = node
        yield node
        if not stops(node):
            left += _before(node)


def _before(node: Any) -> list[Any]:
    return [n for n, _ in node.next_functions if n is not None]


def node_of(t: Tensor) -> Any:
    """The node that gradients of a tensor arrive at; None where none ever do.

    That is a view which is older than that its base requires grad.
    """
    if t.grad_fn is not None:
        return t.grad_fn
    with torch.inference_mode(False), torch.enable_grad():
        after = t.view_as(t).grad_fn
    return None if after is None else after.next_functions[0][0]


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
