"""The kernels of the operators between ranks, `_core.rank_ops`: they agree, and communicate."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from forall._compat import process_groups
from forall._core.rank_ops import library
from forall._mesh.agreement import agree_once, communicate
from forall._mesh.rank_group import find_rank_group

if TYPE_CHECKING:
    from collections.abc import Sequence

Tensor = torch.Tensor


def _sum(x: Tensor, name: str) -> Tensor:
    ranks = find_rank_group(name)
    group = ranks.group
    return communicate(
        ranks, "a sum", x, lambda limit: process_groups.reduce(x, "sum", group, limit)
    )


def _gather(x: Tensor, sizes: Sequence[int], name: str) -> Tensor:
    ranks = find_rank_group(name)
    group = ranks.group
    return communicate(
        ranks,
        "a gather",
        x,
        lambda limit: process_groups.gather(x, sizes, group, limit),
        rows_differ=True,
    )


def _scatter(x: Tensor, sizes: Sequence[int], name: str) -> Tensor:
    ranks = find_rank_group(name)
    group = ranks.group
    return communicate(
        ranks, "a scatter", x, lambda limit: process_groups.scatter(x, sizes, group, limit)
    )


def _exchange(x: Tensor, give: Sequence[int], take: Sequence[int], name: str) -> Tensor:
    ranks = find_rank_group(name)
    group = ranks.group
    return communicate(
        ranks,
        "an exchange",
        x,
        lambda limit: process_groups.exchange(x, give, take, group, limit),
        rows_differ=True,
    )


def _find_extreme(x: Tensor, kind: str, sizes: Sequence[int], name: str) -> Tensor:
    """Return the extreme row of all ranks: gathered, since backends differ in what NaN gives."""
    ranks = find_rank_group(name)
    group = ranks.group
    find = torch.amax if kind == "max" else torch.amin
    own = find(x, 0, keepdim=True) if len(x) else x
    rows_of = [int(size > 0) for size in sizes]

    def run(limit: float | None) -> Tensor:
        rows = process_groups.gather(own, rows_of, group, limit)
        return find(rows, 0) if len(rows) else x.new_zeros(x.shape[1:])

    return communicate(ranks, f"a {kind}imum", x, run, rows_differ=True)


def _begin(x: Tensor, what: str, name: str) -> Tensor:
    ranks = find_rank_group(name)
    return torch.tensor(agree_once(ranks, what, None, int(x)), device="cpu")


_KERNELS = {
    "sum": _sum,
    "gather": _gather,
    "scatter": _scatter,
    "exchange": _exchange,
    "extreme": _find_extreme,
    "begin": _begin,
}
_registered: set[str] = set()


def register() -> None:
    """Give the operators their kernels, once in a process."""
    for name in _KERNELS.keys() - _registered:
        library.impl(f"ranks_{name}", _KERNELS[name], "CompositeExplicitAutograd")
        _registered.add(name)
