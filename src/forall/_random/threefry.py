"""Threefry-2x32: maps two words of 32 bits to two others, under a key of two words.

Words are int32 tensors, whose additions wrap like those of unsigned words. A right shift fills with
the sign bit, so a mask clears it. Torch computes on int32 on every device; its uint32 has no
addition.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from forall._compat.dispatch_state import in_torch_func
from forall._compat.shapes import broadcast_shapes

if TYPE_CHECKING:
    from collections.abc import Sequence

Tensor = torch.Tensor
Words = tuple[Tensor, Tensor]

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
LOW = 0xFFFFFFFF  # the mask of one word in an int64

# One operator, so that a level dispatches one call, not a hundred and ten.
library = torch.library.Library("forall", "DEF")
library.define("threefry2x32(Tensor k0, Tensor k1, Tensor x0, Tensor x1) -> (Tensor, Tensor)")


def threefry(k0: Tensor, k1: Tensor, x0: Tensor, x1: Tensor) -> Words:
    """Encrypt the words ``x0``, ``x1``, entry by entry; all four arguments broadcast."""
    if in_torch_func() or torch.compiler.is_dynamo_compiling():
        return _rounds(k0, k1, x0, x1)  # torch.func has no rule for it, a compiler can fuse it
    return torch.ops.forall.threefry2x32(k0, k1, x0, x1)


def _rounds(k0: Tensor, k1: Tensor, x0: Tensor, x1: Tensor) -> Words:
    """Run five times four rounds, in few operators: add's alpha does the left shift."""
    keys = (k0, k1, k0 ^ k1 ^ _PARITY)
    x0, x1 = torch.broadcast_tensors(x0 + k0, x1 + k1)
    for i in range(5):
        for r in _ROTATIONS[i % 2]:
            x0 = x0 + x1
            spilt = (x1 >> (32 - r)) & ((1 << r) - 1)
            x1 = torch.add(spilt, x1, alpha=1 << r) ^ x0
        x0 = x0 + keys[(i + 1) % 3]
        x1 = x1 + (keys[(i + 2) % 3] + (i + 1))
    return x0, x1


def _rounds_in_place(k0: Tensor, k1: Tensor, x0: Tensor, x1: Tensor) -> Words:
    """Run the rounds in place in new memory: two and a half times as fast on large tensors."""
    keys = (k0, k1, k0 ^ k1 ^ _PARITY)
    x0, x1 = (x.contiguous() for x in torch.broadcast_tensors(x0 + k0, x1 + k1))
    spilt = torch.empty_like(x1)
    for i in range(5):
        for r in _ROTATIONS[i % 2]:
            x0.add_(x1)
            torch.bitwise_right_shift(x1, 32 - r, out=spilt)
            spilt.bitwise_and_((1 << r) - 1).add_(x1, alpha=1 << r)
            torch.bitwise_xor(spilt, x0, out=x1)
        x0.add_(keys[(i + 1) % 3])
        x1.add_(keys[(i + 2) % 3]).add_(i + 1)
    return x0, x1


def _rounds_on_ints(k0: Tensor, k1: Tensor, x0: Tensor, x1: Tensor) -> Words:
    """Run the rounds on Python ints if there are few entries: a hundred operators take longer."""
    shape = broadcast_shapes(k0.shape, k1.shape, x0.shape, x1.shape)
    if not 0 < math.prod(shape) <= 6:
        return _rounds_in_place(k0, k1, x0, x1)
    entries = zip(*(t.expand(shape).reshape(-1).tolist() for t in (k0, k1, x0, x1)), strict=True)
    first, second = zip(*(_encrypt_ints(*e) for e in entries), strict=True)
    return _as_words(first, shape), _as_words(second, shape)


def _as_words(values: tuple[int, ...], shape: Sequence[int]) -> Tensor:
    """A tensor with memory of its own: results of an operator must not alias each other."""
    return torch.tensor(values, dtype=torch.int64, device="cpu").to(torch.int32).view(shape)


def _encrypt_ints(k0: int, k1: int, x0: int, x1: int) -> tuple[int, int]:
    keys = (k0 & LOW, k1 & LOW, (k0 ^ k1 ^ _PARITY) & LOW)
    x0, x1 = (x0 + k0) & LOW, (x1 + k1) & LOW
    for i in range(5):
        for r in _ROTATIONS[i % 2]:
            x0 = (x0 + x1) & LOW
            x1 = ((x1 << r | x1 >> (32 - r)) & LOW) ^ x0
        x0 = (x0 + keys[(i + 1) % 3]) & LOW
        x1 = (x1 + keys[(i + 2) % 3] + i + 1) & LOW
    return x0, x1


library.impl("threefry2x32", _rounds_in_place, "CompositeExplicitAutograd")
library.impl("threefry2x32", _rounds_on_ints, "CPU")


def make_counters(shape: Sequence[int], device: torch.device | None) -> Words:
    """Return the row-major index of each entry of ``shape``, as words."""
    size = math.prod(shape)
    low = torch.arange(size, device=device)
    if size <= 1 << 31:
        return torch.zeros((), dtype=torch.int32, device=device), low.to(torch.int32).view(shape)
    return (low >> 32).to(torch.int32).view(shape), low.to(torch.int32).view(shape)
