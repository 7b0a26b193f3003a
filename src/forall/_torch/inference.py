"""Derivatives in inference mode, where torch records nothing whatever grad mode says: it is left.

Torch's own forward mode and `backward` are silent there, or give zeros.
"""

from __future__ import annotations

from typing import Any

import torch


def left() -> Any:
    """Leave inference mode, if it is on, until what this returns is exited."""
    if not torch.is_inference_mode_enabled():
        return None
    off = torch.inference_mode(False)
    off.__enter__()
    return off


def back(off: Any) -> None:
    """Be in inference mode again, if it was left."""
    if off is not None:
        off.__exit__(None, None, None)


def ordinary(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor; a copy of one that was made in inference mode, which can have no history."""
    return tensor.clone() if tensor.is_inference() else tensor
