"""Zeros that forward formulas ask for where an argument has no tangent.

Torch's own have no memory, and 0 * inf is 0 for them: what does not move adds nothing. They rely on
a dispatch key that is off inside handlers, so ours are ordinary ones that are known by a mark, and
a level asks `absorbed` before it multiplies.
"""

from __future__ import annotations

from typing import Any

import torch

from forall._torch.dispatch import aside
from forall._torch.wrapper import Wrapper

aten = torch.ops.aten
# Torch's zeros without memory have kernels for these; all others see ordinary zeros.
_DOTS = frozenset({aten.dot.default, aten.vdot.default})
PRODUCTS = _DOTS | {aten.mul.Tensor, aten.div.Tensor}


def plain_zeros(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Ordinary zeros for aten._efficientzerotensor, whatever levels are active.

    Formulas may mark them a Python number, which torch then reads: a wrapper has no data.
    """
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        zeros: Any = torch.zeros(*args, **kwargs)
        zeros.never_moves = not zeros.is_inference()
        for told in aside.told:
            told(zeros)
        return zeros


def absorbed(func: Any, args: tuple) -> torch.Tensor | None:
    """The zeros that a product of such zeros is, or None where it has to be computed."""
    x, y = args[:2]
    if not (_is_zero(x) or (_is_zero(y) and func is not aten.div.Tensor)):
        return None
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        dtype = torch.result_type(x, y)
        shapes = () if func in _DOTS else (a.shape for a in (x, y) if isinstance(a, torch.Tensor))
        shape = torch.broadcast_shapes(*shapes)
    return plain_zeros(shape, dtype=dtype, device=(x if _is_zero(x) else y).device)


def _is_zero(a: Any) -> bool:
    """Whether it is marked, at whatever level, and nobody has written into it since."""
    while isinstance(a, Wrapper) and getattr(a, "axis", None) is None:
        a = a.value
    if type(a) is not torch.Tensor or not getattr(a, "never_moves", False):
        return False
    with torch._C.DisableTorchFunction():
        return a._version == 0
