"""Shapes of tensors that are broadcast with each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


def broadcast_shapes(*shapes: Sequence[int]) -> torch.Size:
    """Return ``torch.broadcast_shapes``, without its import of sympy, which takes half a second.

    Symbolic sizes, as those of a tracer, are compared by torch, which also raises errors.
    """
    rank = max(map(len, shapes), default=0)
    common = [1] * rank
    for shape in shapes:
        for i, size in enumerate(shape, rank - len(shape)):
            if type(size) is not int or (size != 1 and common[i] not in (1, size)):
                return torch.broadcast_shapes(*shapes)
            if size != 1:
                common[i] = size
    return torch.Size(common)
