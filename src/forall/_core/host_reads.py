"""Host reads: listeners, such as a tracer, are notified when Python reads a tensor's value."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from forall._compat.call_site import OURS, find_users_frame
from forall._compat.dispatch_state import functions_off, no_dispatch
from forall._compat.wrapper_tensor import Wrapper
from forall._core.errors import format_short
from forall._core.levels import stack

if TYPE_CHECKING:
    from collections.abc import Callable


def notify_host_read(same: Callable[[], Any] | None = None) -> None:
    """Notify listeners that Python reads numbers of examples without an operator.

    A traced program may keep the numbers if ``same``, a function that gives a tensor of flags, says
    that they are the same in each call.
    """
    stack.asked = True
    if not stack.listening:
        return
    frame = find_users_frame(sys._getframe(1), (OURS,))
    for listener in stack.listening:
        if listener.writes:
            listener.on_concretize(frame, same)


def format_numbers(value: torch.Tensor) -> str:
    """Return the repr of the tensor behind a wrapper. Printing never fails under any level."""
    notify_host_read()
    if isinstance(value, Wrapper):
        return repr(value)
    try:
        with functions_off(), no_dispatch():
            return repr(value)
    except Exception:  # noqa: BLE001 - a tensor subclass, say, that cannot be read here
        return format_short(value)
