"""Sums, products, quotients and maxima of which one operand has a tangent.

Torch's formulas make zeros for the other operand's tangent, multiply, and add. The product of a
zero and an inf is nan, although reverse mode has the right derivative. Zeros without memory, which
torch takes for pointwise operators, are exact, but cost ten times the operator: torch asks Python
for the shape of each product with them. For `jvp_rules`, both operands may have one.
"""

from __future__ import annotations

from typing import Any

import torch

from forall._autodiff.dual_tensor import (
    DualLevel,
    attach_own_tangent,
    read_tangent,
)
from forall._compat.dispatch_state import (
    enable_autograd_below,
    has_users_tangents,
    is_in_backward,
)

aten = torch.ops.aten

_ORDERS = {aten.maximum.default: torch.gt, aten.minimum.default: torch.lt}
_POINTWISE = _ORDERS.keys() | {
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.mul.Tensor,
    aten.div.Tensor,
}
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
BINARY_OPS = _POINTWISE | _FACTORS.keys()


def push_binary_op(level: DualLevel, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return the result with its tangent, one level down, or None where torch's formula is right.

    That is where both operands have a tangent, unless torch has no formula, or where no argument
    has one.
    """
    if has_users_tangents():
        return None  # an operand that is no value of the level may have a tangent of the user's
    with enable_autograd_below(grad=level.outer_grad, forward=True):
        pairs = [level.split_dual(a) for a in args]
        i, j = _FACTORS.get(func, (0, 1))
        both = pairs[i][1] is not None and pairs[j][1] is not None
        if all(t is None for _, t in pairs) or (both and func not in _WITHOUT_FORMULA):
            return None
        if is_in_backward() and any(t is None and read_tangent(p) is not None for p, t in pairs):
            return None  # a tensor saved by a node has a tangent, and is no value of the level
        halves = push_pairs(level, func, pairs, kwargs)
        return None if halves is None else attach_own_tangent(*halves)


def push_pairs(
    level: DualLevel, func: Any, pairs: list[tuple[Any, Any]], kwargs: dict
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the primal and the tangent of the result, or None where torch's formula is right.

    Each operand is given with its tangent, or None. Both may have one.
    """
    if func in _POINTWISE:
        return _push_pointwise(level, func, pairs, kwargs)
    i, j = _FACTORS[func]
    both = pairs[i][1] is not None and pairs[j][1] is not None
    if both and i:
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
    return primal, _connect(level, tangent, moving)


def _connect(level: DualLevel, tangent: torch.Tensor, moving: torch.Tensor) -> torch.Tensor:
    """Return a tangent whose derivative in the operand that moves is known, though it may be zero.

    Else autograd would report an unused input.
    """
    if moving.requires_grad and not tangent.requires_grad and level.outer_grad:
        return tangent + torch.atleast_1d(moving).narrow(0, 0, 0).sum()
    return tangent


def _push_pointwise(
    level: DualLevel, func: Any, pairs: list[tuple[Any, Any]], kwargs: dict
) -> tuple[torch.Tensor, torch.Tensor] | None:
    (x, dx), (y, dy) = pairs
    if not (_is_dense(x) and _is_dense(y)):
        return None
    both = all(t is not None for _, t in pairs)
    if both and func in _ORDERS:
        return None
    result = func(x, y, **kwargs)
    if both:
        return result, _compute_tangent_of_both(func, x, dx, y, dy, result, kwargs)
    if func is aten.mul.Tensor:
        tangent = dx * y if dy is None else x * dy
    elif func is aten.div.Tensor:
        tangent = dx / y if dy is None else -(dy * result) / y
    elif func in _ORDERS:  # equal operands have half of the derivative each
        share = torch.where(x == y, 0.5, _ORDERS[func](x, y).to(result.dtype))
        return result, (share * dx if dy is None else dy - share * dy)
    else:
        tangent = dx if dy is None else dy * _get_factor(func, kwargs)
        if tangent.shape != result.shape:
            tangent = tangent.expand_as(result)
        # The tangent has memory of its own, since it is written to with the result.
        is_new = dx is None and tangent.dtype == result.dtype and 0 not in tangent.stride()
        tangent = tangent if is_new else tangent.to(result.dtype, copy=True)
        return result, tangent
    return result, _connect(level, tangent, x if dy is None else y)


def _compute_tangent_of_both(
    func: Any,
    x: torch.Tensor,
    dx: torch.Tensor,
    y: torch.Tensor,
    dy: torch.Tensor,
    result: torch.Tensor,
    kwargs: dict,
) -> torch.Tensor:
    """Return the tangent of a result whose operands both have one, by torch's formulas."""
    if func is aten.mul.Tensor:
        return dy * x + dx * y
    if func is aten.div.Tensor:
        return (dx - dy * result) / y
    alpha = kwargs.get("alpha", 1)
    return func(dx, dy if alpha == 1 else dy * alpha)


def _get_factor(func: Any, kwargs: dict) -> Any:
    """Return the number by which a sum or a difference multiplies its second operand."""
    alpha = kwargs.get("alpha", 1)
    return alpha if func is aten.add.Tensor else -alpha


def _is_dense(a: Any) -> bool:
    return not isinstance(a, torch.Tensor) or (a.layout is torch.strided and not a.is_nested)
