"""Derivatives in inference mode, where autograd records nothing: the mode is left for them.

torch's own forward mode and `backward` are silent there, or give zeros.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import torch

from forall._compat import exception_safety


class _ExitedModes(threading.local):
    def __init__(self) -> None:
        self.now: list[Any] = []  # the open contexts that switch it off, the last one last


_left = _ExitedModes()


def _reenter_all(_modes: list, _level: int) -> None:
    """Exit all open contexts: one that is only dropped would take effect at any later time."""
    while _left.now:
        with suppress(Exception):  # of one that was entered or exited in part
            _left.now.pop().__exit__(None, None, None)


exception_safety.PUT_BACK.append(_reenter_all)


def leave_inference_mode() -> Any:
    """Leave inference mode, if it is on, until the returned context is exited."""
    if not torch.is_inference_mode_enabled():
        return None
    off = torch.inference_mode(False)
    _left.now.append(off)
    off.__enter__()
    return off


def reenter_inference_mode(off: Any) -> None:
    """Enter inference mode again, if it was left."""
    if off is not None:
        off.__exit__(None, None, None)
        _left.now.remove(off)


def copy_if_inference(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor; a copy of one made in inference mode, which can have no history."""
    return tensor.clone() if tensor.is_inference() else tensor
