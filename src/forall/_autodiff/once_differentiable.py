"""Functions whose backward is marked @once_differentiable: a second derivative is an error.

Torch raises only if a backward pass reaches its error node, which has no inputs. A pass with
``inputs=``, as all passes here are, does not reach that node, and a term would silently be missing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import BackwardCFunction, once_differentiable

from forall._compat.dispatch_state import apply_own_function, functions_off
from forall._compat.documented_error import documented_error
from forall._core.levels import find_innermost_of, graph_free, lift

# Torch's own function whose gradients are computed with the value, and so have no history.
_CHUNKED_LOSS = "GeneratedBackwardFor_torch_nn__linear_cross_entropy"
_CODE = once_differentiable(lambda: None).__code__  # the code of every function so marked


def is_once_differentiable(function: type) -> bool:
    """True if this Function has a backward that cannot be differentiated."""
    marked = getattr(getattr(function, "backward", None), "__code__", None) is _CODE
    return marked or function.__name__.startswith(_CHUNKED_LOSS)


def is_once_differentiable_node(node: Any) -> bool:
    return isinstance(node, BackwardCFunction) and is_once_differentiable(node._forward_cls)  # pyright: ignore[reportAttributeAccessIssue]


def link_inputs(args: tuple, out: Any) -> None:
    """Link the node of ``out`` to the graphs of ``args``, without keeping their numbers alive."""
    with functions_off():
        given = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
        outs = out if isinstance(out, tuple) else (out,)
        node = next((o.grad_fn for o in outs if isinstance(o, torch.Tensor) and o.grad_fn), None)
        if given and is_once_differentiable_node(node):
            node.came_from = apply_own_function(_InputLink, *given)  # pyright: ignore[reportOptionalMemberAccess]


class OnceDifferentiableHook:
    """A hook on such a node that connects its gradients to an error node with inputs.

    The inputs are all tensors that the gradients were computed from.
    """

    __slots__ = ("node",)

    def __init__(self, node: Any) -> None:
        self.node = node

    def __call__(self, found: tuple, cotangents: tuple) -> tuple | None:
        if not torch.is_grad_enabled():
            return None
        ways = [c for c in cotangents if c is not None]
        if (way := getattr(self.node, "came_from", None)) is not None:
            ways.append(way)
        level = find_innermost_of(
            tuple(ways)
        )  # the gradients' level, even if numpy has computed them
        numbers = [lift(graph_free(t), level) for t in found if t is not None]
        new = iter(apply_own_function(_ErrorNode, self.node.name(), len(numbers), *numbers, *ways))
        return tuple(None if t is None else next(new) for t in found)


def _raise_error(name: str) -> Any:
    if name.startswith(_CHUNKED_LOSS):
        raise documented_error(RuntimeError, "no-second-derivative")(
            "linear_cross_entropy(.., options=..): trying to differentiate twice a loss whose "
            "gradients are found with its value, in chunks.\n"
            "Leave out options, for all at once."
        )
    raise documented_error(RuntimeError, "no-second-derivative")(
        f"{name}: trying to differentiate twice a function that was marked with "
        "@once_differentiable.\n"
        "Forward mode (jvp, jacfwd, hessian) differentiates the backward of a Function as well.\n"
        "Take the mark off where the backward is made of operators of torch, or write it as a "
        "Function that has a backward too."
    )


class _InputLink(torch.autograd.Function):
    """A node with an empty result, whose graph leads to each argument."""

    @staticmethod
    def forward(ctx, *args):
        return args[0].new_empty(0)

    @staticmethod
    def backward(ctx, g):
        return _raise_error("backward")


class _ErrorNode(torch.autograd.Function):
    """A node that returns the gradients and whose backward raises."""

    @staticmethod
    def forward(ctx, name, n, *rest):
        ctx.name = name
        return tuple(map(graph_free, rest[:n]))

    @staticmethod
    def backward(ctx, *_):
        return _raise_error(ctx.name)
