"""Tables: an index of an example is a row of the stack of tables."""

from __future__ import annotations

import torch

from forall._batching.families import Stack, by_front
from forall._batching.table import register

aten = torch.ops.aten
Tensor = torch.Tensor


def offset(indices: Stack | Tensor, size: int, each: int) -> Tensor:
    """(B, *I): indices into B tables of ``each`` rows, laid one after another."""
    v = indices.v if isinstance(indices, Stack) else indices.unsqueeze(0)
    first = torch.arange(0, size * each, each or 1, device=v.device, dtype=v.dtype)[:size]
    return v + first.view(size, *(1,) * (v.dim() - 1))


@by_front
def _embedding(size, weight, indices, *_):
    if not isinstance(weight, Stack):
        return aten.embedding.default(weight, indices.v)
    rows = weight.v.shape[1]
    return aten.embedding.default(weight.v.flatten(0, 1), offset(indices, size, rows))


@by_front
def _embedding_dense_backward(size, g, indices, rows, padding, scale):
    i = offset(indices, size, rows)
    g = g.v if isinstance(g, Stack) else g.expand(size, *g.shape)
    out = aten.embedding_dense_backward.default(g, i, size * rows, -1, scale)
    out = out.view(size, rows, out.shape[-1])
    if padding >= 0:  # one padding row per table, where the operator knows of one in all
        out.select(1, padding).zero_()
    return out


register(
    {
        aten.embedding.default: _embedding,
        aten.embedding_dense_backward.default: _embedding_dense_backward,
    }
)
