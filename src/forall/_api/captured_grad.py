"""torch.autograd inside a mapped function, through the history of a captured tensor.

A captured tensor's stand-in begins a graph of its own (`Share`), and a backward pass accumulates
the sum over the examples outside. `.backward()` must leave that sum on a leaf. But a gradient that
`torch.autograd.grad` returns is each example's own.

So the pass stops at the level's boundary, and continues through the graph outside with the
cotangents of all examples at once, as `jacrev` does. It stops at a stand-in, or at a mapped
argument whose batched value has such a history. Each example's cotangent is then zero in the
batched value but for the example's own index.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge

from forall._api.vjp import GraphPullback
from forall._api.vmap import vmap
from forall._autodiff.jvp_level import JvpLevel
from forall._compat.autograd_graph import call_autograd_grad, cotangents_of, iterate_nodes
from forall._compat.devices import copy_index_to
from forall._compat.dispatch_state import functions_off, run_backward
from forall._compat.documented_error import documented_error
from forall._compat.private_api import PLAIN
from forall._core.errors import format_columns, format_short
from forall._core.levels import complete_gradient, is_from_outside, lift, stack, top
from forall._vmap.active_set.merge import RestrictExamples
from forall._vmap.batched_tensor import BatchedTensor
from forall._vmap.boundary import Broadcast, Restack, Unstack
from forall._vmap.function_mode import find_sharing_level
from forall._vmap.registry import CALLS, UNSHARED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from forall._compat.autograd_graph import End
    from forall._core.levels import Level

Tensors = list[torch.Tensor]


class Crossing(NamedTuple):
    """A place where a graph crosses a level's boundary and continues outside."""

    inside: End
    outside: End
    axis: int | None  # the batch axis of a mapped argument; None for a shared tensor


class GradCall(NamedTuple):
    """The arguments of torch.autograd.grad, in its order."""

    outputs: Any
    inputs: Any
    grad_outputs: Any = None
    retain_graph: bool | None = None
    create_graph: bool = False
    only_inputs: bool = True
    allow_unused: bool | None = None
    is_grads_batched: bool = False
    materialize_grads: bool = False

    @property
    def flags(self) -> tuple[bool, bool]:
        """Return ``retain_graph`` as torch understands it, and ``create_graph``."""
        retain = self.create_graph if self.retain_graph is None else self.retain_graph
        return bool(retain), self.create_graph

    def pack_gradients(self, found: list, inputs: Any) -> tuple:
        """Return what torch.autograd.grad gives for these gradients, or raise for missing ones."""
        if self.materialize_grads:
            with torch.no_grad():
                return tuple(
                    torch.zeros_like(x) if g is None else g
                    for g, x in zip(found, inputs, strict=True)
                )
        return tuple(found) if self.allow_unused else _check_all_used(found)


def _grad_through_captured(call: GradCall) -> Any:
    """Compute torch.autograd.grad, also with respect to a captured tensor and its history."""
    level = find_sharing_level(top())
    given = _tuple(call.inputs)
    if level is None or not all(isinstance(x, torch.Tensor) for x in given):
        return NotImplemented
    wanted = _replace_stand_ins(level, given)
    if not any(is_from_outside(x, level) for x in wanted):
        return NotImplemented
    with torch.enable_grad():
        outs = tuple(
            lift(y, level) if isinstance(y, torch.Tensor) else y for y in _tuple(call.outputs)
        )
    crossings = _find_crossings(level, outs, wanted)
    # Under no_grad the inputs have no stand-ins, and a pass would continue to them and sum.
    is_one_graph = torch.is_grad_enabled() and not any(
        _continues_outside(c.outside, wanted) for c in crossings
    )
    if is_one_graph and not stack.diverged:
        return NotImplemented
    flags = call.flags
    if call.is_grads_batched:
        each = lambda g: torch.autograd.grad(outs, wanted, g, *flags, allow_unused=True)  # noqa: E731
        found = vmap(each)(call.grad_outputs)
    elif is_one_graph:  # the unrestricted stand-ins are ancestors of what any example computed
        stops = [lift(x, level.root) for x in wanted]
        found = call_autograd_grad(outs, stops, call.grad_outputs, *flags)
    else:
        found = _find_gradients(level, outs, wanted, call.grad_outputs, crossings, flags)
    return call.pack_gradients(found, given)


def _grad_outside(call: GradCall) -> Any:
    """The same through a graph that was there before the call: all of the way lies outside.

    It is asked before what is captured is shared, so nothing is lifted, and no pass runs inside.
    """
    level = find_sharing_level(top())
    if level is None or level.root is not level or stack.diverged or call.is_grads_batched:
        return NotImplemented
    outs, wanted = _tuple(call.outputs), [*_tuple(call.inputs)]
    if not outs or not all(
        type(t) in PLAIN and t.requires_grad and is_from_outside(t, level) for t in (*outs, *wanted)
    ):
        return NotImplemented  # a Wrapper may lie further out, but have a history of this level's
    way = OuterPullback(level, [Crossing(y, y, None) for y in outs], wanted, call.flags)
    cotangents = cotangents_of(outs, call.grad_outputs)
    with torch.set_grad_enabled(call.create_graph):
        found = way.gradients_by_id(way.pull_back_at(top(), cotangents))
    return call.pack_gradients([found.get(id(x)) for x in wanted], wanted)


def _check_all_used(found: Iterable) -> tuple:
    """Raise torch's own error, in its words, if an input has no gradient."""
    for i, g in enumerate(found):
        if g is None:
            raise RuntimeError(
                f"The differentiated Tensor at index {i} appears to not have been used in the "
                "graph. Set allow_unused=True if this is the desired behavior."
            )
    return tuple(found)


def _replace_stand_ins(level: Level, tensors: tuple) -> Tensors:
    """Return the tensors, with captured ones in the place of their stand-ins at this level.

    Where examples have diverged, a stand-in may be restricted to some of them.
    """

    def find_captured(x: torch.Tensor) -> torch.Tensor:
        node = x.grad_fn
        while isinstance(node, RestrictExamples._backward_cls):
            node = node.next_functions[0][0]
        return captured.get(node or id(x), x)

    with functions_off():
        captured = {s.grad_fn or id(s): t for t, s in level.lift_cache.values()}
        return [*map(find_captured, tensors)]


def _find_gradients(
    level: Level, outs: tuple, wanted: Tensors, grads: Any, crossings: list[Crossing], flags: Any
) -> list:
    """Return a gradient, or None, for each wanted tensor: the level's own and those outside."""
    stops = [x for x in wanted if not is_from_outside(x, level)]
    stops += [c.inside for c in crossings]
    # Zeros complete a gradient of some examples to one of all that run.
    pulled = map(complete_gradient, call_autograd_grad(outs, stops, grads, *flags))
    own = {id(x): next(pulled) for x in wanted if not is_from_outside(x, level)}
    met = [(c, cot) for c, cot in zip(crossings, pulled, strict=True) if cot is not None]
    if met:
        way = OuterPullback(
            level, [c for c, _ in met], [x for x in wanted if id(x) not in own], flags
        )
        with torch.set_grad_enabled(flags[1]):
            own.update(way.gradients_by_id(way.pull_back_at(top(), [cot for _, cot in met])))
    return [own.get(id(x)) for x in wanted]


class OuterPullback(GraphPullback):
    """The graph from where it crosses a level's boundary to tensors further out."""

    can_share = False  # examples have gradients of their own

    def __init__(self, inner: Level, met: list[Crossing], wanted: Tensors, flags: Any) -> None:
        self.inner = inner
        self.level = inner.parent
        if isinstance(self.level, JvpLevel):
            raise _make_refusal(
                "vmap inside jvp",
                "a derivative is asked for",
                wanted,
                "The cotangents of all examples, with their tangents, cannot leave vmap at once.",
            )
        self.wanted = wanted
        self.flags = flags
        self.used: list[bool] = []
        self.axes = [c.axis for c in met]
        with functions_off(), torch.enable_grad():
            self.outputs = [
                lift(c.outside, self.level) if isinstance(c.outside, torch.Tensor) else c.outside
                for c in met
            ]

    def gradients_by_id(self, gradients: Tensors) -> dict[int, torch.Tensor]:
        """Return the gradients that exist, by the ids of the tensors that they belong to."""
        triples = zip(self.wanted, gradients, self.used, strict=True)
        return {id(x): g for x, g, used in triples if used}

    def _run_stacked(self, stacks: Tensors) -> Tensors:
        """Pull back (N, *O) to (N, *I); zeros for a wanted tensor that nothing leads to."""
        size, level = stacks[0].shape[0], self.level
        stacks = [
            self._place_cotangents(s, axis) for s, axis in zip(stacks, self.axes, strict=True)
        ]
        own = [x for x in self.wanted if level is None or not is_from_outside(x, level)]
        crossings = [] if level is None else _find_crossings(level, self.outputs, self.wanted)
        cots = iter(self._pull_back_to((*own, *(c.inside for c in crossings)), stacks))
        found = {id(x): g for x in own if (g := next(cots)) is not None}
        met = [(c, g) for c, g in zip(crossings, cots, strict=True) if g is not None]
        if met:
            further = [x for x in self.wanted if all(x is not y for y in own)]
            way = OuterPullback(level, [c for c, _ in met], further, self.flags)
            found.update(way.gradients_by_id(way.pull_back_stacked([g for _, g in met], level)))
        self.used = [id(x) in found for x in self.wanted]
        return [found.get(id(x), x.new_zeros(()).expand(size, *x.shape)) for x in self.wanted]

    def _place_cotangents(self, stack: torch.Tensor, axis: int | None) -> torch.Tensor:
        """Return (B * N, *S) as (B * N, .., B, ..), with zeros for all other examples along B."""
        if axis is None:
            return stack
        inner, dim = self.inner, axis + 2
        parts = stack.unflatten(0, (inner.size, -1)).movedim(0, -1)
        placed = torch.diag_embed(parts, dim1=0, dim2=dim)
        if inner.root is not inner:  # the examples that run, among all that were batched
            sizes = [*placed.shape]
            sizes[dim] = inner.root.size
            rows = copy_index_to(inner.examples.rows, placed.device)
            placed = placed.new_zeros(sizes).index_copy(dim, rows, placed)
        return placed.flatten(0, 1)

    def _pull_back_to(self, stops: tuple[End, ...], stacks: Tensors) -> list:
        retain_graph, create_graph = self.flags

        def pull(outputs: tuple, cots: tuple) -> Any:
            found = run_backward(
                outputs, cots, stops, retain_graph=retain_graph, create_graph=create_graph
            )
            return map(complete_gradient, found)  # examples may have diverged further out

        with torch.set_grad_enabled(create_graph):
            return self._pull_back_batched(pull, stacks)


def _find_crossings(level: Level, roots: Iterable[End], wanted: Tensors) -> list[Crossing]:
    """Find where the graphs of ``roots`` cross the level's boundary on a way to wanted tensors."""
    nodes = dict.fromkeys(iterate_nodes(roots, lambda n: isinstance(n, _BORDER)))
    shared = [
        Crossing(s, t, None)
        for t, s in level.lift_cache.values()
        if s.requires_grad and s.grad_fn in nodes and _leads_to(t, wanted)
    ]
    entered = [
        Crossing(GradientEdge(node, 0), GradientEdge(*node.next_functions[0]), node.axis)
        for node in nodes
        if isinstance(node, Unstack._backward_cls) and node.level is level.root and not node.worn
    ]
    entered = [c for c in entered if _leads_to(c.outside, wanted)]
    for crossing in entered:
        for node in iterate_nodes([crossing.outside]):
            if isinstance(node, Restack._backward_cls) and node.level.root is level.root:
                raise _make_refusal(
                    "vmap",
                    "a second derivative is asked for inside",
                    wanted,
                    "The first one left the mapped function on its way to a tensor from outside.",
                )
    return shared + entered


def _make_refusal(call: str, what: str, wanted: Tensors, why: str) -> NotImplementedError:
    rows = [("with respect to", format_short(x)) for x in wanted]
    return documented_error(NotImplementedError, "history-from-outside")(
        f"{call}: {what}, through the history of a tensor from before the call.\n"
        f"{format_columns(rows)}\n"
        f"{why}\n"
        "Compute inside the function what depends on that tensor."
    )


_BORDER = (Unstack._backward_cls, Broadcast._backward_cls)


def _continues_outside(end: End, wanted: Tensors) -> bool:
    """Return True if a graph continues from a crossing to a wanted tensor further out."""
    others = [x for x in wanted if x is not end]
    return len(others) == len(wanted) or _leads_to(end, others)


def _leads_to(end: End, wanted: Tensors) -> bool:
    """Return True if a graph leads to a wanted tensor, or its end is one."""
    if any(end is x for x in wanted):
        return True
    goals = {x.grad_fn for x in wanted if x.grad_fn is not None}
    leaves = {id(x) for x in wanted}
    return any(
        n in goals or id(getattr(n, "variable", None)) in leaves for n in iterate_nodes([end])
    )


def _backward_through_captured(tensors: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a backward pass that leaves the sum over the examples, as the loop over them does.

    This serves `torch.autograd.backward` and `Tensor.backward`.
    """
    level = find_sharing_level(top())
    if level is None:
        return NotImplemented
    with torch.enable_grad():
        roots = tuple(
            lift(t, level) if t.requires_grad and is_from_outside(t, level) else t
            for t in _tuple(tensors)
        )
    if "gradient" in kwargs:
        kwargs["grad_tensors"] = kwargs.pop("gradient")
    torch.autograd.backward(roots, *args, **kwargs)
    with functions_off():
        for node in iterate_nodes(roots):  # also outside, behind captured and mapped tensors
            leaf = getattr(node, "variable", None)
            if leaf is not None and is_from_outside(leaf, level):
                _unwrap_grad(leaf)
    return None


def _unwrap_grad(leaf: torch.Tensor) -> None:
    """Unwrap the gradient of a leaf outside: nodes there ran under the level, which wrapped it."""
    left = leaf.grad
    while type(left) is BatchedTensor and left.axis is None and is_from_outside(leaf, left.level):
        left = leaf.grad = left.value


def _tuple(tensors: Any) -> tuple:
    return (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)


def _with_grad_call(grad: Callable[[GradCall], Any]) -> Callable:
    return lambda *args, **kwargs: grad(GradCall(*args, **kwargs))


def install_autograd_calls() -> None:
    """Register the implementations of torch.autograd's functions under `vmap`."""
    for table, grad in ((CALLS, _grad_through_captured), (UNSHARED, _grad_outside)):
        table[torch.autograd.grad] = _with_grad_call(grad)
    CALLS[torch.Tensor.backward] = _backward_through_captured
    CALLS[torch.autograd.backward] = _backward_through_captured
