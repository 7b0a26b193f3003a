"""Sparse tensors, which no wrapper can hold: unbatched ones are passed on as they are."""

from __future__ import annotations

from typing import Any

import torch

from forall._compat.dispatch_state import below_autograd, no_dispatch
from forall._compat.wrapper_tensor import Wrapper
from forall._core.levels import alias_for_autograd

COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_LAYOUTS = frozenset({*COMPRESSED, torch.sparse_coo})

aten = torch.ops.aten
# Operators that put values at given indices.
COMPRESSING = frozenset(
    {
        aten.sparse_compressed_tensor.comp_plain_value_size,
        aten.sparse_compressed_tensor.comp_plain_value,
        aten._sparse_compressed_tensor_unsafe.default,
    }
)
PLACING = COMPRESSING | {aten._sparse_coo_tensor_with_dims_and_tensors.default}


def is_sparse(a: Any) -> bool:
    return isinstance(a, torch.Tensor) and a.layout in _LAYOUTS


def expand_examples(t: torch.Tensor, size: int) -> torch.Tensor:
    """(B, *S), of a value *S that all examples share, also a sparse one: expand takes none."""
    if not is_sparse(t):
        return t.expand(size, *t.shape)
    return t.unsqueeze(0).index_select(0, torch.zeros(size, dtype=torch.long, device=t.device))


def alias_constant(t: torch.Tensor) -> torch.Tensor:
    """Return an alias without history; it may be a view."""
    if isinstance(t, Wrapper):
        return alias_for_autograd(t)
    with no_dispatch(), below_autograd():
        return t.detach()
