"""Sets of row numbers as Python integers, one bit for each row, so that operations are cheap."""

from __future__ import annotations

import ctypes
import sys

import torch

# Multiplying by this gathers the lowest bits of the 8 bytes of a word in its last byte.
_GATHER = 0x0102040810204080
_LITTLE = sys.byteorder == "little"


def to_int(flags: torch.Tensor) -> int:
    """Return the set that a bool tensor (n,) marks."""
    size = flags.numel()
    if size % 8 or flags.storage_offset() or not (flags.is_cpu and flags.is_contiguous()):
        padded = torch.zeros(-(-size // 8) * 8, dtype=torch.bool, device="cpu")
        padded[:size] = flags
        flags = padded
    if not _LITTLE:
        flags = flags.view(-1, 8).flip(1).reshape(-1)
    words = flags.view(torch.int64) * _GATHER
    last = ctypes.string_at(words.data_ptr(), flags.numel())[7 if _LITTLE else 0 :: 8]
    return int.from_bytes(last, "little")


def count_flags(flags: torch.Tensor) -> int:
    """Return how many entries of a bool tensor (n,) are True."""
    return int(flags.count_nonzero())


def to_flags(rows: int, size: int) -> torch.Tensor:
    """Return a bool tensor (size,) that marks the rows in the set."""
    if not size:
        return torch.zeros(0, dtype=torch.bool, device="cpu")
    packed = torch.frombuffer(bytearray(rows.to_bytes(-(-size // 8), "little")), dtype=torch.uint8)
    return (packed.unsqueeze(1) >> torch.arange(8, device="cpu") & 1).view(-1)[:size].bool()


def make_full_set(size: int) -> int:
    """Return the set of all of ``size`` rows."""
    return (1 << size) - 1
