"""Torch's forward-mode formulas that are wrong, or wrong when they are differentiated again.

A formula runs one level down, so a second derivative differentiates the formula itself. Some
formulas read values that their operator saved (a mean, a factorisation) and that have no derivative
of their own. Torch never differentiates its forward formulas, so terms would silently be missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._autodiff.decompositions.backwards import BACKWARD
from forall._autodiff.decompositions.table import FORWARD
from forall._compat.dispatch_state import is_in_backward
from forall._compat.private_api import DispatchMode, count_dispatch_modes, pop_mode, push_mode
from forall._compat.storage import has_memory, is_sole_owner
from forall._compat.versions import WRONG_FORMULAS
from forall._compat.wrapper_tensor import Wrapper, has_history, unwrap_all
from forall._core.levels import has_any_tangent

if TYPE_CHECKING:
    from collections.abc import Iterable

aten = torch.ops.aten

_WRONG = frozenset(
    {
        aten.scatter_reduce.two,  # the tangent is zero where that of the product is not
        aten.triangular_solve.default,  # the wrong triangle for a transposed system
        aten.normal.Tensor_Tensor,  # the shape of the mean, even if that of std is larger
        aten.masked_scatter_backward.default,  # the shape of the gradient, not of the source
        *WRONG_FORMULAS,
    }
)

# Right for first derivatives. Their backwards are right at any order, so for higher derivatives the
# push-forward is derived from these.
_ONCE = frozenset(
    {
        # read saved values
        aten._linalg_det.default,
        aten._linalg_slogdet.default,
        aten._linalg_solve_ex.default,
        aten.native_layer_norm.default,
        aten.native_layer_norm_backward.default,
        aten.native_batch_norm.default,
        aten.native_batch_norm_backward.default,
        aten._native_batch_norm_legit.default,
        aten._native_batch_norm_legit.no_stats,
        aten._batch_norm_with_update.default,
        aten.cudnn_batch_norm.default,
        aten.miopen_batch_norm.default,
        # have a special case for zeros, or rows of minus infinity, that lacks terms
        aten.cumprod.default,
        aten._safe_softmax.default,
        # overwrite values that they use
        aten.linalg_householder_product.default,
        aten.copysign.Tensor,
        aten.copysign.Scalar,
        aten.dist.default,
        aten.linalg_vector_norm.default,
        aten.renorm.default,
        aten.std.correction,
        aten.std_mean.correction,
        # call an operator without a derivative
        aten.glu.default,
        aten.glu_backward.default,
        aten.hardsigmoid.default,
        # write into zero tensors without memory, or their backward does
        aten.mse_loss.default,
        aten.mse_loss_backward.default,
        aten.huber_loss.default,
        aten.huber_loss_backward.default,
        aten.soft_margin_loss.default,
        aten.soft_margin_loss_backward.default,
        aten.polar.default,
        aten.aminmax.default,
        aten.linalg_eig.default,
    }
    - _WRONG
)
# Right at any order of forward mode; in reverse mode nan, from the diagonal of a quotient.
_FORWARD = frozenset({aten._linalg_eigh.default})

# Formulas that overwrite a power or an exponential of theirs, unless tensors are of a subclass.
_IN_PLACE = frozenset(
    {
        aten._softmax.default,
        aten._log_softmax.default,
        aten.logsumexp.default,
    }
)
# Formulas that write into the zero tangents of arguments that have none, which are tensors without
# memory, and for how many arguments. Other arguments must have no tangent.
FILLED = {aten.mse_loss_backward.default: 3, aten.binary_cross_entropy.default: 2}
# All operators whose formula has to be checked before it is used.
SUSPECT_OPS = _WRONG | _ONCE | _FORWARD | frozenset(FORWARD) | frozenset(BACKWARD)


def has_valid_formula(func: Any, values: Iterable[Any]) -> bool:
    """True if torch's formula is correct for these values, which are one level down."""
    if func in _FORWARD:
        return not any(isinstance(v, torch.Tensor) and has_history(v) for v in values)
    return func in _ONCE and not any(map(_is_differentiated, values))


def _is_differentiated(a: Any) -> bool:
    """True if an outer level differentiates this value."""
    if not isinstance(a, torch.Tensor):
        return False
    inner = a
    while isinstance(inner, Wrapper) and not inner.requires_grad:
        inner = inner.value
    return inner.requires_grad or has_any_tangent(a)


class _PassThroughMode(DispatchMode):
    """A mode that does nothing. Torch's formulas do not write in place while any mode is on."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


_PASS_THROUGH = _PassThroughMode()


# Writes by torch's backwards of norms into values that they have just computed. The tangent may be
# computed from such a value, and an outer derivative needs it unchanged.
_FILLS = {
    aten.masked_fill_.Scalar: aten.masked_fill.Scalar,
    aten.masked_fill_.Tensor: aten.masked_fill.Tensor,
}


def find_functional_fill(func: Any, value: Any) -> Any:
    """Return the functional form of a formula's write into its own new value, or else None."""
    fill = _FILLS.get(func)
    if fill is None or not is_in_backward() or value._is_view():
        return None
    inner = unwrap_all(value)
    # The value has no alias, so it can be replaced by another tensor unnoticed.
    return fill if has_history(value) and has_memory(inner) and is_sole_owner(inner) else None


class prevent_overwrites:
    """Keep a formula from overwriting values that autograd may have saved.

    It is not needed for wrappers, which are of a subclass, nor while a mode of the user's is on.
    """

    __slots__ = ("on",)

    def __init__(self, func: Any, values: list) -> None:
        self.on = (
            func in _IN_PLACE
            and not count_dispatch_modes()
            and any(isinstance(v, torch.Tensor) and v.requires_grad for v in values)
        )

    def __enter__(self) -> None:
        if self.on:
            push_mode(_PASS_THROUGH)

    def __exit__(self, *_: object) -> None:
        if self.on:
            pop_mode(None)
