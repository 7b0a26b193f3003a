"""The kernels of the operators between ranks, `_core.rank_ops`: they agree, and communicate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._compat import process_groups
from forall._core import communication_log, config
from forall._core.rank_ops import OtherSizesError, library
from forall._mesh.agreement import agree_once, communicate
from forall._mesh.rank_group import find_rank_group

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Tensor = torch.Tensor


def _send(
    kind: str,
    call: Callable,
    x: Tensor,
    *rest: Any,
    rows_differ: bool = False,
    combine: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return ``call`` of the arguments, of which the last two name the group and the place.

    With ``rows_differ`` the ranks may have unlike numbers of rows. See `communicate` for
    ``combine``.
    """
    *given, handle, place = rest
    ranks = find_rank_group(handle)
    shape = ", ".join(map(str, ["_", *x.shape[1:]] if rows_differ else x.shape))
    what = f"{kind} of {str(x.dtype).removeprefix('torch.')}[{shape}]"
    what = f"{what} at {place}" if place else f"{what} for a derivative"
    return communicate(ranks, what, x, lambda limit: call(x, *given, ranks.group, limit), combine)


def _sum(x: Tensor, *where: str) -> Tensor:
    combine = None if x.dtype == torch.bool else _sum_rows
    return _send("a sum", process_groups.reduce, x, "sum", *where, combine=combine)


def _sum_rows(rows: Tensor) -> Tensor:
    return rows.sum(0, dtype=rows.dtype)


def _gather(x: Tensor, sizes: Sequence[int], *where: str) -> Tensor:
    return _send("a gather", process_groups.gather, x, sizes, *where, rows_differ=True)


def _scatter(x: Tensor, sizes: Sequence[int], *where: str) -> Tensor:
    return _send("a scatter", process_groups.scatter, x, sizes, *where)


def _exchange(x: Tensor, give: Sequence[int], take: Sequence[int], *where: str) -> Tensor:
    call = process_groups.exchange
    return _send("an exchange", call, x, give, take, *where, rows_differ=True)


def _find_extreme(x: Tensor, kind: str, sizes: Sequence[int], *where: str) -> Tensor:
    """Return the extreme row of all ranks: gathered, since backends differ in what NaN gives."""
    find = torch.amax if kind == "max" else torch.amin
    own = find(x, 0, keepdim=True) if len(x) else x
    rows_of = [int(size > 0) for size in sizes]

    def gather_and_find(_x: Tensor, group: Any, limit: float | None) -> Tensor:
        rows = process_groups.gather(own, rows_of, group, limit)
        return find(rows, 0) if len(rows) else x.new_zeros(x.shape[1:])

    return _send(f"a {kind}imum", gather_and_find, x, *where, rows_differ=True)


def _begin(x: Tensor, outermost: bool, handle: str, call: str, expected: Sequence[int]) -> Tensor:
    ranks = find_rank_group(handle)
    if outermost and not communication_log.is_reading():
        ranks.calls += 1
        ranks.position = 0
    sizes = agree_once(ranks, f"the start of {call}", size=int(x))
    ranks.is_open = ranks.is_open or outermost
    if expected and sizes != [*expected]:
        raise OtherSizesError
    return torch.tensor(sizes, device="cpu")


def _end(x: Tensor, handle: str, call: str) -> None:
    ranks = find_rank_group(handle)
    if config.now.agree != "never":
        agree_once(ranks, "the end", call)
    ranks.is_open = False


_KERNELS = {
    "sum": _sum,
    "gather": _gather,
    "scatter": _scatter,
    "exchange": _exchange,
    "extreme": _find_extreme,
    "begin": _begin,
    "end": _end,
}
for _name, _kernel in _KERNELS.items():
    library.impl(f"ranks_{_name}", _kernel, "CompositeExplicitAutograd")
