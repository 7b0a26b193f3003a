"""The threads in which autograd runs the nodes of a device, and passes that avoid them.

NOTE [device threads]
    On an accelerator autograd runs a node in a thread of the node's device. Thread-local state is
    empty there: levels, modes, the examples for which code runs, the recorder. A custom Function
    that is called in the backward of another would not find its level, and its part of the
    derivative would be missing.

    So forall's backward passes, and the user's own once a transform has been called, run in the
    thread that starts them. The device works as before: its kernels are queued by one thread
    instead of another.
"""

from __future__ import annotations

import functools

import torch

_set_enabled = torch._C._set_multithreading_enabled
_is_enabled = torch._C._is_multithreading_enabled


@functools.cache
def has_device_threads() -> bool:
    """Return True if there is a device other than the CPU, as autograd finds at its first pass."""
    return torch.accelerator.is_available()


class one_thread:
    """A block in which a backward pass runs in this thread, on whatever devices its nodes are."""

    __slots__ = ("was",)

    def __enter__(self) -> None:
        self.was = has_device_threads() and _is_enabled()
        if self.was:
            _set_enabled(False)

    def __exit__(self, *_: object) -> None:
        if self.was:
            _set_enabled(True)
