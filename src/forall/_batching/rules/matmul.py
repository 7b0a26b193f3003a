"""The matmul family: a shared operand stays unstacked."""

from __future__ import annotations

import torch

from forall._batching.families import by_front, Stack
from forall._batching.table import register

aten = torch.ops.aten


@by_front
def _mm(size, x, w):
    if isinstance(x, Stack) and isinstance(w, Stack):
        return torch.bmm(x.v, w.v)
    if isinstance(x, Stack):
        return torch.matmul(x.v, w)
    return torch.matmul(x, w.v)


@by_front
def _mv(size, x, w):
    if not isinstance(w, Stack):
        return torch.matmul(x.v, w)
    x = x.v if isinstance(x, Stack) else x
    return torch.matmul(x, w.v.unsqueeze(-1)).squeeze(-1)


register({aten.mm.default: _mm, aten.mv.default: _mv})
