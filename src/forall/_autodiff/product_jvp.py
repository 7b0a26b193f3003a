"""Products of which one factor has a tangent: the result's tangent is the product with it.

Torch's formulas make zeros for the other factor's tangent, multiply, and add. The product of a zero
and an inf is nan, although reverse mode has the right derivative.
"""

from __future__ import annotations

from typing import Any

import torch

from forall._autodiff.dual_tensor import DualLevel
from forall._compat.dispatch_state import enable_autograd_below, has_users_tangents, is_in_backward
from forall._compat.lazy_bits import attach_tangent
from forall._compat.private_api import split_tangent

aten = torch.ops.aten

# The indices of the factors among the arguments.
_FACTORS = {
    aten.mm.default: (0, 1),
    aten.mv.default: (0, 1),
    aten.bmm.default: (0, 1),
    aten.addmm.default: (1, 2),
    aten.addmv.default: (1, 2),
    aten.baddbmm.default: (1, 2),
    aten._grouped_mm.default: (0, 1),
}
# Operators that have no forward formula in torch.
_WITHOUT_FORMULA = frozenset({aten._grouped_mm.default})
_UNBIASED = {
    aten.addmm.default: aten.mm.default,
    aten.addmv.default: aten.mv.default,
    aten.baddbmm.default: aten.bmm.default,
}
PRODUCTS = frozenset(_FACTORS)


def push_product(level: DualLevel, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return the product with its tangent, one level down, or None where torch's formula is right.

    That is where both factors have a tangent, unless torch has no formula, or where no argument
    has one.
    """
    if has_users_tangents():
        return None  # a factor that is no value of the level may have a tangent of the user's
    with enable_autograd_below(grad=level.outer_grad, forward=True):
        pairs = [level.split_dual(a) for a in args]
        i, j = _FACTORS[func]
        both = pairs[i][1] is not None and pairs[j][1] is not None
        if all(t is None for _, t in pairs) or (both and func not in _WITHOUT_FORMULA):
            return None
        if is_in_backward() and any(t is None and _has_hidden_tangent(p) for p, t in pairs):
            return None
        primals = [p for p, _ in pairs]
        tangents = [p if t is None else t for p, t in pairs]
        primal = func(*primals, **kwargs)
        moving = primals[i] if pairs[j][1] is None else primals[j]
        if pairs[i][1] is None and pairs[j][1] is None:  # the bias alone has a tangent
            moving, beta = primals[0], kwargs.get("beta", 1)
            tangent = torch.zeros_like(primal) + (tangents[0] if beta == 1 else tangents[0] * beta)
        elif i and pairs[0][1] is None:  # a bias without a tangent
            tangent = _UNBIASED[func](*tangents[1:3])
            alpha = kwargs.get("alpha", 1)
            tangent = tangent if alpha == 1 else tangent * alpha
        elif both:
            tangent = func(tangents[0], *primals[1:], **kwargs) + func(
                primals[0], *tangents[1:], **kwargs
            )
        else:
            tangent = func(*tangents, **kwargs)
        if moving.requires_grad and not tangent.requires_grad and level.outer_grad:
            # The derivative of the tangent in that tensor is zero: it is connected to the tensor,
            # so that autograd does not report an unused input.
            tangent = tangent + moving.narrow(0, 0, 0).sum()
        return attach_tangent(primal, tangent)


def _has_hidden_tangent(primal: torch.Tensor) -> bool:
    """True if a tensor saved by a node carries a tangent of the level without being its value."""
    return split_tangent(primal, level=0)[1] is not None
