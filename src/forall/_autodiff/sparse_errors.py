"""Errors for sparse tensors, which have no tangent in forward mode."""

from __future__ import annotations

from typing import Any

import torch

from forall._compat.documented_error import documented_error
from forall._core.errors import format_columns, format_short


def make_tangent_error(value: torch.Tensor) -> NotImplementedError:
    return documented_error(NotImplementedError, "sparse-layout")(
        "jvp: forward mode has no tangent of a sparse tensor.\n"
        f"{format_columns([('value', format_short(value))])}\n"
        "Use reverse mode (vjp, grad, jacrev), or make it sparse outside."
    )


def refuse_sparse_tangent(*args: Any, **_: Any) -> Any:
    """Refuse to put values with tangents into a sparse tensor."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    raise make_tangent_error(tensors[-1])
