"""Rules of sparse.mm with a reduction: an unbatched sparse matrix times a batched dense one."""

from __future__ import annotations

import torch

from forall._compat.documented_error import documented_error
from forall._core.axes import fold_axis
from forall._vmap.registry import SHARED, register_rows
from forall._vmap.rule_makers.basic import (
    expand_to_stack,
    is_mapped,
    lower_shared,
    wrap_results,
)

aten = torch.ops.aten
_IMPL = aten._sparse_mm_reduce_impl.default
_BACKWARD = aten._sparse_mm_reduce_impl_backward.default


def _fold_into_columns(x, level):
    """Fold the batch axis into the columns: (B, K, N) -> (K, B * N)."""
    return fold_axis(expand_to_stack(x, level), 1)


def _sparse_mm_reduce(level, func, args, kwargs):
    """Return (M, K) @ (K, B * N) as (M, B, N), and the indices of the extremes likewise.

    The kernel records these indices only if an argument requires grad. The example may require
    grad while its value does not, and without the indices the backward would read bad memory.
    """
    a, b, how = args
    mapped = is_mapped(b, level)
    b = (
        (_fold_into_columns(b, level) if mapped else lower_shared(b, level))
        .detach()
        .requires_grad_()
    )
    with torch.enable_grad():
        found = func(lower_shared(a, level), b, how)
    if not mapped:
        return wrap_results(found, None, level)
    return tuple(_unfold_columns(y, level) for y in found)


def _unfold_columns(columns, level):
    """Undo the fold of (M, B * N). The indices of extremes are empty for a sum."""
    if columns.dim() < 2:
        return wrap_results(columns, None, level)
    return wrap_results(columns.unflatten(1, (level.size, -1)), 1, level)


def _sparse_mm_reduce_backward(level, func, args, kwargs):
    """Return the gradient of the dense argument; a per-example sparse gradient is refused."""
    a, g, b, how, places, (sparse, dense) = args
    if sparse:
        raise documented_error(NotImplementedError, "sparse-layout")(
            "vmap: the gradient of each example with respect to a sparse matrix that all share.\n"
            "Take it of the values, or of a dense matrix: a.to_dense()."
        )
    given = [_fold_into_columns(x, level) for x in (g, b)]
    at = _fold_into_columns(places, level) if places.dim() == 2 else lower_shared(places, level)
    _, found = func(lower_shared(a, level), *given, how, at, [sparse, dense])
    return None, _unfold_columns(found, level)


register_rows({_IMPL: _sparse_mm_reduce, _BACKWARD: _sparse_mm_reduce_backward})
SHARED[_IMPL] = _sparse_mm_reduce
