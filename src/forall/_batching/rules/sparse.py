"""Products with a sparse matrix that all examples share: that of a dense one, where it is ours."""

from __future__ import annotations

from typing import Any

import torch

from forall._batching.families import level_on
from forall._batching.table import register

aten = torch.ops.aten


def _addmm(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """beta * x + alpha * (a @ b), where x is not read for a beta of 0."""
    x, a, b = args
    alpha, beta = kwargs.get("alpha", 1), kwargs.get("beta", 1)
    with level_on(level):
        out = aten.mm.default(a, b)
        out = out if alpha == 1 else aten.mul.Tensor(out, alpha)
        return aten.add.Tensor(out, x, alpha=beta) if beta else out


register({aten._sparse_addmm.default: _addmm})
