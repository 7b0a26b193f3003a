"""Which memory a tensor's entries lie in, where it is no more than a way to look at some."""

from __future__ import annotations

import torch

from forall._torch.names import PLAIN


def has_memory(t: torch.Tensor) -> bool:
    """Whether a tensor is no more than entries in memory, laid out by strides."""
    return type(t) in PLAIN and t.layout is torch.strided and not t.is_quantized


def storage_of(t: torch.Tensor) -> int:
    """What all tensors that share this one's memory have in common."""
    return t.untyped_storage()._cdata
