"""The threads in which autograd runs the nodes of a device, and passes that keep out of them.

NOTE [device threads]
    On an accelerator autograd runs a node in a thread of the node's device. What is thread-local
    is empty there: levels, modes, for which examples code runs, what is being recorded. A custom
    Function that is called in the backward of another would not meet its level, and its part of the
    derivative would be missing. So passes of ours, and the user's own once a transform has been
    called, run in the thread that asks for them. The device works as before: its kernels are
    queued by one thread in the place of another.
"""

from __future__ import annotations

import functools

import torch

_set_enabled = torch._C._set_multithreading_enabled
_is_enabled = torch._C._is_multithreading_enabled


@functools.cache
def has_device_threads() -> bool:
    """Whether there is a device other than the CPU: autograd looks once, at its first pass."""
    return torch.accelerator.is_available()


class one_thread:
    """Within it a backward pass runs in this thread, on whatever devices its nodes are."""

    __slots__ = ("was",)

    def __enter__(self) -> None:
        self.was = has_device_threads() and _is_enabled()
        if self.was:
            _set_enabled(False)

    def __exit__(self, *_: object) -> None:
        if self.was:
            _set_enabled(True)
