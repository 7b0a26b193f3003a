"""Products of which one factor moves: the tangent is the same product of that factor's tangent.

Torch's formulas make zeros for the other one's tangent, multiply, and add. A product of zeros with
an inf is nan there, where reverse mode has the derivative.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten

# Where in the arguments the factors are.
_FACTORS = {
    aten.mm.default: (0, 1),
    aten.mv.default: (0, 1),
    aten.bmm.default: (0, 1),
    aten.addmm.default: (1, 2),
    aten.addmv.default: (1, 2),
    aten.baddbmm.default: (1, 2),
}
_UNBIASED = {
    aten.addmm.default: aten.mm.default,
    aten.addmv.default: aten.mv.default,
    aten.baddbmm.default: aten.bmm.default,
}
PRODUCTS = frozenset(_FACTORS)


def pushed(
    func: Any, args: tuple, kwargs: dict, halves: Callable[[Any], tuple[Any, Any]]
) -> tuple[Any, Any] | None:
    """Primal and tangent of a product, or None where not exactly one factor moves.

    ``halves`` takes an argument apart into its primal and its tangent, None where it has none.
    """
    pairs = [halves(a) for a in args]
    i, j = _FACTORS[func]
    moving = [p is not None and t is not None for p, t in pairs]
    if moving[i] == moving[j]:
        return None
    primals = tuple(p for p, _ in pairs)
    tangents = tuple(p if t is None else t for p, t in pairs)
    primal = func(*primals, **kwargs)
    if i == 0 or moving[0]:
        return primal, func(*tangents, **kwargs)
    tangent = _UNBIASED[func](*tangents[1:3])
    alpha = kwargs.get("alpha", 1)
    return primal, tangent if alpha == 1 else tangent * alpha
