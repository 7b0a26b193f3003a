"""The default device, which torch keeps as a function mode, and the accelerator in use."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._device import DeviceContext

from forall._compat.dispatch_state import functions_off, no_dispatch
from forall._compat.exception_safety import contextmanager
from forall._compat.private_api import count_all_function_modes, pop_functions, push_functions

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_CPU = torch.device("cpu")
_at = torch._C._get_function_stack_at
PASSES_ON = DeviceContext.__torch_function__.__code__  # a frame that only passes a call on


def count_function_modes() -> int:
    """Return how many function modes are on, apart from torch's own for a default device.

    The mode for a default device decides nothing but the device of new tensors.
    """
    count = left = count_all_function_modes()
    while left:
        left -= 1
        if type(_at(left)) is DeviceContext:
            count -= 1
    return count


def find_default_device() -> torch.device | None:
    """Return the device of `torch.set_default_device` or ``with torch.device(...)``, or None."""
    left = count_all_function_modes()
    while left:
        left -= 1
        mode = _at(left)
        if type(mode) is DeviceContext:
            return mode.device
    return None


def find_new_device(device: Any = None) -> Any:
    """Return the device on which torch makes a tensor of Python's numbers, given ``device``."""
    return device if device is not None else find_default_device() or _CPU


@contextmanager
def override_default_device(device: torch.device | None) -> Iterator[None]:
    """Set the default device for a block; with None no default device is set.

    The one that was set is taken off: torch 2.10 puts an inner one below it.
    """
    modes = _pop_function_modes()
    for mode in modes:
        if type(mode) is not DeviceContext:
            push_functions(mode)
    try:
        with nullcontext() if device is None else DeviceContext(device):
            yield
    finally:
        _pop_function_modes()
        for mode in modes:
            push_functions(mode)


def _pop_function_modes() -> list[Any]:
    """Pop all function modes; return them, the outermost first."""
    return [pop_functions() for _ in range(count_all_function_modes())][::-1]


@contextmanager
def hide_from_observers() -> Iterator[None]:
    """Hide a backend's own calls from all modes, and from a trace function that watches a call."""
    trace = sys.gettrace()
    if trace is not None:
        sys.settrace(None)
    try:
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            yield
    finally:
        if trace is not None:
            sys.settrace(trace)


@cache
def get_accelerator() -> Any:
    """Return the module of the accelerator that torch was built for; None without one."""
    device = torch.accelerator.current_accelerator()
    return None if device is None else torch.get_device_module(device)


def get_current_device() -> int:
    """Return the index of the device that is meant by one without an index.

    That is 0 until the accelerator is in use. An earlier query would initialise the accelerator,
    after which the process could no longer fork.
    """
    module = get_accelerator()
    if module is None:
        return 0
    with hide_from_observers():
        is_used = getattr(module, "is_initialized", _is_used)()
        return torch.accelerator.current_device_index() if is_used else 0


def _is_used() -> bool:
    return True


def synchronize_devices(tensors: Iterable[torch.Tensor]) -> None:
    """Wait for the devices of tensors that are to be read on any stream from now on.

    A program keeps its constants, and its calls may run on other streams than the recording did.
    One wait costs less than a check with each call. While the user captures a CUDA graph, its
    stream cannot be waited for, and it runs all its work in order.
    """
    for device in {t.device for t in tensors}:
        if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize(device)


def copy_index_to(index: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a CPU index on a device, to which it is copied once.

    The copy is kept on the index, for each CUDA stream: another stream may read it before it is
    there.
    """
    if device.type == "cpu":
        return index
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    copies = index.__dict__.setdefault("copies", {})
    found = copies.get((device, stream))
    if found is None:
        with functions_off(), no_dispatch():
            found = copies[device, stream] = _copy_async(index, device)
    return found


def _copy_async(index: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy from pinned memory, which does not wait for the device."""
    index = index.pin_memory() if device.type == "cuda" else index
    return index.to(device, non_blocking=True)
