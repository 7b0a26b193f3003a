"""The operators by which the ranks of a mesh communicate: their schemas and derivatives.

Each has waited when it returns. Those of torch (``torch.ops._c10d_functional``) return before the
data have come, and a second operator waits: it returns the very tensor that it is given, so a
recorder that knows tensors by identity takes it for dead.

Their derivatives are those of the program of all ranks: the transpose of a sum over ranks is a sum
over ranks. The kernels are in `_mesh.rank_kernels`, which is imported with the first mesh.
"""

from __future__ import annotations

from typing import Any

import torch

from forall._core.collective_ops import add_linear, add_node, find_hits, swap

Tensor = torch.Tensor
library = torch.library.Library("forall", "FRAGMENT")


def _define(name: str, more: str = "") -> Any:
    library.define(f"ranks_{name}(Tensor x, {more}str group) -> Tensor")
    return getattr(torch.ops.forall, f"ranks_{name}").default


SUM = _define("sum")  # (*S) -> (*S)
GATHER = _define("gather", "int[] sizes, ")  # (n, *S) -> (N, *S), rank by rank
SCATTER = _define("scatter", "int[] sizes, ")  # (N, *S) -> (n, *S): this rank's rows of the sum
EXCHANGE = _define("exchange", "int[] give, int[] take, ")  # rows, by rank, to and from each rank
# From the number of this rank's examples to those of all ranks: the start of a call.
BEGIN = _define("begin", "str what, ")
EXTREME = _define("extreme", "str kind, int[] sizes, ")  # (n, *S) -> (*S): of the rows of all ranks


class ExtremeOfRanks(torch.autograd.Function):
    """The node of the largest or smallest row; rows that have it share its derivative equally."""

    @staticmethod
    def forward(_x, made, _op, _rest):
        return made[0]

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, _, _, (_kind, _sizes, ctx.group) = inputs
        ctx.save_for_backward(x, output)
        ctx.save_for_forward(x, output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, g):
        if g is None:
            return None, None, None, None
        hits, count = _count_hits(*ctx.saved_tensors, ctx.group)
        return torch.where(hits, SUM(g, ctx.group) / count, 0), None, None, None

    @staticmethod
    def jvp(ctx, t, *_):
        if t is None:
            return None
        hits, count = _count_hits(*ctx.saved_tensors, ctx.group)
        return SUM(torch.where(hits, t, 0).sum(0), ctx.group) / count


def _count_hits(x: Tensor, y: Tensor, group: str) -> tuple[Tensor, Tensor]:
    """Return which rows have the extreme value ``y``, and how many of all ranks."""
    hits = find_hits(x, y)
    return hits, SUM(hits.sum(0), group)


add_linear(SUM, SUM)
add_linear(GATHER, SCATTER)
add_linear(SCATTER, GATHER)
add_linear(EXCHANGE, EXCHANGE, swap)
add_node(EXTREME, ExtremeOfRanks)
