"""`copy.deepcopy` of a captured tensor inside a transform: a copy that belongs to the level.

torch's own makes an empty tensor and copies the memory into it; values of a level have no memory.
"""

from __future__ import annotations

import functools
from copy import deepcopy

import torch

from forall._compat.dispatch_state import functions_off
from forall._core.levels import stack

_torchs = torch.Tensor.__deepcopy__


@functools.wraps(_torchs)
def _deepcopy(self: torch.Tensor, memo: dict) -> torch.Tensor:
    if stack.top is None or type(self) is not torch.Tensor or not _is_plain_leaf(self):
        return _torchs(self, memo)
    if id(self) not in memo:
        with torch.no_grad():
            made = memo[id(self)] = self.clone()
        made.requires_grad_(self.requires_grad)
        if self.grad is not None:
            made.grad = deepcopy(self.grad, memo)
        for name, value in self.__dict__.items():
            setattr(made, name, deepcopy(value, memo))
    return memo[id(self)]


def _is_plain_leaf(x: torch.Tensor) -> bool:
    """Return True for a leaf that is no view, so that a clone is a full copy of it."""
    with functions_off():
        return x.layout is torch.strided and x.is_leaf and x._base is None and not x.is_quantized


def install_deepcopy() -> None:
    """Replace `torch.Tensor.__deepcopy__`, once."""
    torch.Tensor.__deepcopy__ = _deepcopy
