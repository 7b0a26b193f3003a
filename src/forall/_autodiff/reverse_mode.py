"""Reverse mode: fresh variables, a backward pass, and results detached from the inner graph.

Hooks on the graph's nodes make its second derivatives right where torch's are not.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Self
from weakref import ref

import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from forall._autodiff.node_formulas import NODES
from forall._autodiff.once_differentiable import OnceDifferentiableHook, is_once_differentiable_node
from forall._autodiff.phase_errors import (
    DECOMPOSITIONS,
    PHASES,
    PhaseCheckHook,
    may_have_phases,
)
from forall._compat import inference_mode, pytree
from forall._compat.autograd_graph import WRITTEN, iterate_nodes
from forall._compat.dispatch_state import (
    ACCUMULATE,
    MIRRORED,
    apply_own_function,
    functions_off,
    get_users_tangent,
    has_users_tangents,
    in_torch_func,
    is_forward_enabled,
    run_backward,
    set_forward_enabled,
    set_grad_enabled,
)
from forall._compat.op_schema import met as operators_met
from forall._compat.private_api import SET_HOOKS, pop_functions, push_functions
from forall._compat.tensor_subclass import (
    can_be_posed,
    convert_to_class,
    posing,
    restore_users_class,
    unwrap_posed,
)
from forall._compat.wrapper_tensor import Wrapper
from forall._core.levels import (
    complete_gradient,
    graph_free,
    has_any_tangent,
    lift,
    may_carry_tangents,
    stack,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class VariableScope:
    """A context that collects the variables made in it, which are not differentiated afterwards.

    A graph that leads to nothing but these variables is of no use after the context has ended.
    """

    __slots__ = ("around", "made")

    def __enter__(self) -> Self:
        self.made: dict[int, ref[torch.Tensor]] = {}
        self.around: VariableScope | None = stack.run
        stack.run = self
        return self

    def __exit__(self, *_: object) -> None:
        around, self.around = self.around, None
        stack.run = around
        if around is not None:
            around.include(self)

    def include(self, other: VariableScope) -> None:
        """Add the variables of another run, which has ended, to those of this one."""
        self.made.update(other.made)

    def has(self, leaf: torch.Tensor) -> bool:
        """True if a leaf is a variable of this run, or of one within it."""
        known = self.made.get(id(leaf))
        return known is not None and known() is leaf


class record_autograd(VariableScope):
    """Like `torch.enable_grad`, but hidden from function modes, and outside of inference mode.

    In inference mode autograd records nothing, whatever the grad mode is.
    """

    __slots__ = ("left", "was")

    def __enter__(self) -> Self:
        super().__enter__()
        stack.reversing += 1
        is_inference = torch.is_inference_mode_enabled()
        self.left = inference_mode.leave_inference_mode() if is_inference else None
        self.was = torch.is_grad_enabled()
        if not self.was:
            self._set(True)
        return self

    def __exit__(self, *_: object) -> None:
        stack.reversing -= 1
        if torch.is_grad_enabled() is not self.was:
            self._set(self.was)
        if self.left is not None:
            inference_mode.reenter_inference_mode(self.left)
        super().__exit__()

    def _set(self, on: bool) -> None:
        with functions_off():
            set_grad_enabled(on)


def make_variable(x: torch.Tensor) -> torch.Tensor:
    """Return a fresh differentiable alias of ``x``, made at the innermost level.

    If it were made further out, a level in between would take it for a captured tensor, and sum its
    derivative over the examples.
    """
    with functions_off():
        x = lift(unwrap_posed(x) if posing.used else x, stack.top)
        if x.is_inference():
            x = x.clone()
        kind = type(x)
        is_plain = kind is torch.Tensor or isinstance(x, Wrapper)
        keeps_class = not is_plain and can_be_posed(kind)
        if x.requires_grad:
            return convert_to_class(x.view_as(x), kind) if keeps_class else x.view_as(x)
        return make_leaf(convert_to_class(_make_alias(x), kind) if keeps_class else _make_alias(x))


def make_leaf(x: torch.Tensor) -> torch.Tensor:
    """Make a tensor without history a variable of the current run, and return it."""
    x.requires_grad_()
    if stack.run is not None:
        stack.run.made[id(x)] = ref(x)
    return x


def restore_classes(variables: list, given: list) -> list:
    """Give fresh variables the classes and attributes of the tensors that the user passed."""
    for x in given:
        if type(x) is not torch.Tensor or x.__dict__:
            return [restore_users_class(v, x) for v, x in zip(variables, given, strict=True)]
    return variables


def _make_alias(x: torch.Tensor) -> torch.Tensor:
    """Return an alias without history, but with the tangent of the user's own forward mode."""
    fresh = graph_free(x)
    tangent = get_users_tangent(x) if forward_ad._current_level >= 0 else None
    if fresh is x:
        fresh = x.detach()
    elif not isinstance(x, Wrapper):
        return fresh
    return fresh if tangent is None else forward_ad.make_dual(fresh, tangent)


def leads_outside(
    tensors: Iterable[torch.Tensor], run: VariableScope, *, or_to_custom: bool = False
) -> bool:
    """True if the graphs of ``tensors`` reach a leaf other than a variable of ``run``.

    With ``or_to_custom`` also if they reach a custom Function's node, but for forall's own that do
    the same in any grad mode.
    """
    todo: list[Any] = []
    for t in tensors:
        node = t.grad_fn
        if node is not None:
            todo.append(node)
        elif t.requires_grad and not run.has(t):
            return True
    seen = {None, *todo}
    while todo:  # as `iterate_nodes`, which takes longer: this walk is a part of each gradient
        node = todo.pop()
        kind = type(node)
        if kind is ACCUMULATE:
            if not run.has(node.variable):
                return True
        elif kind is MIRRORED or (
            or_to_custom and isinstance(node, WRITTEN) and _may_read_grad_mode(node)
        ):
            return True
        for following, _ in node.next_functions:
            if following not in seen:
                seen.add(following)
                todo.append(following)
    return False


def _may_read_grad_mode(node: Any) -> bool:
    """True for a custom Function's node, but for forall's own that do the same in any grad mode."""
    return not getattr(node._forward_cls, "does_the_same", False)


def _is_outside(node: Any, run: VariableScope) -> bool:
    """True for a leaf of a graph that is no variable of ``run``."""
    if type(node) is ACCUMULATE:
        return not run.has(node.variable)
    return type(node) is MIRRORED


def select_enclosed(tensors: list[torch.Tensor], run: VariableScope) -> list[torch.Tensor]:
    """Return the ones of ``tensors``, which require grad, whose graphs do not lead outside."""
    if len(tensors) == 1:
        return [] if leads_outside(tensors, run) else tensors
    before: dict[Any, list] = {}  # the nodes that lead to each node
    outside = []
    for n in iterate_nodes(tensors):
        if _is_outside(n, run):
            outside.append(n)
        for following, _ in n.next_functions:
            if following is not None:
                before.setdefault(following, []).append(n)
    reaching = {*outside}
    while outside:
        for n in before.get(outside.pop(), ()):
            if n not in reaching:
                reaching.add(n)
                outside.append(n)
    return [t for t in tensors if (run.has(t) if t.grad_fn is None else t.grad_fn not in reaching)]


def can_skip_graph(outputs: tuple[torch.Tensor, ...], run: VariableScope) -> bool:
    """True if a backward pass need not record, as nothing outside can differentiate its results.

    Tangents would be lost in a pass that does not record, and a custom Function's backward may
    check the grad mode.
    """
    if in_torch_func() or may_carry_tangents():
        return False
    with functions_off():
        return not leads_outside(outputs, run, or_to_custom=True)


def make_variables(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return fresh variables for floating-point and complex tensors."""
    return [*map(make_variable, tensors)]


def compute_gradients(
    outputs: tuple[torch.Tensor, ...],
    cotangents: tuple[Any, ...] | None,
    inputs: list[torch.Tensor],
    *,
    retain_graph: bool = True,
    create_graph: bool = True,
    closes: VariableScope | None = None,
) -> list[torch.Tensor]:
    """Pull cotangents back to the inputs; return zeros for an input on which nothing depends.

    ``closes`` is the run of the call that the pass belongs to, if its results will be detached from
    that run's graph.
    """
    if cotangents is None:
        cotangents = (*map(make_ones, outputs),)
    found: list[Any]
    if closes is not None and create_graph and retain_graph and can_skip_graph(outputs, closes):
        try:
            with _HookCheckMode(closes):
                found = pull_back(outputs, cotangents, inputs, create_graph=False)
        except _HistoryUsed:
            found = pull_back(outputs, cotangents, inputs)
    else:
        how = {"retain_graph": retain_graph, "create_graph": create_graph}
        found = pull_back(outputs, cotangents, inputs, **how)
    for i, g in enumerate(found):
        if g is None:
            found[i] = torch.zeros_like(inputs[i])
    return found


class _HistoryUsed(BaseException):
    """The signal of a pass that does not record and uses a tensor with outer autograd history."""


class _HookCheckMode(TorchFunctionMode):
    """A function mode that checks what hooks use in a pass that does not record.

    The graph does not contain the tensors that a hook captures.
    """

    def __init__(self, run: VariableScope) -> None:
        self.run = run

    def __enter__(self) -> None:
        push_functions(self)

    def __exit__(self, *_: object) -> None:
        pop_functions()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if not torch.is_grad_enabled() and func not in _NO_HISTORY:
            with functions_off():
                given = [
                    t for t in pytree.get_leaves((args, kwargs)) if isinstance(t, torch.Tensor)
                ]
                if leads_outside([t for t in given if t.requires_grad], self.run):
                    raise _HistoryUsed
        return func(*args, **(kwargs or {}))


# Calls whose results have no history. The last is not made by a hook: torch makes it while it
# regenerates the history of a view, and holds the view's lock, so that reading that history here
# would deadlock.
_NO_HISTORY = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("requires_grad", "grad_fn", "shape", "grad", "is_leaf", "dtype", "device", "ndim")
) | {torch.Tensor.detach, torch.Tensor.size, torch.Tensor.dim, SET_HOOKS}


def make_ones(y: torch.Tensor) -> torch.Tensor:
    """Return ``ones_like(y)``, by the shortest way: it depends on y's metadata alone."""
    if isinstance(y, Wrapper) and y.level is stack.top:
        with functions_off():
            return y.level.apply_to_inner([y], torch.ones_like)
    return torch.ones_like(y)


def pull_back(
    outputs: tuple[torch.Tensor, ...],
    cotangents: tuple[Any, ...],
    inputs: list[torch.Tensor],
    *,
    retain_graph: bool = True,
    create_graph: bool = True,
) -> list[torch.Tensor | None]:
    """Pull cotangents back to the inputs; return None for an input on which nothing depends."""
    found = pull_back_incomplete(
        outputs, cotangents, inputs, retain_graph=retain_graph, create_graph=create_graph
    )
    return [*map(complete_gradient, found)] if stack.ever_parted else [*found]


def pull_back_incomplete(
    outputs: tuple[torch.Tensor, ...],
    cotangents: tuple[Any, ...],
    inputs: list[torch.Tensor],
    *,
    retain_graph: bool,
    create_graph: bool,
) -> tuple[torch.Tensor | None, ...]:
    """Run autograd's backward pass and return its gradients as they are.

    If examples have diverged, a gradient may be one of some examples only.
    """
    with functions_off():
        ys, given = [], []
        for y, c in zip(outputs, cotangents, strict=True):
            if y.requires_grad:
                ys.append(y)
                given.append(c)
        if not ys or not inputs:
            return (None,) * len(inputs)
        has_hooks = create_graph or not DECOMPOSITIONS.isdisjoint(operators_met)
        hooks = hook_backward_nodes(ys, create_graph) if has_hooks else nullcontext()
    ends = tuple(ys), tuple(given), tuple(inputs)
    with hooks:
        return run_backward(*ends, retain_graph=retain_graph, create_graph=create_graph)


class hide_ended_tangents:
    """Hide tangents that a jvp which has ended left on saved tensors.

    Tangents of a running jvp are one level further down, and the user's own stay visible.
    """

    __slots__ = ("was",)

    def __enter__(self) -> None:
        self.was = is_forward_enabled()
        if forward_ad._current_level < 0 or not has_users_tangents():
            set_forward_enabled(False)

    def __exit__(self, *_: object) -> None:
        set_forward_enabled(self.was)


def detach_from_run(results: Any, run: VariableScope, outer_grad: bool) -> Any:
    """Detach results from the graph of ``run``, unless their graph leads outside of it."""
    if not outer_grad:
        cut = _make_alias if has_users_tangents() else torch.Tensor.detach
        return pytree.map_tensors(lambda t: restore_users_class(_cut_history(cut, t), t), results)
    if not run.made:  # each variable is a view of one from outside
        return results
    with functions_off():
        recorded: list[tuple[Any, torch.Tensor]] = []
        is_leaf = type(results) is torch.Tensor or isinstance(results, Wrapper)
        for t in (results,) if is_leaf else pytree.get_leaves(results):
            bare = unwrap_posed(t) if posing.used else t
            if isinstance(t, torch.Tensor) and bare.requires_grad:
                recorded.append((t, bare))
        if not recorded:
            return results
        enclosed = {*map(id, select_enclosed([bare for _, bare in recorded], run))}
        freed = {id(t) for t, bare in recorded if id(bare) in enclosed}
        return pytree.map_tensors(
            lambda t: restore_users_class(_make_alias(unwrap_posed(t)), t) if id(t) in freed else t,
            results,
        )


def _cut_history(cut: Any, t: torch.Tensor) -> torch.Tensor:
    with functions_off():
        return cut(unwrap_posed(t))


# --- double backward through nodes whose backward torch does not differentiate rightly ------------
#
# The gradients stay the kernel's. Torch's history for them says that there is no derivative. A hook
# on the node replaces that history by a decomposed pull-back, computed if it is needed.


class hook_backward_nodes:
    """Keep hooks on the graph's nodes while a backward pass runs.

    With ``create_graph``, nodes in `NODES` get a derivative, and those marked
    @once_differentiable an error. In any pass, eigendecompositions get the check of phases.
    """

    __slots__ = ("handles",)

    def __init__(self, outputs: Iterable[torch.Tensor], create_graph: bool) -> None:
        self.handles = []
        asks = may_have_phases()
        for node in iterate_nodes(outputs):
            name = type(node).__name__
            if asks and name in PHASES:
                self.handles.append(node.register_prehook(PhaseCheckHook(node)))
            if not create_graph:
                continue
            if name in NODES:
                self.handles.append(node.register_hook(_DerivativeHook(node)))
            elif is_once_differentiable_node(node):
                self.handles.append(node.register_hook(OnceDifferentiableHook(node)))

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()


class _DerivativeHook:
    __slots__ = ("node",)

    def __init__(self, node: Any) -> None:
        self.node = node

    def __call__(self, found: tuple, cotangents: tuple) -> tuple | None:
        there = [t for t in found if t is not None]
        formula = NODES[type(self.node).__name__]
        whole = formula.lacks_tangents and (
            has_users_tangents() or any(map(has_any_tangent, there))
        )
        if not whole and not (formula.lacks_history and any(t.requires_grad for t in there)):
            return None
        pull, tensors = formula.steps(self.node)
        wanted = [i for i, t in enumerate(found) if t is not None]
        cotangents = cotangents[: formula.cotangents]
        if whole:
            with torch.enable_grad(), functions_off():
                pulled = pull(*cotangents, *tensors)
            new = tuple(pulled[i] for i in wanted)
        else:
            numbers = [graph_free(t) for t in there]
            new = apply_own_function(_DoubleBackward, pull, wanted, *numbers, *cotangents, *tensors)
        out = list(found)
        for i, t in zip(wanted, new, strict=True):
            out[i] = t
        return tuple(out)


class _DoubleBackward(torch.autograd.Function):
    """A node that returns a kernel's gradients, and whose backward is that of ``pull``."""

    @staticmethod
    def forward(ctx, pull: Callable, wanted: list[int], *rest):
        ctx.pull, ctx.wanted = pull, wanted
        ctx.save_for_backward(*rest[len(wanted) :])
        return tuple(map(graph_free, rest[: len(wanted)]))

    @staticmethod
    def backward(ctx, *cotangents):
        k = len(ctx.wanted)
        asked = [i for i, need in enumerate(ctx.needs_input_grad[2 + k :]) if need]
        again = torch.is_grad_enabled()
        with torch.enable_grad(), functions_off():
            given = list(ctx.saved_tensors)
            own = [make_variable(given[i]) for i in asked]
            for i, x in zip(asked, own, strict=True):
                given[i] = x
            pulled = ctx.pull(*given)
            found = compute_gradients(
                tuple(pulled[i] for i in ctx.wanted), cotangents, own, create_graph=again
            )
        out: list[Any] = [None] * (len(ctx.needs_input_grad))
        for i, g in zip(asked, found, strict=True):
            out[2 + k + i] = g
        return tuple(out)
