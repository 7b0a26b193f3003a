"""Torch's forward formulas that cannot be taken at their word, and what is done instead.

A formula is run one level down, so a second derivative differentiates the formula itself. Some read
what their operator saved (a mean, a factorisation), which has no derivative of its own: torch does
not differentiate its forward formulas a second time, and terms would go missing without a word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._autodiff.decompositions.backwards import BACKWARD
from forall._autodiff.decompositions.table import FORWARD
from forall._compat.dispatch_state import dispatch_modes, in_backward
from forall._compat.private_api import DispatchMode, pop_mode, push_mode
from forall._compat.storage import has_memory, is_alone
from forall._compat.versions import WRONG_FORMULAS
from forall._compat.wrapper_tensor import Wrapper, has_history, innermost
from forall._core.levels import moves

if TYPE_CHECKING:
    from collections.abc import Iterable

aten = torch.ops.aten

_WRONG = frozenset(
    {
        aten.scatter_reduce.two,  # zero where the product is not
        aten.triangular_solve.default,  # of the transposed system another triangle
        aten.normal.Tensor_Tensor,  # of the mean's shape, though the deviation's is larger
        aten.masked_scatter_backward.default,  # of the gradient's shape, not of the source's
        *WRONG_FORMULAS,
    }
)

# Right once. Their backwards are right at any order, so the push-forward is taken from these.
_ONCE = frozenset(
    {
        # read what was saved
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
        # give zeros, and rows of minus infinity, a case of their own that lacks terms
        aten.cumprod.default,
        aten._safe_softmax.default,
        # write over what they use
        aten.linalg_householder_product.default,
        aten.copysign.Tensor,
        aten.copysign.Scalar,
        aten.dist.default,
        aten.linalg_vector_norm.default,
        aten.renorm.default,
        aten.std.correction,
        aten.std_mean.correction,
        # call what has no derivative
        aten.glu.default,
        aten.glu_backward.default,
        aten.hardsigmoid.default,
        # write into zeros without memory, or have a reverse pass that does
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
# Right at any order of forward mode; in reverse, nan from the diagonal of a quotient.
_FORWARD = frozenset({aten._linalg_eigh.default})

# Formulas that write over a power or an exponential of theirs unless tensors are of a subclass.
_IN_PLACE = frozenset(
    {
        aten._softmax.default,
        aten._log_softmax.default,
        aten.logsumexp.default,
    }
)
# Formulas that write into the tangents of what does not move, which are zeros without memory: of
# how many arguments. Others must have none.
FILLED = {aten.mse_loss_backward.default: 3, aten.binary_cross_entropy.default: 2}
# All for which `is_trusted` need be asked.
ODD = _WRONG | _ONCE | _FORWARD | frozenset(FORWARD) | frozenset(BACKWARD)


def is_trusted(func: Any, values: Iterable[Any]) -> bool:
    """Whether torch has a formula that holds for these values, as they are one level down."""
    if func in _FORWARD:
        return not any(isinstance(v, torch.Tensor) and has_history(v) for v in values)
    return func in _ONCE and not any(map(_is_at_stake, values))


def _is_at_stake(a: Any) -> bool:
    """Whether a derivative further out hangs on this value."""
    if not isinstance(a, torch.Tensor):
        return False
    inner = a
    while isinstance(inner, Wrapper) and not inner.requires_grad:
        inner = inner.value
    return inner.requires_grad or moves(a)


class _Nothing(DispatchMode):
    """Torch's formulas keep from writing in place while any mode is there."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


_NOTHING = _Nothing()


# What torch's backwards of norms write into what they have just computed, which the tangent may be
# made of: a derivative further out needs it as it was.
_FILLS = {
    aten.masked_fill_.Scalar: aten.masked_fill.Scalar,
    aten.masked_fill_.Tensor: aten.masked_fill.Tensor,
}


def made_anew(func: Any, value: Any) -> Any:
    """What gives anew what a formula writes into a value of its own; None for any other write."""
    fill = _FILLS.get(func)
    if fill is None or not in_backward() or value._is_view():
        return None
    inner = innermost(value)
    # Nobody has another name for it, so nobody sees that it is another tensor now.
    return fill if has_history(value) and has_memory(inner) and is_alone(inner) else None


class out_of_place:
    """Let a formula keep what it computed, as autograd may have saved it.

    Wrappers are of a subclass anyway, and a mode of the user's is a mode.
    """

    __slots__ = ("on",)

    def __init__(self, func: Any, values: list) -> None:
        self.on = (
            func in _IN_PLACE
            and not dispatch_modes()
            and any(isinstance(v, torch.Tensor) and v.requires_grad for v in values)
        )

    def __enter__(self) -> None:
        if self.on:
            push_mode(_NOTHING)

    def __exit__(self, *_: object) -> None:
        if self.on:
            pop_mode(None)
