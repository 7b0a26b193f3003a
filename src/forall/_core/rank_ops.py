"""The operators by which the ranks of a mesh communicate: their schemas and derivatives.

Each names the group of its ranks by a handle, and a message also the place of the user's code where
it is sent. So a recorded program sends the very message that the function does.

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
    library.define(f"ranks_{name}(Tensor x, {more}str group, str place) -> Tensor")
    return getattr(torch.ops.forall, f"ranks_{name}").default


SUM = _define("sum")  # (*S) -> (*S)
GATHER = _define("gather", "int[] sizes, ")  # (n, *S) -> (N, *S), rank by rank
SCATTER = _define("scatter", "int[] sizes, ")  # (N, *S) -> (n, *S): this rank's rows of the sum
EXCHANGE = _define("exchange", "int[] give, int[] take, ")  # rows, by rank, to and from each rank
EXTREME = _define("extreme", "str kind, int[] sizes, ")  # (n, *S) -> (*S): of the rows of all ranks
# The start of a call, which is the outermost one over its group or inside another: from the number
# of this rank's examples to those of all ranks. A recorded program expects those that it has met.
library.define(
    "ranks_begin(Tensor x, bool outermost, str group, str place, int[] expected) -> Tensor"
)
BEGIN = torch.ops.forall.ranks_begin.default
library.define("ranks_end(Tensor x, str group, str place) -> ()")  # the end of an outermost call
END = torch.ops.forall.ranks_end.default


class OtherSizesError(RuntimeError):
    """The ranks have other numbers of examples than where a program was recorded."""


class ExtremeOfRanks(torch.autograd.Function):
    """The node of the largest or smallest row; rows that have it share its derivative equally."""

    @staticmethod
    def forward(_x, made, _op, _rest):
        return made[0]

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, _, _, (_kind, _sizes, *ctx.where) = inputs
        ctx.save_for_backward(x, output)
        ctx.save_for_forward(x, output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, g):
        if g is None:
            return None, None, None, None
        hits, count = _count_hits(*ctx.saved_tensors, ctx.where)
        return torch.where(hits, SUM(g, *ctx.where) / count, 0), None, None, None

    @staticmethod
    def jvp(ctx, t, *_):
        if t is None:
            return None
        hits, count = _count_hits(*ctx.saved_tensors, ctx.where)
        return SUM(torch.where(hits, t, 0).sum(0), *ctx.where) / count


def _count_hits(x: Tensor, y: Tensor, where: list[str]) -> tuple[Tensor, Tensor]:
    """Return which rows have the extreme value ``y``, and how many of all ranks."""
    hits = find_hits(x, y)
    return hits, SUM(hits.sum(0), *where)


add_linear(SUM, SUM)
add_linear(GATHER, SCATTER)
add_linear(SCATTER, GATHER)
add_linear(EXCHANGE, EXCHANGE, swap)
add_node(EXTREME, ExtremeOfRanks)
