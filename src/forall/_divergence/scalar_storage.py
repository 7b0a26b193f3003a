"""The values of per-example 0-d tensors as ordinary tensors, and such tensors from values."""

from __future__ import annotations

from typing import Any

import torch

from forall._compat.dispatch_state import functions_off, no_dispatch
from forall._compat.wrapper_tensor import Wrapper
from forall._core.host_reads import notify_host_read
from forall._vmap.batched_tensor import BatchedTensor, wrap_stack
from forall._vmap.concretize import read_answers

Tensor = torch.Tensor


def read_with_levels(t: Tensor) -> tuple[Tensor, list]:
    """Return all numbers of a 0-d tensor as an ordinary tensor, and the levels of its axes."""
    levels: list = []
    while isinstance(t, Wrapper):
        if type(t) is BatchedTensor and t.axis is not None:
            levels.insert(t.axis, t.level)
        t = t.value
    with functions_off(), no_dispatch():
        return t.detach(), levels


def read_values(t: Tensor) -> Tensor:
    """Return all numbers of a 0-d tensor, in any order."""
    return read_with_levels(t)[0]


def notify_value_read(t: Tensor) -> None:
    """Notify listeners, such as a tracer, that the numbers are read.

    For integers a tracer may check in later calls that all examples still agree.
    """

    def same() -> Tensor:
        with functions_off():
            with no_dispatch():
                first = read_values(t).reshape(-1)[:1].tolist()
            return read_answers(t == first[0] if first else t)[0]

    notify_host_read(None if t.is_floating_point() or t.is_complex() else same)


def find_batched_levels(t: Tensor) -> list:
    """Return the levels at which a tensor is batched, the innermost first."""
    found = []
    while isinstance(t, Wrapper):
        if type(t) is BatchedTensor and t.axis is not None:
            found.append(t.level)
        t = t.value
    return found


def cast_values(t: Tensor, dtype: torch.dtype, device: Any = None, *, copy: bool = False) -> Tensor:
    """Cast the numbers of all examples, running or not, to this dtype, without derivatives."""
    if isinstance(t, Wrapper):
        value = cast_values(t.value, dtype, device, copy=copy)
        return (
            wrap_stack(value, t.axis, t.level)
            if type(t) is BatchedTensor and t.axis is not None
            else value
        )
    with functions_off(), no_dispatch():
        return t.detach().to(device, dtype, copy=copy)


def move_to_one_device(tensors: list[Tensor]) -> list[Tensor]:
    """Move numbers to one device: an accelerator's, if any of them is there.

    A number that was read from a tensor is on the tensor's device. A number made by Python code is
    on the CPU.
    """
    with functions_off():
        devices = [t.device for t in tensors]
        device = next((d for d in devices if d.type != "cpu"), None)
        if device is None:
            return tensors
        return [
            t if d == device else cast_values(t, t.dtype, device)
            for t, d in zip(tensors, devices, strict=True)
        ]


def broadcast_values(tensors: list[Tensor]) -> list[Tensor]:
    """Broadcast numbers against each other: each gets the batch axes of all, for running lanes."""
    mask = tensors[0].isnan()
    for t in tensors[1:]:
        mask = mask | t.isnan()
    return [torch.where(mask, t, t) for t in tensors]


def order_by_levels(t: Tensor, levels: list) -> Tensor:
    """Return all numbers with one axis for each of these levels, in this order."""
    numbers, axes = read_with_levels(t)
    with functions_off(), no_dispatch():
        return numbers.permute([axes.index(level) for level in levels])


def rebuild_tensor(numbers: Any, dtype: torch.dtype, shape: tuple, levels: list) -> Tensor:
    """Make a per-example 0-d tensor of numbers in the order of `order_by_levels`."""
    with functions_off(), no_dispatch():  # or the level would make it a value of its own
        stack = torch.as_tensor(numbers, dtype=dtype).reshape(shape)
        for n in reversed(range(len(levels))):
            stack = wrap_stack(stack, n, levels[n])
        return stack
