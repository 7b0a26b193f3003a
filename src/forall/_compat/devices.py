"""The default device, which torch keeps as a function mode, and the accelerator's current one."""

from __future__ import annotations

import sys
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._device import DeviceContext

from forall._compat.dispatch_state import functions_off, no_dispatch
from forall._compat.exception_safety import contextmanager

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_CPU = torch.device("cpu")
any_function_modes = torch._C._len_torch_function_stack  # how many, in C
_at = torch._C._get_function_stack_at
_pop = torch._C._pop_torch_function_stack
_push = torch._C._push_on_torch_function_stack
PASSES_ON = DeviceContext.__torch_function__.__code__  # the call of whoever is under the mode


def function_modes() -> int:
    """Return how many function modes are on, apart from torch's own for a default device.

    Those have a say in nothing but where new tensors lie.
    """
    count = left = any_function_modes()
    while left:
        left -= 1
        if type(_at(left)) is DeviceContext:
            count -= 1
    return count


def default_device() -> torch.device | None:
    """Return what `torch.set_default_device` or ``with torch.device(...)`` has set, or None."""
    left = any_function_modes()
    while left:
        left -= 1
        mode = _at(left)
        if type(mode) is DeviceContext:
            return mode.device
    return None


def new_device(device: Any = None) -> Any:
    """Return the device on which torch makes a new tensor of Python's numbers, if told this one."""
    return device if device is not None else default_device() or _CPU


@contextmanager
def under_default_device(device: torch.device | None) -> Iterator[None]:
    """Within it the default device is this one; with None no default device is set."""
    if device is not None:
        with DeviceContext(device):
            yield
        return
    modes = _take_off()
    for mode in modes:
        if type(mode) is not DeviceContext:
            _push(mode)
    try:
        yield
    finally:
        _take_off()
        for mode in modes:
            _push(mode)


def _take_off() -> list[Any]:
    """Take all function modes off; return them, the outermost first."""
    return [_pop() for _ in range(any_function_modes())][::-1]


@contextmanager
def unwatched() -> Iterator[None]:
    """Let no mode see what a backend does here, nor who watches which functions a call runs."""
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
def accelerator() -> Any:
    """Return the module of the accelerator that torch was built for; None without one."""
    device = torch.accelerator.current_accelerator()
    return None if device is None else torch.get_device_module(device)


def current_device() -> int:
    """Return the index that a device without one stands for.

    That is 0 until the accelerator is in use. To ask it earlier would set it up, after which the
    process could no longer fork.
    """
    module = accelerator()
    if module is None:
        return 0
    with unwatched():
        is_used = getattr(module, "is_initialized", _is_used)()
        return torch.accelerator.current_device_index() if is_used else 0


def _is_used() -> bool:
    return True


def wait_until_made(tensors: Iterable[torch.Tensor]) -> None:
    """Wait for the devices of tensors that are to be read on any stream from now on.

    A program keeps its constants, and its calls may come on other streams than the recording did.
    To wait once costs less than to ask at each call. A graph of the user's that is being captured
    cannot be waited for, and runs all that it holds in order.
    """
    for device in {t.device for t in tensors}:
        if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize(device)


def on_device(index: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return an index of the CPU's on a device, where it is copied to once.

    The copy is kept on the index, for each stream of CUDA: another may read it before it is there.
    """
    if device.type == "cpu":
        return index
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    copies = index.__dict__.setdefault("copies", {})
    found = copies.get((device, stream))
    if found is None:
        with functions_off(), no_dispatch():
            found = copies[device, stream] = _copied(index, device)
    return found


def _copied(index: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Nobody waits for a copy from pinned memory."""
    index = index.pin_memory() if device.type == "cuda" else index
    return index.to(device, non_blocking=True)
