"""What tells one kind of call from another: a program serves one kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._core.levels import top
from forall._programs.statics import Static
from forall._torch import handover
from forall._torch.dispatch import (
    autocast_state,
    dispatch_modes,
    function_modes,
    is_autocast,
    users_tangents,
)
from forall._torch.names import PLAIN

if TYPE_CHECKING:
    from collections.abc import Iterable


class Unfit(Exception):  # noqa: N818 - no error: the call runs as it is
    """An argument that no program can be made for; its text says why."""


def of_leaf(x: Any) -> Any:
    """What a program knows of an argument: all of it, but for the numbers of a tensor."""
    if type(x) in PLAIN:
        if x.layout is not torch.strided or x.is_quantized:
            raise Unfit(f"an argument of layout {x.layout}")
        return (
            x.shape,
            x.stride(),
            x.dtype,
            x.device,
            x.requires_grad,
            x.storage_offset(),
            x.is_conj(),
            x.is_neg(),
        )
    if isinstance(x, torch.Tensor):
        raise Unfit(f"an argument of class {type(x).__name__}")
    if isinstance(x, (float, complex)):  # 0.0 == -0.0, and nan is not nan
        return type(x), repr(x)
    if isinstance(x, (int, str, bytes, type(None), torch.dtype, torch.device)):
        return type(x), x
    if type(x) is Static:
        return x.key
    return type(x), id(x)  # guarded, and held, by the program's guards


def is_free() -> bool:
    """Whether a call stands alone: no part of what records it, or of what takes it apart."""
    return not (
        top() is not None
        or dispatch_modes()
        or function_modes()
        or users_tangents()
        or handover.needed()
    )


def ambient() -> tuple:
    """The state of torch that what an operator does depends on."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        autocast_state() if is_autocast() else None,
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
    )


def shared(leaves: Iterable[Any]) -> tuple:
    """Which arguments are the same tensor, or share memory."""
    seen: dict[int, int] = {}
    return tuple(
        seen.setdefault(x.untyped_storage()._cdata, i)
        for i, x in enumerate(leaves)
        if isinstance(x, torch.Tensor)
    )
