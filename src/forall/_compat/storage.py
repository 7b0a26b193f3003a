"""The storage of tensors, and errors of devices that have no more memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import serialization

from forall._compat.device_threads import has_device_threads
from forall._compat.dispatch_state import is_torch_func_value
from forall._compat.private_api import PLAIN

if TYPE_CHECKING:
    from types import FrameType

_SAVES = serialization._legacy_save.__code__


def has_memory(t: torch.Tensor) -> bool:
    """Return True if a tensor is nothing but entries in memory, laid out by strides.

    A value of a transform of torch.func is not: it is a wrapper, also when that has ended.
    """
    is_laid_out = type(t) in PLAIN and t.layout is torch.strided and not t.is_quantized
    return is_laid_out and not is_torch_func_value(t)


def is_sole_owner(t: torch.Tensor) -> bool:
    """Return True if no other tensor shares this one's memory."""
    storage = t.untyped_storage()  # this is one more reference
    return torch._C._storage_Use_Count(storage._cdata) <= 2


def get_storage_id(t: torch.Tensor) -> int:
    """Return a number that is the same for all tensors which share this one's memory."""
    return t.untyped_storage()._cdata


def is_saving_storage(frame: FrameType) -> bool:
    """Return True if a frame writes a storage to a file; torch copies it to the CPU in C++."""
    return frame.f_code is _SAVES


# Texts of backends' out-of-memory errors that are no torch.OutOfMemoryError.
_OUT_OF_MEMORY = ("DefaultCPUAllocator", "out of memory", "STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return True if an allocation failed, on whatever device."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(said in str(error) for said in _OUT_OF_MEMORY)


def has_allocated_on_accelerator() -> bool:
    """Return True if memory of a device other than the CPU may have been allocated."""
    return has_device_threads() and torch._C._accelerator_isAllocatorInitialized()


def empty_cache() -> None:
    """Free the memory that the accelerator's allocator caches."""
    torch._C._accelerator_emptyCache()
