"""The values of per-example 0-d tensors as ordinary tensors, and such tensors from values."""

from __future__ import annotations

from typing import Any

import torch

from forall._compat.dispatch_state import functions_off, no_dispatch
from forall._compat.wrapper_tensor import Wrapper
from forall._core.host_reads import numbers_told
from forall._vmap.batched_tensor import Batched, wrap
from forall._vmap.concretize import answers

Tensor = torch.Tensor


def read(t: Tensor) -> tuple[Tensor, list]:
    """Return all numbers of a 0-d tensor as an ordinary tensor, and the levels of its axes."""
    levels: list = []
    while isinstance(t, Wrapper):
        if type(t) is Batched and t.axis is not None:
            levels.insert(t.axis, t.level)
        t = t.value
    with functions_off(), no_dispatch():
        return t.detach(), levels


def plain(t: Tensor) -> Tensor:
    """Return all numbers of a 0-d tensor, in any order."""
    return read(t)[0]


def tell(t: Tensor) -> None:
    """Notify listeners, such as a tracer, that the numbers are read.

    For integers a tracer may check in later calls that all examples still agree.
    """

    def same() -> Tensor:
        with functions_off():
            with no_dispatch():
                first = plain(t).reshape(-1)[:1].tolist()
            return answers(t == first[0] if first else t)[0]

    numbers_told(None if t.is_floating_point() or t.is_complex() else same)


def levels_of(t: Tensor) -> list:
    """Return the levels at which a tensor is batched, the innermost first."""
    found = []
    while isinstance(t, Wrapper):
        if type(t) is Batched and t.axis is not None:
            found.append(t.level)
        t = t.value
    return found


def cast(t: Tensor, dtype: torch.dtype, device: Any = None, *, copy: bool = False) -> Tensor:
    """Cast the numbers of all examples, running or not, to this dtype, without derivatives."""
    if isinstance(t, Wrapper):
        value = cast(t.value, dtype, device, copy=copy)
        return wrap(value, t.axis, t.level) if type(t) is Batched and t.axis is not None else value
    with functions_off(), no_dispatch():
        return t.detach().to(device, dtype, copy=copy)


def on_one_device(tensors: list[Tensor]) -> list[Tensor]:
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
            t if d == device else cast(t, t.dtype, device)
            for t, d in zip(tensors, devices, strict=True)
        ]


def spread(tensors: list[Tensor]) -> list[Tensor]:
    """Broadcast numbers against each other: each gets the batch axes of all, for running lanes."""
    mask = tensors[0].isnan()
    for t in tensors[1:]:
        mask = mask | t.isnan()
    return [torch.where(mask, t, t) for t in tensors]


def in_order(t: Tensor, levels: list) -> Tensor:
    """Return all numbers with one axis for each of these levels, in this order."""
    numbers, axes = read(t)
    with functions_off(), no_dispatch():
        return numbers.permute([axes.index(level) for level in levels])


def rebuilt(numbers: Any, dtype: torch.dtype, shape: tuple, levels: list) -> Tensor:
    """Make a per-example 0-d tensor of numbers in the order of `in_order`."""
    with functions_off(), no_dispatch():  # or the level would make it a value of its own
        stack = torch.as_tensor(numbers, dtype=dtype).reshape(shape)
        for n in reversed(range(len(levels))):
            stack = wrap(stack, n, levels[n])
        return stack
