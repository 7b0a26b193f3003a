"""Identity matrices that are known to be such: the basis of directions for whole Jacobians.

A product with one reads the other factor instead, so no entry is multiplied by another's zero: with
an inf that product would be nan.

The mark is on the storage, so views have it too. It becomes invalid with the first write into a
value of any level: rules write below the version counter, and through views that have their own.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from forall._compat.private_api import get_version
from forall._compat.storage import has_memory
from forall._compat.wrapper_tensor import Wrapper


class _IdentityMark:
    """A mark on the storage of a tensor that was an identity matrix when it was made."""

    __slots__ = ("at", "made", "since")

    def __init__(self, made: torch.Tensor) -> None:
        self.made = weakref.ref(made)  # weak, because the tensor's storage holds the mark
        self.at = get_version(made)
        self.since = _writes.last

    def holds(self, t: torch.Tensor) -> bool:
        """Return True if ``t`` is still the whole matrix, but for dims of size 1."""
        made = self.made()
        if made is None or self.since is not _writes.last or self.at != get_version(made):
            return False
        dims = [d for d in zip(t.shape, t.stride(), strict=True) if d[0] != 1]
        rows, columns = zip(made.shape, made.stride(), strict=True)
        return (
            t.dtype == made.dtype
            and t.storage_offset() == 0
            and not t.is_neg()
            and (dims in ([rows, columns], [columns, rows]) or made.numel() == t.numel() == 1)
        )


class _LastWrite:
    """The last write into an example, of all threads."""

    last: Any = None


_writes = _LastWrite()


def invalidate_marks() -> None:
    """Invalidate all marks: a value is being written to, which may have been an identity."""
    _writes.last = object()


def make_identity(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an identity matrix that `is_identity` recognises until the next write."""
    made = torch.eye(size, dtype=dtype, device=device)
    plain = _unwrap_shared(made)
    if plain is not None and get_version(plain) >= 0:
        with torch._C.DisableTorchFunction():
            _get_storage(plain).identity = _IdentityMark(plain)
    return made


def is_identity(t: Any) -> bool:
    """Return True for a marked matrix or its transpose, with any dims of size 1 in between."""
    plain = _unwrap_shared(t)
    if plain is None:
        return False
    with torch._C.DisableTorchFunction():
        mark = getattr(_get_storage(plain), "identity", None)
        return mark is not None and mark.holds(plain)


def _get_storage(t: torch.Tensor) -> Any:
    return t.untyped_storage()


def _unwrap_shared(t: Any) -> Any:
    """Return the ordinary tensor that is shared by all examples of all levels, if it is one."""
    while isinstance(t, Wrapper) and getattr(t, "axis", None) is None:
        t = t.value
    return t if type(t) is torch.Tensor and has_memory(t) else None
