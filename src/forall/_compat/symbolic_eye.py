"""Identity matrices that are known to be such: the directions that whole Jacobians are made of.

What multiplies one is read instead, and no entry of it meets another entry's zero: with an inf in
it that product would be nan.

The mark is on the memory, so views have it too. It is gone with the first write of any example's:
rules write below the version count, and through views that have a count of their own.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from forall._compat.private_api import version
from forall._compat.storage import has_memory
from forall._compat.wrapper_tensor import Wrapper


class _Mark:
    """What was an identity matrix when it was made."""

    __slots__ = ("at", "made", "since")

    def __init__(self, made: torch.Tensor) -> None:
        self.made = weakref.ref(made)  # which holds the memory that holds this
        self.at = version(made)
        self.since = _writes.last

    def holds(self, t: torch.Tensor) -> bool:
        """Whether ``t``, in the same memory, is all of it still, but for dims of size 1."""
        made = self.made()
        if made is None or self.since is not _writes.last or self.at != version(made):
            return False
        dims = [d for d in zip(t.shape, t.stride(), strict=True) if d[0] != 1]
        rows, columns = zip(made.shape, made.stride(), strict=True)
        return (
            t.dtype == made.dtype
            and t.storage_offset() == 0
            and not t.is_neg()
            and (dims in ([rows, columns], [columns, rows]) or made.numel() == t.numel() == 1)
        )


class _Writes:
    """The last write into an example, of all threads."""

    last: Any = None


_writes = _Writes()


def written() -> None:
    """Somebody writes: what was an identity may be none any more."""
    _writes.last = object()


def identity(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An identity matrix that `is_identity` knows for as long as nobody writes."""
    made = torch.eye(size, dtype=dtype, device=device)
    plain = _plain(made)
    if plain is not None and version(plain) >= 0:
        with torch._C.DisableTorchFunction():
            _memory(plain).identity = _Mark(plain)
    return made


def is_identity(t: Any) -> bool:
    """Whether these are the rows, or the columns, of one, whatever dims of size 1 are between."""
    plain = _plain(t)
    if plain is None:
        return False
    with torch._C.DisableTorchFunction():
        mark = getattr(_memory(plain), "identity", None)
        return mark is not None and mark.holds(plain)


def _memory(t: torch.Tensor) -> Any:
    return t.untyped_storage()


def _plain(t: Any) -> Any:
    """The ordinary tensor that is the same for all examples of all levels, if it is one."""
    while isinstance(t, Wrapper) and getattr(t, "axis", None) is None:
        t = t.value
    return t if type(t) is torch.Tensor and has_memory(t) else None
