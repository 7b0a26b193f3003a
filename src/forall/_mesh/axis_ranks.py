"""The ranks of a named axis, and each collective over all their examples.

The examples of the axis are those of rank 0, then those of rank 1, and so on. Each method takes the
stack of this rank's examples, and is named for its collective. It sends one message at most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from forall._core import rank_ops as ops
from forall._mesh.message_place import find_place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forall._mesh.rank_group import RankGroup

Tensor = torch.Tensor


class AxisRanks:
    """The ranks of an axis, of which rank ``r`` has ``sizes[r]`` examples."""

    def __init__(self, group: RankGroup, sizes: Sequence[int]) -> None:
        self.group = group
        self.sizes = [*sizes]
        self.total = sum(sizes)
        self.start = sum(sizes[: group.rank])  # the number of this rank's first example
        self.local = sizes[group.rank]

    def _where(self) -> tuple[str, str]:
        """Return what a message is named by: the group, and the place of the user's code."""
        return self.group.handle, find_place()

    def add_up(self, x: Tensor) -> Tensor:
        """Return the sum over ranks of a value that each of them has."""
        return ops.SUM(x, *self._where())

    def psum(self, stack: Tensor) -> Tensor:
        return self.add_up(stack.sum(0))

    def pmax(self, stack: Tensor) -> Tensor:
        return ops.EXTREME(stack, "max", self.sizes, *self._where())

    def pmin(self, stack: Tensor) -> Tensor:
        return ops.EXTREME(stack, "min", self.sizes, *self._where())

    def all_gather(self, stack: Tensor) -> Tensor:
        return ops.GATHER(stack, self.sizes, *self._where())

    def psum_scatter(self, stack: Tensor) -> Tensor:
        """(n, N, *S) -> (n, *S)."""
        return ops.SCATTER(stack.sum(0), self.sizes, *self._where())

    def all_to_all(self, stack: Tensor) -> Tensor:
        """(n, N, *S) -> (n, N, *S): row i, entry j is row j, entry i of all ranks' rows."""
        n, sizes, inner = self.local, self.sizes, stack.shape[2:]
        counts = [n * size for size in sizes]
        rows = stack.transpose(0, 1).reshape(-1, *inner)  # by the example that they are for
        found = ops.EXCHANGE(rows, counts, counts, *self._where()).split(counts)
        blocks = [f.reshape(n, size, *inner) for f, size in zip(found, sizes, strict=True)]
        return torch.cat(blocks, 1)

    def ppermute(self, stack: Tensor, sources: list[int], targets: list[int]) -> Tensor:
        """Row ``targets[i]`` of the result is row ``sources[i]``; others are zeros."""
        mine = range(self.start, self.start + self.local)
        rank_of = [rank for rank, size in enumerate(self.sizes) for _ in range(size)]
        pairs = [*zip(sources, targets, strict=True)]
        given = sorted((p for p in pairs if p[0] in mine), key=lambda p: p[1])
        taken = sorted((p for p in pairs if p[1] in mine), key=lambda p: (rank_of[p[0]], p[1]))
        give = [sum(rank_of[t] == rank for _, t in given) for rank in range(self.group.size)]
        take = [sum(rank_of[s] == rank for s, _ in taken) for rank in range(self.group.size)]
        rows = _select(stack, [s - self.start for s, _ in given])
        if any(rank_of[s] != rank_of[t] for s, t in pairs):
            rows = ops.EXCHANGE(rows, give, take, *self._where())
        else:  # all stay on their ranks
            rows = _select(rows, [given.index(p) for p in taken])
        by_target = {t - self.start: i for i, (_, t) in enumerate(taken)}
        return _place(rows, by_target, self.local)


def split_evenly(total: int, count: int, rank: int) -> range:
    """Return which of ``total`` examples a rank has, as `torch.chunk` splits them."""
    most = -(-total // count)
    return range(min(total, rank * most), min(total, (rank + 1) * most))


def _select(stack: Tensor, rows: list[int]) -> Tensor:
    return stack.index_select(0, torch.tensor(rows, dtype=torch.int64, device=stack.device))


def _place(rows: Tensor, by_target: dict[int, int], count: int) -> Tensor:
    """Return ``count`` rows, of which some are of ``rows``, and the others zeros."""
    with_zeros = torch.cat([rows, rows.new_zeros((1, *rows.shape[1:]))])
    return _select(with_zeros, [by_target.get(i, len(by_target)) for i in range(count)])
