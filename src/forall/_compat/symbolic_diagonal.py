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


class _DiagonalMark:
    """A mark on the storage of a tensor that was diagonal when it was made."""

    __slots__ = ("at", "made", "since", "what")

    def __init__(self, made: torch.Tensor, what: Diagonal) -> None:
        self.made = weakref.ref(made)  # weak, because the tensor's storage holds the mark
        self.at = get_version(made)
        self.since = _writes.last
        self.what = what

    def find(self, t: torch.Tensor) -> Diagonal | None:
        """Return what ``t`` is, if it is still all that was made, but for dims of size 1."""
        made = self.made()
        if made is None or self.since is not _writes.last or self.at != get_version(made):
            return None
        if t.dtype != made.dtype or t.storage_offset() != made.storage_offset():
            return None
        if t.is_neg() or t.is_conj():
            return None
        dims = [d for d in zip(t.shape, t.stride(), strict=True) if d[0] != 1]
        kept = [d for d in zip(made.shape, made.stride(), strict=True) if d[0] != 1]
        return self.what if dims in (kept, kept[::-1]) else None


class _LastWrite:
    """The last write into an example, of all threads."""

    last: Any = None


_writes = _LastWrite()


def invalidate_marks() -> None:
    """Invalidate all marks: a value is being written to, which may have been an identity."""
    _writes.last = object()


def make_identity_rows(
    start: int, stop: int, size: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return rows of an identity matrix, which `find_diagonal` recognises until the next write."""
    if (start, stop) == (0, size):
        made = torch.eye(size, dtype=dtype, device=device)
    else:
        made = torch.zeros(stop - start, size, dtype=dtype, device=device)
        made[:, start:stop].diagonal().fill_(1)  # an index would wait for the device
    mark_diagonal(made, Diagonal(start, stop, size))
    return made


def mark_diagonal(made: torch.Tensor, what: Diagonal) -> None:
    """Note that a tensor is a diagonal matrix, or rows of one, if it is an ordinary tensor."""
    plain = _unwrap_shared(made)
    if plain is not None and get_version(plain) >= 0:
        with torch._C.DisableTorchFunction():
            _get_storage(plain).diagonal = _DiagonalMark(plain, what)


def find_diagonal(t: Any) -> Diagonal | None:
    """Return what a marked matrix is, or one whose transpose is marked; None for others.

    There may be any dims of size 1 in between. Which of the two it is, its shape tells.
    """
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
