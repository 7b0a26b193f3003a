"""The kernels of the operators between ranks, `_core.rank_ops`: they agree, and communicate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._compat import process_groups
from forall._core.rank_ops import library
from forall._mesh.agreement import agree_once, communicate
from forall._mesh.rank_group import find_rank_group

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Tensor = torch.Tensor


def _send(what: str, call: Callable, x: Tensor, *rest: Any, rows_differ: bool = False) -> Tensor:
    """Return ``call`` of the arguments, of which the last names the group, once ranks agree."""
    *given, name = rest
    ranks = find_rank_group(name)
    return communicate(
        ranks, what, x, lambda limit: call(x, *given, ranks.group, limit), rows_differ=rows_differ
    )


def _sum(x: Tensor, name: str) -> Tensor:
    return _send("a sum", process_groups.reduce, x, "sum", name)


def _gather(x: Tensor, sizes: Sequence[int], name: str) -> Tensor:
    return _send("a gather", process_groups.gather, x, sizes, name, rows_differ=True)


def _scatter(x: Tensor, sizes: Sequence[int], name: str) -> Tensor:
    return _send("a scatter", process_groups.scatter, x, sizes, name)


def _exchange(x: Tensor, give: Sequence[int], take: Sequence[int], name: str) -> Tensor:
    call = process_groups.exchange
    return _send("an exchange", call, x, give, take, name, rows_differ=True)


def _find_extreme(x: Tensor, kind: str, sizes: Sequence[int], name: str) -> Tensor:
    """Return the extreme row of all ranks: gathered, since backends differ in what NaN gives."""
    find = torch.amax if kind == "max" else torch.amin
    own = find(x, 0, keepdim=True) if len(x) else x
    rows_of = [int(size > 0) for size in sizes]

    def gather_and_find(_x: Tensor, group: Any, limit: float | None) -> Tensor:
        rows = process_groups.gather(own, rows_of, group, limit)
        return find(rows, 0) if len(rows) else x.new_zeros(x.shape[1:])

    return _send(f"a {kind}imum", gather_and_find, x, name, rows_differ=True)


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
for _name, _kernel in _KERNELS.items():
    library.impl(f"ranks_{_name}", _kernel, "CompositeExplicitAutograd")
