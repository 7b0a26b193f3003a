"""Modes of the user's that lie beneath ours: make_fx, fake tensors, counters of operators.

A tracer takes what it is not told of for constant. So what our own code makes of ordinary tensors
(a second name, zeros) is hidden from our modes alone, and a question of Python's has no answer.
"""

from __future__ import annotations

from typing import Any

import torch

from forall._torch.names import DispatchMode, pop_mode, push_mode

_modes = torch._C._len_torch_dispatch_stack
_mode = torch._C._get_dispatch_stack_at
_TRACERS = tuple(torch._C._TorchDispatchModeKey.__members__.values())


def lie_beneath() -> bool:
    """Whether a mode that is none of ours lies beneath all of ours."""
    return _modes() > 0 and not isinstance(_mode(0), DispatchMode)


def are_on() -> bool:
    """Whether a tracer is on: the numbers of its tensors are not those of later calls, or none."""
    return lie_beneath() and any(torch._C._get_dispatch_mode(key) for key in _TRACERS)


class beneath_ours:
    """Modes of ours do not see what is done within; what lies beneath them does."""

    __slots__ = ("modes",)

    def __enter__(self) -> None:
        self.modes = []
        while _modes() and isinstance(_mode(_modes() - 1), DispatchMode):
            self.modes.append(pop_mode(None))

    def __exit__(self, *_: object) -> None:
        while self.modes:
            push_mode(self.modes.pop())


def unseen() -> Any:
    """A context for what our own code makes of tensors that are no wrappers of ours."""
    return beneath_ours() if lie_beneath() else torch._C._DisableTorchDispatch()
