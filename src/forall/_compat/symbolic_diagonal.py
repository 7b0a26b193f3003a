"""Diagonal matrices that are known to be such, or some rows of them: cotangents of Jacobians.

The basis of directions for a whole Jacobian is an identity matrix, and a slope of a pointwise
function makes it a diagonal one. A product with such a matrix scales the rows of the other factor,
so no entry is multiplied by another's zero: with an inf that product would be nan.

The mark is on the storage, so views have it too. It becomes invalid with the first write into a
value of any level: rules write below the version counter, and through views that have their own.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch

from forall._compat.private_api import get_version
from forall._compat.storage import has_memory
from forall._compat.wrapper_tensor import Wrapper


class Diagonal(NamedTuple):
    """The rows ``start`` to ``stop`` of a diagonal matrix (size, size), or their transpose.

    ``entries`` (size,) is the diagonal, and None where all of it is 1.
    """

    start: int
    stop: int
    size: int
    entries: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.stop - self.start, self.size

    def select(self, t: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the entries of a dim of length ``size`` that these rows are multiplied with."""
        rows = self.stop - self.start
        return t if rows == self.size else t.narrow(dim, self.start, rows)


class _DiagonalMark:
    """A mark on the storage of a tensor that was diagonal when it was made."""

    __slots__ = ("at", "made", "since", "what")

    def __init__(self, made: torch.Tensor, what: Diagonal) -> None:
        self.made = weakref.ref(made)  # weak, because the tensor's storage holds the mark
        self.at = get_version(made)
        self.since = _state.last_write
        self.what = what

    def find(self, t: torch.Tensor) -> Diagonal | None:
        """Return the matrix if ``t`` is all of the marked tensor, or its transpose, unwritten.

        Dims of size 1 do not count.
        """
        made = self.made()
        if made is None or self.since is not _state.last_write or self.at != get_version(made):
            return None
        if t.dtype != made.dtype or t.storage_offset() != made.storage_offset():
            return None
        if t.is_neg() or t.is_conj():
            return None
        dims = [d for d in zip(t.shape, t.stride(), strict=True) if d[0] != 1]
        kept = [d for d in zip(made.shape, made.stride(), strict=True) if d[0] != 1]
        return self.what if dims in (kept, kept[::-1]) else None


class _MarkState:
    """The last write into an example, of all threads, and whether there ever was a mark."""

    last_write: Any = None
    is_used = False


_state = _MarkState()


def invalidate_marks() -> None:
    """Invalidate all marks: a value is being written to, which may have been marked."""
    _state.last_write = object()


def mark_diagonal(made: torch.Tensor, what: Diagonal) -> None:
    """Mark a tensor as a diagonal matrix, or as rows of one, if it is an ordinary tensor."""
    plain = _unwrap_shared(made)
    if plain is not None and get_version(plain) >= 0:
        _state.is_used = True
        with torch._C.DisableTorchFunction():
            _get_storage(plain).diagonal = _DiagonalMark(plain, what)


def find_diagonal(t: Any) -> Diagonal | None:
    """Return which diagonal matrix a tensor is, or is the transpose of; None if that is not known.

    There may be any dims of size 1 in between. The tensor's shape tells if it is the transpose.
    """
    if not _state.is_used:
        return None
    plain = _unwrap_shared(t)
    if plain is None:
        return None
    with torch._C.DisableTorchFunction():
        mark = getattr(_get_storage(plain), "diagonal", None)
        return None if mark is None else mark.find(plain)


def _get_storage(t: torch.Tensor) -> Any:
    return t.untyped_storage()


def _unwrap_shared(t: Any) -> Any:
    """Return the ordinary tensor that is shared by all examples of all levels, if it is one."""
    while isinstance(t, Wrapper) and getattr(t, "axis", None) is None:
        t = t.value
    return t if type(t) is torch.Tensor and has_memory(t) else None
