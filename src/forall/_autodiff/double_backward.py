"""Hooks for double backward through nodes whose backward torch does not differentiate rightly.

The gradients stay the kernel's. Torch's history for them says that there is no derivative. A hook
on the node replaces that history by a decomposed pull-back, computed if it is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._autodiff import reverse_mode
from forall._autodiff.decompositions.graph_nodes import NODES
from forall._autodiff.once_differentiable import OnceDifferentiableHook, is_once_differentiable_node
from forall._autodiff.phase_errors import PHASES, PhaseCheckHook, may_have_phases
from forall._compat.autograd_graph import iterate_nodes
from forall._compat.dispatch_state import apply_own_function, functions_off, has_users_tangents
from forall._core.levels import graph_free, has_any_tangent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class hook_backward_nodes:
    """Keep hooks on the graph's nodes while a backward pass runs.

    With ``create_graph``, nodes in `NODES` get a derivative, and those marked
    @once_differentiable an error. In any pass, eigendecompositions get the check of phases.
    """

    __slots__ = ("handles",)

    def __init__(self, outputs: Iterable[torch.Tensor], create_graph: bool) -> None:
        self.handles = []
        asks = may_have_phases()
        if not create_graph and not asks:
            return
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
            own = [reverse_mode.make_variable(given[i]) for i in asked]
            for i, x in zip(asked, own, strict=True):
                given[i] = x
            pulled = ctx.pull(*given)
            found = reverse_mode.compute_gradients(
                tuple(pulled[i] for i in ctx.wanted), cotangents, own, create_graph=again
            )
        out: list[Any] = [None] * (len(ctx.needs_input_grad))
        for i, g in zip(asked, found, strict=True):
            out[2 + k + i] = g
        return tuple(out)
