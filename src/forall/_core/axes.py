"""Axis arithmetic: dims of one example as dims of the stack. Pure integers, without tensors.

Shapes in comments: capitals are axes, ``B`` is the batch axis, ``*S`` an example's shape.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def wrap_dim(dim: int, rank: int) -> int:
    """Return a dim of an example as a non-negative number. Rank 0 accepts 0 and -1."""
    span = max(rank, 1)
    if not -span <= dim < span:
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-span}, {span - 1}], "
            f"but got {dim})"
        )
    return dim % span


def stacked_dim(dim: int, rank: int) -> int:
    """Return a dim of one example as a dim of the batch-first stack."""
    return wrap_dim(dim, rank) + 1


def stacked_dims(dims: int | Sequence[int] | None, rank: int) -> list[int]:
    """Return dims of one example as dims of the batch-first stack; None and () mean every dim."""
    if isinstance(dims, int):
        dims = [dims]
    return [wrap_dim(d, rank) + 1 for d in (dims or range(rank))]


def shift_past_axis(dim: int, axis: int) -> int:
    """Return a non-negative dim of one example as a dim of a stack whose batch axis is ``axis``."""
    return dim if dim < axis else dim + 1


def axis_after_removal(axis: int, removed: int) -> int:
    """Return the batch axis of a stack after its dim ``removed`` is gone."""
    return axis if removed > axis else axis - 1
