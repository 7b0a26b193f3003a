"""A Jacobian by rows or, if they are fewer, by columns: the double-backward trick."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from forall._api import argument_checks
from forall._api.jacobian_blocks import (
    Blocks,
    blocks_of,
    moved,
    rows_of,
)
from forall._api.vjp import Pullback, pullback
from forall._autodiff import reverse_mode
from forall._compat.autograd_graph import nodes
from forall._compat.dispatch_state import functions_off
from forall._compat.storage import is_out_of_memory
from forall._core.levels import top
from forall._core.recompute import may_carry_tangents

if TYPE_CHECKING:
    from collections.abc import Callable

    from forall._api.typing import Chunk
    from forall._core.errors import Call


class Hooks(TorchFunctionMode):
    """A function mode that notes whether a hook is registered: hooks may change a cotangent."""

    seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen = self.seen or func in _HOOKED
        return func(*args, **(kwargs or {}))


# No mode sees a node's own hooks being registered, but the read of `grad_fn` before that.
_HOOKED = {torch.Tensor.register_hook, torch.Tensor.grad_fn.__get__}


def by_fewer(
    call: Call,
    func: Callable,
    xs: list[torch.Tensor],
    has_aux: bool,
    chunk: Chunk,
    holomorphic: bool,
) -> Blocks:
    """Pull back every number of the outputs, or push forward those of the inputs if they are fewer.

    ``func`` has run by the time that its outputs can be counted. A pull-back is linear in the
    cotangents, so its own pull-back is the push-forward, which costs about twice as much.
    """
    hooks = Hooks()

    def watched(*xs: torch.Tensor) -> Any:
        with hooks:
            return func(*xs)

    pull, _, aux = pullback(call, watched, tuple(moved(call, xs, holomorphic)), has_aux)
    argument_checks.real_or_complex(call, "outputs", pull.outputs, holomorphic)
    few = 2 * sum(x.numel() for x in xs) < sum(y.numel() for y in pull.outputs)
    pushes = few and not hooks.seen and _is_torchs(pull)
    found = _pushed(call, pull, xs, chunk) if pushes else None
    return Blocks(found or rows_of(pull, chunk, holomorphic), pull.out_spec, aux)


# The nodes of torch's own operators; the name of a Function's node has no number.
_TORCHS = re.compile(r".*Backward\d+|AccumulateGrad|CopySlices|CopyBackwards")


def _is_torchs(pull: Pullback) -> bool:
    """Return True if a graph can be pulled back twice, and no third pass is possible.

    The backward of a Function need not be differentiable. A third pass lacks terms in torch.
    """
    with functions_off():
        if may_carry_tangents() or any(x.grad_fn is not None for x in pull.own):
            return False
        if torch.is_grad_enabled() and reverse_mode.leads_outside(pull.outputs, pull.run):
            return False
        return all(_TORCHS.fullmatch(type(n).__name__) for n in nodes(pull.outputs))


def _pushed(call: Call, pull: Pullback, xs: list, chunk: Chunk) -> list | None:
    """Return ``[o][i]`` of shape (*O, *I), by columns; None where torch has no second backward."""
    cots = tuple(map(torch.zeros_like, pull.outputs))
    try:
        push, *_ = pullback(call, lambda *cots: tuple(pull.at(top(), [*cots])), cots, False)
        columns = blocks_of(push, chunk)  # [i][o], of shape (*I, *O)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        return None
    return [
        [_turned(c[o], x.dim()) for c, x in zip(columns, xs, strict=True)] for o in range(len(cots))
    ]


def _turned(block: torch.Tensor, n: int) -> torch.Tensor:
    """Return a block (*I, *O) as (*O, *I), with n dims in I."""
    with functions_off():
        return block.permute([*range(n, block.dim()), *range(n)]).detach().contiguous()
