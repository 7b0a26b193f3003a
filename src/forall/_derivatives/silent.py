"""Operators whose tangent torch loses without a word, though it has a derivative of them.

Forward mode answers zero, or a wrong number, where it should say that there is no formula. They
get their tangent from their backward, as those do that say so (`forall._derivatives.reversed`).
"""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten

_TORCHS_OWN = frozenset({"aten", "prims", "prim"})
_ALWAYS = frozenset(
    {
        # Its formula takes the whole tangent of the coefficients, also beside their triangle.
        aten.triangular_solve.default,
    }
)
# Of these the formula has no case for products.
_PRODUCTS = frozenset({aten.scatter_reduce.two, aten.scatter_reduce_.two})


def loses_tangents(func: Any, args: tuple) -> bool:
    """Whether torch's forward mode cannot be asked.

    What others have registered, in torch.library or C++, has a backward at most: where nothing
    requires grad torch runs it below autograd, and tangents are dropped there.
    """
    if func in _PRODUCTS:
        return "prod" in args
    return func.namespace not in _TORCHS_OWN or func in _ALWAYS
