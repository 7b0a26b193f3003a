"""Lazy bits of tensors: a conjugation or negation still to be done, and zeros without memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import is_inference_mode_enabled

from forall._compat.dispatch_state import (
    CONJUGATE,
    NEGATIVE,
    VIEWS,
    ZEROS,
    is_excluded,
    set_excluded,
)
from forall._compat.private_api import split_tangent

if TYPE_CHECKING:
    from collections.abc import Callable

_DUAL = {
    torch.ops.aten._unpack_dual.default,
    torch.ops.aten._fw_primal.default,
    torch.ops.aten._make_dual.default,
}


def is_zero_tensor(t: torch.Tensor) -> bool:
    """Return True if a tensor is zeros that have no memory."""
    return t._is_zerotensor()


def copy_lazy_bits(wrapper: torch.Tensor, value: torch.Tensor) -> None:
    """Set the conj and neg bits of a wrapper like those of its value."""
    if value.is_conj():
        torch._C._set_conj(wrapper, True)
    if value.is_neg():
        torch._C._set_neg(wrapper, True)


def attach_tangent(primal: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
    """Return a dual of torch's own; its forward mode takes no view if these bits differ."""
    if tangent.is_conj() != primal.is_conj():
        tangent = tangent.resolve_conj() if tangent.is_conj() else tangent.conj_physical().conj()
    if tangent.is_neg() != primal.is_neg():
        tangent = tangent.resolve_neg() if tangent.is_neg() else tangent.neg()._neg_view()
    return torch._VF._make_dual(primal, tangent, level=0)


def materialize_tangent(a: Any) -> Any:
    """Return a tensor with a tangent that has memory, even if it is zero."""
    if not isinstance(a, torch.Tensor) or not a.is_floating_point():
        return a
    primal, tangent = split_tangent(a, level=0)
    if tangent is not None:
        return a
    if 0 in primal.stride():  # expanded, where no tangent can lie in the same way
        primal = primal.contiguous()
    return attach_tangent(primal, torch.zeros_like(primal))


LAZY_KEYS = (CONJUGATE, NEGATIVE, ZEROS)


def set_lazy_bits(on: bool) -> None:
    """Switch on or off that kernels look at the conj, neg and zero bits of their tensors.

    Inside a Python handler kernels do not: for the handler's own tensors the bits are resolved. But
    many a kernel (``pinv``, complex ``lstsq``) calls others with a lazy conjugate that it made.
    """
    for key in LAZY_KEYS:
        set_excluded(key, not on)


def call_with_lazy_bits(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Call an operator from a Python handler, with kernels that look at the lazy bits.

    In inference mode the operators `_DUAL` are not decomposed on their way here. For a tensor made
    before the mode, their only kernel is autograd's own for views.
    """
    if not is_excluded(CONJUGATE):
        return func(*args, **kwargs)
    dual = func in _DUAL and is_inference_mode_enabled() and is_excluded(VIEWS)
    set_lazy_bits(True)
    if dual:
        set_excluded(VIEWS, False)
    try:
        return func(*args, **kwargs)
    finally:
        set_lazy_bits(False)
        if dual:
            set_excluded(VIEWS, True)


class disable_lazy_bits:
    """A block inside `call_with_lazy_bits` for operations on a wrapper itself."""

    __slots__ = ("was",)

    def __enter__(self) -> None:
        self.was = [is_excluded(key) for key in (CONJUGATE, NEGATIVE)]
        set_excluded(CONJUGATE, True)
        set_excluded(NEGATIVE, True)

    def __exit__(self, *_: object) -> None:
        set_excluded(CONJUGATE, self.was[0])
        set_excluded(NEGATIVE, self.was[1])


class pass_lazy_zeros:
    """A block in which zeros without memory reach the handlers of levels.

    Otherwise the kernel for such zeros comes first. It moves wrappers to the meta device and
    returns plain zeros that have the history of the examples. Graphs of forward mode are full of
    such zeros.
    """

    __slots__ = ("was",)

    passing = True

    def __enter__(self) -> None:
        self.was = is_excluded(ZEROS)
        set_excluded(ZEROS, self.passing)

    def __exit__(self, *_: object) -> None:
        set_excluded(ZEROS, self.was)


class keep_lazy_zeros(pass_lazy_zeros):
    """A block inside `pass_lazy_zeros` for plain kernels, which must not read such zeros."""

    __slots__ = ()
    passing = False
