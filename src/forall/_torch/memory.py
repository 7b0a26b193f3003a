"""Which memory a tensor's entries lie in, where it is no more than a way to look at some."""

from __future__ import annotations

import torch

from forall._torch.names import PLAIN


def has_memory(t: torch.Tensor) -> bool:
    """Whether a tensor is no more than entries in memory, laid out by strides."""
    return type(t) in PLAIN and t.layout is torch.strided and not t.is_quantized


def is_alone(t: torch.Tensor) -> bool:
    """Whether no other tensor shares this one's memory."""
    storage = t.untyped_storage()  # which counts as one more
    return torch._C._storage_Use_Count(storage._cdata) <= 2


def storage_of(t: torch.Tensor) -> int:
    """What all tensors that share this one's memory have in common."""
    return t.untyped_storage()._cdata
