"""Modes of the user's that are on beneath forall's: make_fx, fake tensors, counters of operators.

A tracer takes a tensor for a constant if it did not see its creation. So the ordinary tensors that
forall itself makes (aliases, zeros) are hidden from forall's modes alone. A test of a traced value
has no answer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from forall._compat.private_api import (
    BEFORE_AUTOGRAD,
    DispatchMode,
    count_dispatch_modes,
    is_key_included,
    pop_mode,
    push_mode,
)

_mode = torch._C._get_dispatch_stack_at
_TRACERS = tuple(torch._C._TorchDispatchModeKey.__members__.values())


def has_foreign_mode() -> bool:
    """Return True if a mode that is not forall's is on beneath all of forall's."""
    return count_dispatch_modes() > 0 and not isinstance(_mode(0), DispatchMode)


def is_tracer_on() -> bool:
    """Return True if a tracer is on: its tensors have no numbers, or not those of later calls."""
    return has_foreign_mode() and any(torch._C._get_dispatch_mode(key) for key in _TRACERS)


def is_compiler_tensor(a: Any) -> bool:
    """Return True for a tensor of torch's compilers: a fake one, or one that wraps it."""
    return isinstance(a, (FakeTensor, FunctionalTensor))


def is_functionalizing() -> bool:
    """Return True while AOTAutograd or torch.export turns writes in place into new tensors."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL) is not None


class suspend_own_modes:
    """A block in which forall's modes see nothing; modes that are on beneath them do."""

    __slots__ = ("modes",)

    def __enter__(self) -> None:
        self.modes = []
        while count_dispatch_modes() and isinstance(
            _mode(count_dispatch_modes() - 1), DispatchMode
        ):
            self.modes.append(pop_mode(None))

    def __exit__(self, *_: object) -> None:
        while self.modes:
            push_mode(self.modes.pop())


def hide_own_tensors() -> Any:
    """Return a context for tensors that forall itself makes and that are no wrappers."""
    return suspend_own_modes() if has_foreign_mode() else torch._C._DisableTorchDispatch()


class SymbolicRange:
    """``range(size)`` for a symbolic size of a tracer, until the numbers are needed."""

    __slots__ = ("size",)

    def __init__(self, size: Any) -> None:
        self.size = size

    def __len__(self) -> int:
        return int(self.size)

    def __getitem__(self, i: Any) -> Any:
        return range(self.size)[i]


def is_pre_dispatch_tracing() -> bool:
    """Return True if a tracer is on that sees operators before autograd does, as torch.export's."""
    return is_key_included(BEFORE_AUTOGRAD)
