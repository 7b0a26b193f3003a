"""Standard bases: the tangents or cotangents for the columns or rows of a Jacobian."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from forall._compat.symbolic_diagonal import Diagonal, mark_diagonal

if TYPE_CHECKING:
    from collections.abc import Sequence


def make_basis_rows(tensors: Sequence[torch.Tensor], start: int, stop: int) -> list[torch.Tensor]:
    """Return the basis vectors ``start`` to ``stop`` of the space of all ``tensors`` together.

    There is one (stop - start, *S) per tensor. Vector k is 1 at entry k of the concatenation of all
    flattened tensors, and 0 elsewhere.
    """
    is_vector = len(tensors) == 1 and tensors[0].dim() == 1
    out = []
    first = 0
    for t in tensors:
        n = t.numel()
        if is_vector and (start, stop) == (0, n):
            block = torch.eye(n, dtype=t.dtype, device=t.device)
        else:
            block = torch.zeros(stop - start, n, dtype=t.dtype, device=t.device)
            low, high = max(start, first), min(stop, first + n)
            if low < high:
                # An index would copy numbers to the device, and wait for it.
                square = block[low - start : high - start, low - first : high - first]
                square.diagonal().fill_(1)
        if is_vector:
            mark_diagonal(block, Diagonal(start, stop, n))
        out.append(block.view(stop - start, *t.shape))
        first += n
    return out


def select_basis_rows(tensors: Sequence[torch.Tensor], rows: Sequence[range]) -> list[torch.Tensor]:
    """Return the basis vectors of all these ranges, one range after another."""
    if len(rows) == 1:
        return make_basis_rows(tensors, rows[0].start, rows[0].stop)
    found = [make_basis_rows(tensors, r.start, r.stop) for r in rows]
    return [torch.cat(parts) for parts in zip(*found, strict=True)]
