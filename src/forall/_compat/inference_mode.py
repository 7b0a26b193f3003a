"""Derivatives in inference mode, where torch records nothing whatever grad mode says: it is left.

Torch's own forward mode and `backward` are silent there, or give zeros.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import torch

from forall._compat import exception_safety


class _Left(threading.local):
    def __init__(self) -> None:
        self.now: list[Any] = []  # how it was left, the last way last


_left = _Left()


def _put_back(_modes: list, _level: int) -> None:
    """Be in it as before: a context that is only let go would have its effect at any later time."""
    while _left.now:
        with suppress(Exception):  # of one that was entered or exited in part
            _left.now.pop().__exit__(None, None, None)


exception_safety.PUT_BACK.append(_put_back)


def left() -> Any:
    """Leave inference mode, if it is on, until what this returns is exited."""
    if not torch.is_inference_mode_enabled():
        return None
    off = torch.inference_mode(False)
    _left.now.append(off)
    off.__enter__()
    return off


def back(off: Any) -> None:
    """Be in inference mode again, if it was left."""
    if off is not None:
        off.__exit__(None, None, None)
        _left.now.remove(off)


def ordinary(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor; a copy of one that was made in inference mode, which can have no history."""
    return tensor.clone() if tensor.is_inference() else tensor
