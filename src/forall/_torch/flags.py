"""Sets of row numbers as Python integers, one byte for each row: what is asked of them is cheap."""

from __future__ import annotations

import ctypes

import torch


def bytes_of(flags: torch.Tensor) -> bytes:
    """A bool tensor (n,), one byte for each entry."""
    if not (flags.is_cpu and flags.is_contiguous()):
        flags = flags.cpu().contiguous()
    return ctypes.string_at(flags.data_ptr(), flags.numel())


def to_int(flags: torch.Tensor) -> int:
    """The set that a bool tensor (n,) marks."""
    return int.from_bytes(bytes_of(flags), "little")


def count_of(flags: torch.Tensor) -> int:
    """How many a bool tensor (n,) marks."""
    return bytes_of(flags).count(1)


def to_flags(rows: int, size: int) -> torch.Tensor:
    """(size,) bool: who is in the set."""
    if not size:
        return torch.zeros(0, dtype=torch.bool)
    return torch.frombuffer(bytearray(rows.to_bytes(size, "little")), dtype=torch.bool)


def everyone(size: int) -> int:
    """The set of all of so many rows."""
    return int.from_bytes(b"\1" * size, "little")
