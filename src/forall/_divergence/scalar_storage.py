"""The numbers behind 0-d tensors that differ between examples, and such tensors from numbers."""

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
    """All numbers of a 0-d tensor as an ordinary one, and the levels that its axes belong to."""
    levels: list = []
    while isinstance(t, Wrapper):
        if type(t) is Batched and t.axis is not None:
            levels.insert(t.axis, t.level)
        t = t.value
    with functions_off(), no_dispatch():
        return t.detach(), levels


def plain(t: Tensor) -> Tensor:
    """All numbers of a 0-d tensor, in whatever order."""
    return read(t)[0]


def tell(t: Tensor) -> None:
    """Who writes a program is told of the numbers: all examples may have one whole one again."""

    def same() -> Tensor:
        with functions_off():
            with no_dispatch():
                first = plain(t).reshape(-1)[:1].tolist()
            return answers(t == first[0] if first else t)[0]

    numbers_told(None if t.is_floating_point() or t.is_complex() else same)


def levels_of(t: Tensor) -> list:
    """The levels among whose examples it differs, the innermost first."""
    found = []
    while isinstance(t, Wrapper):
        if type(t) is Batched and t.axis is not None:
            found.append(t.level)
        t = t.value
    return found


def cast(t: Tensor, dtype: torch.dtype, device: Any = None, *, copy: bool = False) -> Tensor:
    """The same numbers in this dtype, without derivatives, whoever of the examples runs."""
    if isinstance(t, Wrapper):
        value = cast(t.value, dtype, device, copy=copy)
        return wrap(value, t.axis, t.level) if type(t) is Batched and t.axis is not None else value
    with functions_off(), no_dispatch():
        return t.detach().to(device, dtype, copy=copy)


def on_one_device(tensors: list[Tensor]) -> list[Tensor]:
    """The same numbers where one device has them all: those of an accelerator stay there.

    A number read from a tensor lies where that does, one made by Python's code on the CPU.
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
    """The same numbers for the lanes that run now, each given for every lane of all of these."""
    mask = tensors[0].isnan()
    for t in tensors[1:]:
        mask = mask | t.isnan()
    return [torch.where(mask, t, t) for t in tensors]


def in_order(t: Tensor, levels: list) -> Tensor:
    """All numbers, one axis for each of these levels."""
    numbers, axes = read(t)
    with functions_off(), no_dispatch():
        return numbers.permute([axes.index(level) for level in levels])


def rebuilt(numbers: Any, dtype: torch.dtype, shape: tuple, levels: list) -> Tensor:
    """The 0-d tensor whose numbers, in the order of `in_order`, are these."""
    with functions_off(), no_dispatch():  # or the level would make it a value of its own
        stack = torch.as_tensor(numbers, dtype=dtype).reshape(shape)
        for n in reversed(range(len(levels))):
            stack = wrap(stack, n, levels[n])
        return stack
