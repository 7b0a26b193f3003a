"""Axis arithmetic: dims of one example as dims of the stack, and stacks laid out for an operator.

Shapes in comments: capitals are axes, ``B`` is the batch axis, ``*S`` an example's shape.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


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
        return [wrap_dim(dims, rank) + 1]
    return [wrap_dim(d, rank) + 1 for d in (dims or range(rank))]


def shift_past_axis(dim: int, axis: int) -> int:
    """Return a non-negative dim of one example as a dim of a stack whose batch axis is ``axis``."""
    return dim if dim < axis else dim + 1


def axis_after_removal(axis: int, removed: int) -> int:
    """Return the batch axis of a stack after its dim ``removed`` is gone."""
    return axis if removed > axis else axis - 1


def move_axis_to_front(v: Tensor, axis: int) -> Tensor:
    """(.., B, ..) -> (B, *S)."""
    return v.movedim(axis, 0) if axis else v


def pad_rank(v: Tensor, rank: int) -> Tensor:
    """(B, *S) -> (B, 1, .., *S): examples of at least ``rank`` dims, as in broadcasting."""
    missing = rank + 1 - v.dim()
    return v.reshape(v.shape[0], *(1,) * missing, *v.shape[1:]) if missing > 0 else v


def append_dims(v: Tensor, count: int) -> Tensor:
    """*S -> (*S, 1, ..): one entry for each block of ``count`` further dims."""
    return v.reshape(*v.shape, *(1,) * count)


def fold_axis(v: Tensor, dim: int) -> Tensor:
    """(B, *S) -> *S with B * S[dim] entries along ``dim``: the examples one after another."""
    return v.movedim(0, dim).flatten(dim, dim + 1)


def unfold_axis(v: Tensor, dim: int, size: int) -> Tensor:
    """Undo `fold_axis`: the examples along ``dim`` -> (B, *S)."""
    return v.unflatten(dim, (size, -1)).movedim(dim, 0)


def is_axis_inside(value: Tensor, axis: int) -> bool:
    """Return True if the batch axis lies within another dim, in memory."""
    strides, shape = value.stride(), value.shape
    step = strides[axis]
    around = [d for d, s in enumerate(strides) if s >= step and shape[d] > 1 and d != axis]
    return bool(around)
