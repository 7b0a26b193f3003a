"""Operators that torch.library.custom_op made, and the vmap rules that torch.library keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._library.custom_ops import OPDEFS, CustomOpDef

if TYPE_CHECKING:
    from collections.abc import Callable


class VmapInfo(NamedTuple):
    """What torch.library.register_vmap promises its rules as their first argument."""

    batch_size: int
    randomness: str


def overloads(op: Any) -> list | None:
    """The overloads that an extender means by ``op``; None if it is no operator."""
    if isinstance(op, CustomOpDef):
        return [op._opoverload]
    if isinstance(op, torch._ops.OpOverload):
        return [op]
    if isinstance(op, torch._ops.OpOverloadPacket):
        return [getattr(op, name) for name in op.overloads()]
    return None


def definition(func: Any) -> CustomOpDef | None:
    """The custom_op behind an overload, if there is one."""
    return OPDEFS.get(f"{func.namespace}::{func.overloadpacket.__name__}")


_TORCHS = frozenset({"aten", "prims", "prim", "quantized", "mkldnn"})


def vmap_rule(op: CustomOpDef) -> Callable | None:
    """What torch.library.register_vmap was given for this operator."""
    return op._vmap_fn
