"""Symbolic zeros: the tangents that forward formulas use for an argument without one.

torch's own have no memory, and 0 * inf is 0 for them, so arguments without a tangent add nothing.
They rely on a dispatch key that is excluded inside handlers. So forall's are ordinary zeros with a
mark, and a level calls `simplify_linear` before it multiplies or adds.
"""

from __future__ import annotations

from typing import Any

import torch

from forall._compat.dispatch_state import aside, functions_off, no_dispatch
from forall._compat.op_schema import LINEAR_IN_FIRST
from forall._compat.shapes import broadcast_shapes
from forall._compat.trace_modes import (
    has_foreign_mode,
    hide_own_tensors,
    is_compiler_tensor,
    is_functionalizing,
)
from forall._compat.wrapper_tensor import Wrapper

aten = torch.ops.aten
_DOTS = frozenset({aten.dot.default, aten.vdot.default})
_SUMS = frozenset({aten.add.Tensor, aten.sub.Tensor})
LINEAR = _SUMS | _DOTS | LINEAR_IN_FIRST | {aten.mul.Tensor}


def make_plain_zeros(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Return ordinary zeros for aten._efficientzerotensor, whatever levels are active.

    Formulas may treat a tensor of rank 0 as a Python number, which torch then reads: neither a
    wrapper nor a fake tensor has data. Functional tensors wrap fake ones, and the tensors that
    their formulas save for a backward pass must be fake too.
    """
    single = tuple(args[0]) == () and not is_functionalizing()
    with functions_off(), no_dispatch() if single else hide_own_tensors():
        zeros: Any = torch.zeros(*args, **kwargs)
        zeros.never_moves = not zeros.is_inference()
        marking.used = True
        for told in aside.told:
            told(zeros)
        return zeros


class _Marking:
    """A flag: True once zeros were marked, as forward mode and exports do."""

    used = False


marking = _Marking()


def simplify_linear(func: Any, args: tuple, kwargs: dict) -> Any:
    """Return zeros, or a simpler call, for an operator of `LINEAR` on marked zeros; else None."""
    x, y = args[:2]
    if func not in _SUMS:
        second = func is aten.mul.Tensor or func in _DOTS
        return (
            _make_product_zeros(func, x, y)
            if is_marked_zero(x) or (second and is_marked_zero(y))
            else None
        )
    if is_marked_zero(x) and func is aten.add.Tensor and not kwargs:
        x, y = y, x
    if is_marked_zero(y) and isinstance(x, torch.Tensor) and _has_sum_metadata(x, y):
        return aten.clone.default, (x,), {}
    return None


def _make_product_zeros(func: Any, x: Any, y: Any) -> torch.Tensor:
    """Return the product of zeros with another operand."""
    with functions_off(), no_dispatch():
        dtype = torch.result_type(x, y)
        tensors = [a for a in (x, y) if isinstance(a, torch.Tensor)]
        shape = broadcast_shapes(*(() if func in _DOTS else (a.shape for a in tensors)))
        devices = [a.device for a in tensors]  # a CPU scalar combines with any device
        device = next((d for d in devices if d.type != "cpu"), devices[0])
    return make_plain_zeros(shape, dtype=dtype, device=device)


def _has_sum_metadata(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return True if a tensor has the shape, dtype and device of its sum with another."""
    with functions_off():
        if x.device != y.device:  # a fake tensor's is "meta" without dispatch
            return False
        with no_dispatch():
            same = torch.result_type(x, y) == x.dtype
            return same and broadcast_shapes(x.shape, y.shape) == x.shape


def is_marked_zero(a: Any) -> bool:
    """Return True if a value at any level is marked zeros and has not been written to."""
    while isinstance(a, Wrapper) and getattr(a, "axis", None) is None:
        if "unjoined" in a.__dict__:  # it has a tangent
            return False
        a = a.value
    plain = type(a) is torch.Tensor or (has_foreign_mode() and is_compiler_tensor(a))
    if not plain or not getattr(a, "never_moves", False):
        return False
    with torch._C.DisableTorchFunction():
        return a._version == 0
