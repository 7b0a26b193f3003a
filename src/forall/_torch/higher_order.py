"""Torch's control-flow operators, told of our transforms."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch._higher_order_ops

from forall._torch import handover

if TYPE_CHECKING:
    from collections.abc import Callable

_redirected: set[str] = set()


def redirect(ours: Callable) -> None:
    """Let torch's operator of the same name be ``ours`` inside our transforms, once."""
    name = ours.__name__
    if name in _redirected:
        return
    _redirected.add(name)
    torchs = getattr(torch._higher_order_ops, name)

    @functools.wraps(torchs)
    def either(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or not handover.runs_eagerly():
            return torchs(*args, **kwargs)
        return ours(*args, **kwargs)

    own = sys.modules[f"torch._higher_order_ops.{name}"]  # which the function of this name hides
    for module in (own, torch._higher_order_ops, torch):
        if getattr(module, name, None) is torchs:
            setattr(module, name, either)
