"""Products of which one factor moves: the tangent is the same product of that factor's tangent.

Torch's formulas make zeros for the other one's tangent, multiply, and add. A product of zeros with
an inf is nan there, where reverse mode has the derivative.
"""

from __future__ import annotations

from typing import Any

import torch

from forall._autodiff.dual_tensor import DualLevel
from forall._compat.dispatch_state import autograd_below, in_backward, users_tangents
from forall._compat.lazy_bits import attach_tangent
from forall._compat.private_api import split_tangent

aten = torch.ops.aten

# Where in the arguments the factors are.
_FACTORS = {
    aten.mm.default: (0, 1),
    aten.mv.default: (0, 1),
    aten.bmm.default: (0, 1),
    aten.addmm.default: (1, 2),
    aten.addmv.default: (1, 2),
    aten.baddbmm.default: (1, 2),
    aten._grouped_mm.default: (0, 1),
}
# Torch has no forward formula of these.
_OWN = frozenset({aten._grouped_mm.default})
_UNBIASED = {
    aten.addmm.default: aten.mm.default,
    aten.addmv.default: aten.mv.default,
    aten.baddbmm.default: aten.bmm.default,
}
PRODUCTS = frozenset(_FACTORS)


def of_one_factor(level: DualLevel, func: Any, args: tuple, kwargs: dict) -> Any:
    """A product with its tangent, one level down, where exactly one factor moves; else None.

    Where torch has no formula, also where both do.
    """
    if users_tangents():
        return None  # which a factor may have that is no value of ours
    with autograd_below(grad=level.outer_grad, forward=True):
        pairs = [level.halves(a) for a in args]
        i, j = _FACTORS[func]
        both = pairs[i][1] is not None and pairs[j][1] is not None
        if (pairs[i][1] is None and pairs[j][1] is None) or (both and func not in _OWN):
            return None
        if in_backward() and any(t is None and _moves_below(p) for p, t in pairs):
            return None
        primals = [p for p, _ in pairs]
        tangents = [p if t is None else t for p, t in pairs]
        primal = func(*primals, **kwargs)
        if i and pairs[0][1] is None:  # a bias that adds nothing
            tangent = _UNBIASED[func](*tangents[1:3])
            alpha = kwargs.get("alpha", 1)
            tangent = tangent if alpha == 1 else tangent * alpha
        elif both:
            tangent = func(tangents[0], *primals[1:], **kwargs) + func(
                primals[0], *tangents[1:], **kwargs
            )
        else:
            tangent = func(*tangents, **kwargs)
        moving = primals[i] if pairs[j][1] is None else primals[j]
        if moving.requires_grad and not tangent.requires_grad and level.outer_grad:
            # It has a derivative in what moves, which is zero: who asks for it is not to be told
            # that there is none.
            tangent = tangent + moving.narrow(0, 0, 0).sum()
        return attach_tangent(primal, tangent)


def _moves_below(primal: torch.Tensor) -> bool:
    """Whether what a node has saved carries a tangent of the level without being its value."""
    return split_tangent(primal, level=0)[1] is not None
