"""torch.autograd inside a mapped function, through history that a captured tensor brings along.

A captured tensor's stand-in begins a graph of its own (`Share`), and what a backward pass leaves
further out is the sum over the examples. That is what `.backward()` is to leave on a leaf. But a
gradient that `torch.autograd.grad` returns is each example's own: so it stops at the stand-ins, and
goes from there through the graph outside with all examples' cotangents at once, as `jacrev` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._batching.batched import Batched, wrap
from forall._batching.interpreter import VmapLevel, running
from forall._batching.table import CALLS
from forall._core.levels import is_from_outside, lift, top
from forall._torch.dispatch import functions_off, lazy_zeros_pass, run_backward
from forall._transforms.vjp import Pullback
from forall._transforms.vmap import vmap

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from forall._core.levels import Level

Tensors = list[torch.Tensor]


def _grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> Any:
    """torch.autograd.grad, where the way to a captured input leads through the graph outside."""
    level = _sharing()
    if level is None or not only_inputs:
        return NotImplemented
    outs, found_for = _tuple(outputs), _tuple(inputs)
    first_names = {id(stand_in): t for t, stand_in in level.lifted.values()}
    wanted = [first_names.get(id(x), x) for x in found_for]
    points = _points(level, wanted)
    if all(any(t is x for x in wanted) for t, _ in points) and (
        torch.is_grad_enabled() or not any(is_from_outside(x, level) for x in wanted)
    ):
        return NotImplemented  # one graph, of this level
    flags = (bool(create_graph if retain_graph is None else retain_graph), create_graph)
    if is_grads_batched:
        each = lambda g: torch.autograd.grad(outs, found_for, g, *flags, allow_unused=True)  # noqa: E731
        found = list(vmap(each)(grad_outputs))
    else:
        own = [x for x in wanted if not is_from_outside(x, level)]
        with torch.enable_grad():
            outs = tuple(lift(y, level) for y in outs)
        stops = (*own, *(stand_in for _, stand_in in points))
        cots = torch.autograd.grad(outs, stops, grad_outputs, *flags, allow_unused=True)
        found = _further(level, wanted, cots, points, flags)
    if materialize_grads:
        return tuple(torch.zeros_like(x) if g is None else g for g, x in zip(found, found_for))
    if not allow_unused and None in [g if g is None else 0 for g in found]:
        raise RuntimeError(
            "One of the differentiated Tensors appears to not have been used in the graph. "
            "Set allow_unused=True if this is the desired behavior."
        )
    return tuple(found)


def _further(
    level: VmapLevel, wanted: Tensors, cots: Sequence[Any], points: list, flags: tuple[bool, bool]
) -> list:
    """One gradient, or None, for each tensor that is wanted: the level's own, then the others."""
    pulled = iter(cots)
    outer = [x for x in wanted if is_from_outside(x, level)]
    found = {id(x): next(pulled) for x in wanted if not is_from_outside(x, level)}
    met = [(t, c) for (t, _), c in zip(points, pulled, strict=True) if c is not None]
    if met:
        way = Outside(level.parent, [t for t, _ in met], outer, flags)
        gradients = way.at(top(), [c for _, c in met])
        found.update(
            (id(x), g) for x, g, used in zip(outer, gradients, way.used, strict=True) if used
        )
    return [found.get(id(x)) for x in wanted]


class Outside(Pullback):
    """The graph from tensors outside a level to those that it captured."""

    def __init__(self, level: Level | None, outputs: Tensors, wanted: Tensors, flags: Any) -> None:
        self.level = level
        self.wanted = wanted
        self.flags = flags
        self.used = [False] * len(wanted)
        with functions_off(), torch.enable_grad():
            self.outputs = [lift(y, level) for y in outputs]

    def _run_stacked(self, stacks: Tensors) -> Tensors:
        """(N, *O) of the outputs -> (N, *I) of what is wanted, zeros where nothing leads to it."""
        own = [x for x in self.wanted if not self._leaves(x)]
        points = [] if self.level is None else _points(self.level, self.wanted)
        retain_graph, create_graph = self.flags
        with torch.enable_grad():
            level = VmapLevel(stacks[0].shape[0], "same", top(), records_values=True)
            with running(level), lazy_zeros_pass():
                cots = run_backward(
                    tuple(self.outputs),
                    tuple(wrap(s, 0, level) for s in stacks),
                    (*own, *(stand_in for _, stand_in in points)),
                    retain_graph=retain_graph,
                    create_graph=create_graph,
                )
            cots = [None if c is None else self._unstacked(c, level) for c in cots]
            return self._put_together(cots, points, level.size)

    def _leaves(self, x: torch.Tensor) -> bool:
        return self.level is not None and is_from_outside(x, self.level)

    def _put_together(self, cots: list, points: list, size: int) -> Tensors:
        pulled = iter(cots)
        outer = [x for x in self.wanted if self._leaves(x)]
        found = {id(x): next(pulled) for x in self.wanted if not self._leaves(x)}
        met = [(t, c) for (t, _), c in zip(points, pulled, strict=True) if c is not None]
        if met:
            way = Outside(self.level.parent, [t for t, _ in met], outer, self.flags)
            gradients = way.stacked([c for _, c in met], self.level)
            found.update((id(x), g) for x, g, used in zip(outer, gradients, way.used) if used)
        results = [found.get(id(x)) for x in self.wanted]
        self.used = [g is not None for g in results]
        return [
            x.new_zeros(size, *x.shape) if g is None else g
            for g, x in zip(results, self.wanted, strict=True)
        ]


def _sharing() -> VmapLevel | None:
    """The level at which captured tensors get stand-ins now."""
    level = top()
    while level is not None and not (isinstance(level, VmapLevel) and not level.records_values):
        level = level.parent
    return level


def _points(level: Level, wanted: Tensors) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The captured tensors on a way to what is wanted, with their stand-ins."""
    captured = [pair for pair in level.lifted.values() if pair[1].requires_grad]
    return [(t, s) for t, s in captured if any(t is x for x in wanted) or _leads_to(t, wanted)]


def _leads_to(tensor: torch.Tensor, wanted: Tensors) -> bool:
    if tensor.grad_fn is None:
        return False
    goals = {x.grad_fn for x in wanted if x.grad_fn is not None}
    leaves = {id(x) for x in wanted}
    return any(
        node in goals or id(getattr(node, "variable", None)) in leaves for node in _nodes([tensor])
    )


def _nodes(tensors: Iterable[torch.Tensor]) -> Iterable[Any]:
    """Every node of these tensors' graphs."""
    todo = [t.grad_fn for t in tensors if t.grad_fn is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)


def _backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
    """The sum over the examples, as the loop leaves it."""
    level = _sharing()
    if level is None:
        return NotImplemented
    with torch.enable_grad():
        roots = tuple(
            lift(t, level) if t.requires_grad and is_from_outside(t, level) else t
            for t in _tuple(tensors)
        )
    torch.autograd.backward(roots, *args, **kwargs)
    captured = [t for t, s in level.lifted.values() if s.requires_grad and t.grad_fn is not None]
    for node in _nodes(captured):
        leaf = getattr(node, "variable", None)
        if leaf is not None and is_from_outside(leaf, level):
            left = leaf.grad  # by nodes outside that ran under the level
            if type(left) is Batched and left.level is level and left.axis is None:
                leaf.grad = left.value
    return None


def _tuple(tensors: Any) -> tuple:
    return (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)


def install() -> None:
    """What calls of torch.autograd mean under `vmap`."""
    CALLS[torch.autograd.grad] = _grad
    CALLS[torch.Tensor.backward] = _backward
    CALLS[torch.autograd.backward] = _backward
