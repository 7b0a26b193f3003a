"""Which memory a tensor's entries lie in, and what a device says where it has no more."""

from __future__ import annotations

import torch

from forall._compat.device_threads import has_device_threads
from forall._compat.private_api import PLAIN


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


# What backends say in a RuntimeError that is no torch.OutOfMemoryError.
_OUT_OF_MEMORY = ("DefaultCPUAllocator", "out of memory", "STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an allocation failed, on whatever device."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(said in str(error) for said in _OUT_OF_MEMORY)


def has_allocated_on_accelerator() -> bool:
    """Whether memory of a device other than the CPU's may have been taken."""
    return has_device_threads() and torch._C._accelerator_isAllocatorInitialized()


def empty_cache() -> None:
    """Give back to the accelerator what its allocator keeps for later."""
    torch._C._accelerator_emptyCache()
