"""Cotangents of whole Jacobians that stay diagonal: their product with a matrix is a scaling.

The cotangents of a Jacobian's rows are an identity matrix at first. A pointwise function multiplies
each entry by a slope, so they are a diagonal matrix behind it. Its entries are computed besides, by
the same operator on one vector, and the result is marked, see `symbolic_diagonal`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._compat.op_schema import LINEAR_IN_FIRST
from forall._compat.symbolic_diagonal import find_diagonal, mark_diagonal
from forall._vmap.batched_tensor import BatchedTensor
from forall._vmap.rule_makers.basic import is_mapped, lower_shared

if TYPE_CHECKING:
    from forall._compat.symbolic_diagonal import Diagonal

aten = torch.ops.aten
# Rows, and entries of each, from which a product of matrices takes longer than to know the slopes.
_ROWS, _LEAST = 16, 128
_KEEP_DIAGONAL = LINEAR_IN_FIRST | {
    aten.mul.Tensor,
    aten.mul.Scalar,
    aten.div.Scalar,
    aten.neg.default,
    aten.leaky_relu_backward.default,
    aten.hardsigmoid_backward.default,
    aten.hardswish_backward.default,
    aten.hardtanh_backward.default,
    aten.hardshrink_backward.default,
    aten.softshrink_backward.default,
}


def mark_diagonal_result(level: Any, func: Any, args: tuple, out: Any) -> None:
    """Mark the result of a pointwise operator if it makes diagonal cotangents of such."""
    size = level.size  # a symbolic one is not compared: that would add a guard
    if type(size) is not int or size < _ROWS or func not in _KEEP_DIAGONAL:
        return
    g, *rest = args
    known = _find_diagonal_rows(g, level)
    if known is None and func is aten.mul.Tensor:
        rest, g = [g], rest[0]
        known = _find_diagonal_rows(g, level)
    if known is None or any(is_mapped(a, level) for a in rest):
        return
    entries = known.entries
    if entries is None:
        entries = torch.ones(known.size, dtype=g.dtype, device=g.device)
    slopes = func(entries, *lower_shared(rest, level))
    same = slopes.shape == entries.shape and slopes.dtype == out.dtype
    if same and type(slopes) is torch.Tensor:
        mark_diagonal(out.value, known._replace(entries=slopes))


def _find_diagonal_rows(g: Any, level: Any) -> Diagonal | None:
    """Return the diagonal matrix of which the examples of ``g`` are the rows, or some of them."""
    if type(g) is not BatchedTensor or g.level is not level or g.axis is None:
        return None
    shape = g.value.shape
    if type(g.value) is not torch.Tensor or len(shape) != 2 or shape[1 - g.axis] < _LEAST:
        return None
    known = find_diagonal(g.value)
    is_by_row = known is not None and shape[1 - g.axis] == known.size
    return known if is_by_row and level.size == known.shape[0] else None
