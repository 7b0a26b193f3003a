"""Operators that torch.library.custom_op defined, and the vmap rules that torch.library keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._library.custom_ops import OPDEFS, CustomOpDef

if TYPE_CHECKING:
    from collections.abc import Callable


class OpVmapInfo(NamedTuple):
    """The first argument of rules that torch.library.register_vmap registers."""

    batch_size: int
    randomness: str


def find_overloads(op: Any) -> list | None:
    """Return the overloads of an operator; None if ``op`` is no operator."""
    if isinstance(op, CustomOpDef):
        return [op._opoverload]
    if isinstance(op, torch._ops.OpOverload):
        return [op]
    if isinstance(op, torch._ops.OpOverloadPacket):
        return [getattr(op, name) for name in op.overloads()]
    return None


def find_custom_op(func: Any) -> CustomOpDef | None:
    """Return the custom_op of an overload, if there is one."""
    return OPDEFS.get(f"{func.namespace}::{func.overloadpacket.__name__}")


_TORCHS = frozenset({"aten", "prims", "prim", "quantized", "mkldnn"})


def get_vmap_rule(op: CustomOpDef) -> Callable | None:
    """Return the rule that torch.library.register_vmap registered for this operator."""
    return op._vmap_fn
