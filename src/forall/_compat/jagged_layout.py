"""Nested tensors of the jagged layout: the rows in one tensor, and the offset of each component.

torch implements operators on them in Python, by operators on the rows. If the rows are a value of a
level, that implementation runs first, and the level sees its operators on the rows.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch.nested._internal.nested_tensor import NestedTensor as Jagged

from forall._compat.dispatch_state import no_dispatch

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "Jagged",
    "split_components",
    "get_raw_rows",
    "find_jagged_dim",
    "replace_raw_rows",
    "replace_rows",
]


def get_raw_rows(nested: torch.Tensor) -> torch.Tensor:
    """Return the rows as they are, without the history of the nested tensor."""
    whole: Any = nested
    return whole._values


def replace_rows(nested: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return the same components with other rows, which torch combines with the offsets."""
    return torch.nested.nested_tensor_from_jagged(
        rows, nested.offsets(), nested.lengths(), jagged_dim=find_jagged_dim(nested) + 1
    )


def find_jagged_dim(nested: torch.Tensor) -> int:
    """Return the dim of a component in which sizes differ: its size in the shape is symbolic."""
    (dim,) = (d for d, n in enumerate(nested.shape) if not isinstance(n, int))
    return dim - 1


def split_components(nested: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the components as views with derivatives of any order; those of unbind have one."""
    rows, starts, dim = nested.values(), _numbers(nested.offsets()), find_jagged_dim(nested)
    if nested.lengths() is None:
        return rows.split([b - a for a, b in pairwise(starts)], dim)
    pairs = zip(starts[:-1], _numbers(nested.lengths()), strict=True)
    return [rows.narrow(dim, start, n) for start, n in pairs]


def _numbers(places: torch.Tensor) -> list[int]:
    """Return offsets as ints; a level would take the copy on the host for a value of its own."""
    with no_dispatch():
        return places.tolist()


def replace_raw_rows(nested: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return the same components with other rows, for code below autograd."""
    whole: Any = nested
    names, kept = whole.__tensor_flatten__()
    parts = {name: getattr(whole, name) for name in names} | {"_values": rows}
    return Jagged.__tensor_unflatten__(parts, kept, whole.shape, whole.stride())
