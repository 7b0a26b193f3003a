"""`copy.deepcopy` of a tensor from outside, inside a transform: a copy that is the level's own.

Torch has an empty tensor made and lets it have a copy of the memory. What a level makes has none.
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
    if stack.top is None or type(self) is not torch.Tensor or not _is_copied(self):
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


def _is_copied(x: torch.Tensor) -> bool:
    """Whether it is all there is to copy: nothing lies in the same memory, or leads to it."""
    with functions_off():
        return x.layout is torch.strided and x.is_leaf and x._base is None and not x.is_quantized


def install() -> None:
    """Put it in torch's place, once."""
    torch.Tensor.__deepcopy__ = _deepcopy
