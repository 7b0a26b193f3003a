"""The bookkeeping of modules that ranks share: DistributedDataParallel's and FSDP2's.

Before such a module runs, its parameters are gathered, or its buffers are sent to all ranks. This
is no part of the function that a user transforms. Levels that saw it would refuse its collectives
and its storage changes.

A backward pass is noticed at a module's results. Where a level has tangents, the pass may come by a
tangent alone. A node of the graph is therefore put at both, and no hook, which a tangent lacks.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

_FSDP = "torch.distributed.fsdp._fully_shard"
# The methods, by module and class. The user imports FSDP2, which takes long.
_left: dict[str, dict[str, tuple[str, ...]]] = {
    f"{_FSDP}._fsdp_param_group": {
        "FSDPParamGroup": (
            "unshard",
            "wait_for_unshard",
            "reshard",
            "post_backward",
            "finalize_backward",
        )
    },
    "torch.nn.parallel.distributed": {"DistributedDataParallel": ("_sync_buffers",)},
    "torch.distributed": {"Reducer": ("_rebuild_buckets",)},
}


def needs_patch() -> bool:
    """True if such a class has been imported, and still runs its bookkeeping under levels."""
    for name in _left:  # noqa: SIM110 - a generator takes longer, and this is asked with each level
        if name in sys.modules:
            return True
    return False


def patch(
    hidden: Callable[[], AbstractContextManager[None]], has_tangents: Callable[[Any], bool]
) -> None:
    """Run the bookkeeping of the classes imported so far within ``hidden()`` from now on.

    ``has_tangents`` tells of a tensor whether it is a value of a level with tangents.
    """
    for name in [name for name in _left if name in sys.modules]:
        for kind, methods in _left.pop(name, {}).items():
            owner = getattr(sys.modules[name], kind, None)  # None if torch was built without it
            for method in methods if owner is not None else ():
                setattr(owner, method, _hide(getattr(owner, method), hidden))
            if kind == "FSDPParamGroup":
                _put_nodes_at_results(has_tangents)
            elif kind == "DistributedDataParallel":
                sys.modules[name]._DDPSink.jvp = staticmethod(_push_through_sink)


def _hide(method: Callable[..., Any], hidden: Callable[[], AbstractContextManager[None]]) -> Any:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with hidden():
            return method(*args, **kwargs)

    return call


class _ResultNode(torch.autograd.Function):
    """The node at a result of a module, or at its tangent, that tells FSDP2 of a backward pass."""

    __module__ = f"{_FSDP}._fsdp_state"  # whose code runs in the backward pass
    generate_vmap_rule = True

    @staticmethod
    def forward(_state, result):
        return result

    @staticmethod
    def setup_context(ctx, inputs, _output):
        ctx.state, _ = inputs

    @staticmethod
    def backward(ctx, g):
        return None, ctx.state._pre_backward(g)

    @staticmethod
    def jvp(ctx, _state, t):
        return None if t is None else _ResultNode.apply(ctx.state, t)


def _put_nodes_at_results(has_tangents: Callable[[Any], bool]) -> None:
    """Put nodes at results with tangents, as torch does under its own transforms."""
    states = sys.modules[f"{_FSDP}._fsdp_state"]
    plain = states.FSDPState._register_pre_backward_hook

    @functools.wraps(plain)
    def register(self: Any, output: Any) -> Any:
        found: list[torch.Tensor] = []

        def put_node(t: torch.Tensor) -> Any:
            if not has_tangents(t) or not (t.is_floating_point() or t.is_complex()):
                return t
            found.append(t)
            return _ResultNode.apply(self, t)

        if not torch.is_grad_enabled():
            return output
        made = states._apply_to_tensors(put_node, output)
        return made if found else plain(self, output)

    states.FSDPState._register_pre_backward_hook = register


def _push_through_sink(ctx: Any, _module: None, *tangents: torch.Tensor | None) -> Any:
    """Return the tangents through the node that DistributedDataParallel puts at its results."""
    return ctx._forward_cls.apply(ctx.ddp_weakref, *tangents)
