"""Rules of sparse.mm with a reduction: an unbatched sparse matrix times a batched dense one."""

from __future__ import annotations

import torch

from forall._vmap.registry import SHARED, register
from forall._vmap.rule_makers.basic import (
    is_mapped,
    lower,
    stacked,
    wrapped,
)

aten = torch.ops.aten
_IMPL = aten._sparse_mm_reduce_impl.default
_BACKWARD = aten._sparse_mm_reduce_impl_backward.default


def _columns(x, level):
    """Fold the batch axis into the columns: (B, K, N) -> (K, B * N)."""
    return stacked(x, level).movedim(0, 1).flatten(1)


def _product(level, func, args, kwargs):
    """Return (M, K) @ (K, B * N) as (M, B, N), and the indices of the extremes likewise.

    The kernel records these indices only if an argument requires grad. The example may require
    grad while its value does not, and without the indices the backward would read bad memory.
    """
    a, b, how = args
    mapped = is_mapped(b, level)
    b = (_columns(b, level) if mapped else lower(b, level)).detach().requires_grad_()
    with torch.enable_grad():
        found = func(lower(a, level), b, how)
    if not mapped:
        return wrapped(found, None, level)
    return tuple(_examples(y, level) for y in found)


def _examples(columns, level):
    """Undo the fold of (M, B * N). The indices of extremes are empty for a sum."""
    if columns.dim() < 2:
        return wrapped(columns, None, level)
    return wrapped(columns.unflatten(1, (level.size, -1)), 1, level)


def _pulled(level, func, args, kwargs):
    """Return the gradient of the dense argument; a per-example sparse gradient is refused."""
    a, g, b, how, places, (sparse, dense) = args
    if sparse:
        raise NotImplementedError(
            "vmap: the gradient of each example with respect to a sparse matrix that all share.\n"
            "Take it of the values, or of a dense matrix: a.to_dense()."
        )
    given = [_columns(x, level) for x in (g, b)]
    at = _columns(places, level) if places.dim() == 2 else lower(places, level)
    _, found = func(lower(a, level), *given, how, at, [sparse, dense])
    return None, _examples(found, level)


register({_IMPL: _product, _BACKWARD: _pulled})
SHARED[_IMPL] = _product
