"""A Jacobian by rows or, if they are fewer, by columns: the double-backward trick."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from forall._api import argument_checks
from forall._api.jacobian_blocks import (
    JacobianBlocks,
    check_jacobian_inputs,
    compute_blocks,
    compute_rows,
)
from forall._api.vjp import GraphPullback, record_pullback
from forall._autodiff import reverse_mode
from forall._compat.autograd_graph import iterate_nodes
from forall._compat.dispatch_state import functions_off
from forall._compat.storage import is_out_of_memory
from forall._core.levels import may_carry_tangents, top

if TYPE_CHECKING:
    from collections.abc import Callable

    from forall._api.typing import Chunk
    from forall._core.errors import TransformCall


class HookDetector(TorchFunctionMode):
    """A function mode that notes whether a hook is registered: hooks may change a cotangent."""

    seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen = self.seen or func in _HOOKED
        return func(*args, **(kwargs or {}))


# No mode sees a node's own hooks being registered, but the read of `grad_fn` before that.
_HOOKED = {torch.Tensor.register_hook, torch.Tensor.grad_fn.__get__}


def compute_by_fewer(
    call: TransformCall,
    func: Callable,
    xs: list[torch.Tensor],
    has_aux: bool,
    chunk: Chunk,
    holomorphic: bool,
) -> JacobianBlocks:
    """Pull back every number of the outputs, or push forward those of the inputs if they are fewer.

    ``func`` has run by the time that its outputs can be counted. A pull-back is linear in the
    cotangents, so its own pull-back is the push-forward, which costs about twice as much.
    """
    hooks = HookDetector()

    def call_watching_hooks(*xs: torch.Tensor) -> Any:
        with hooks:
            return func(*xs)

    pull, _, aux = record_pullback(
        call, call_watching_hooks, tuple(check_jacobian_inputs(call, xs, holomorphic)), has_aux
    )
    argument_checks.check_real_or_complex(call, "outputs", pull.outputs, holomorphic)
    few = 2 * sum(x.numel() for x in xs) < sum(y.numel() for y in pull.outputs)
    pushes = few and not hooks.seen and _can_pull_back_twice(pull)
    found = _push_columns(call, pull, xs, chunk) if pushes else None
    return JacobianBlocks(found or compute_rows(pull, chunk, holomorphic), pull.out_spec, aux)


# The nodes of torch's own operators; the name of a Function's node has no number.
_TORCHS = re.compile(r".*Backward\d+|AccumulateGrad|CopySlices|CopyBackwards")


def _can_pull_back_twice(pull: GraphPullback) -> bool:
    """Return True if a graph can be pulled back twice, and no third pass is possible.

    The backward of a Function need not be differentiable. A third pass lacks terms in torch.
    """
    with functions_off():
        if may_carry_tangents() or any(x.grad_fn is not None for x in pull.own):
            return False
        if torch.is_grad_enabled() and reverse_mode.leads_outside(pull.outputs, pull.run):
            return False
        return all(_TORCHS.fullmatch(type(n).__name__) for n in iterate_nodes(pull.outputs))


def _push_columns(call: TransformCall, pull: GraphPullback, xs: list, chunk: Chunk) -> list | None:
    """Return ``[o][i]`` of shape (*O, *I), by columns; None where torch has no second backward."""
    cots = tuple(map(torch.zeros_like, pull.outputs))
    try:
        push, *_ = record_pullback(
            call, lambda *cots: tuple(pull.pull_back_at(top(), [*cots])), cots, False
        )
        columns = compute_blocks(push, chunk)  # [i][o], of shape (*I, *O)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        return None
    return [
        [_move_outputs_first(c[o], x.dim()) for c, x in zip(columns, xs, strict=True)]
        for o in range(len(cots))
    ]


def _move_outputs_first(block: torch.Tensor, n: int) -> torch.Tensor:
    """Return a block (*I, *O) as (*O, *I), with n dims in I."""
    with functions_off():
        return block.permute([*range(n, block.dim()), *range(n)]).detach().contiguous()
