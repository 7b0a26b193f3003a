"""Operators by which ranks communicate, each of which has waited when it returns.

Those of torch (``torch.ops._c10d_functional``) return before the data have come, and a second
operator waits. It returns the very tensor that it is given, so a recorder that knows tensors by
identity takes it for dead. These here are one operator each.

Their derivatives are those of the program of all ranks: the transpose of a sum over ranks is a sum
over ranks, of all gathered rows the sum of what each rank pulls back to its rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._compat import process_groups
from forall._mesh.agreement import communicate
from forall._mesh.rank_group import find_rank_group

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forall._mesh.rank_group import RankGroup

_library = torch.library.Library("forall", "FRAGMENT")
_library.define("ranks_reduce(Tensor x, str kind, str group) -> Tensor")
_library.define("ranks_gather(Tensor x, int[] sizes, str group) -> Tensor")
_library.define("ranks_scatter(Tensor x, int[] sizes, str group) -> Tensor")
_library.define("ranks_exchange(Tensor x, int[] give, int[] take, str group) -> Tensor")


def reduce(x: torch.Tensor, kind: str, group: RankGroup) -> torch.Tensor:
    """Return the sum, the maximum or the minimum over ranks: the same on all of them."""
    return torch.ops.forall.ranks_reduce(x, kind, group.id)


def gather(x: torch.Tensor, sizes: Sequence[int], group: RankGroup) -> torch.Tensor:
    """Return the rows of all ranks, rank by rank: (n, *S) -> (N, *S)."""
    return torch.ops.forall.ranks_gather(x, sizes, group.id)


def scatter(x: torch.Tensor, sizes: Sequence[int], group: RankGroup) -> torch.Tensor:
    """Return this rank's rows of the sum over ranks: (N, *S) -> (n, *S)."""
    return torch.ops.forall.ranks_scatter(x, sizes, group.id)


def exchange(
    x: torch.Tensor, give: Sequence[int], take: Sequence[int], group: RankGroup
) -> torch.Tensor:
    """Give each rank some of these rows, rank by rank, and return those that each rank gives."""
    return torch.ops.forall.ranks_exchange(x, give, take, group.id)


def _reduce(x: torch.Tensor, kind: str, name: str) -> torch.Tensor:
    group = find_rank_group(name)
    return communicate(
        group,
        f"{kind} over {group.axis!r}",
        x,
        lambda limit: process_groups.reduce(x, kind, group.group, limit),
    )


def _gather(x: torch.Tensor, sizes: Sequence[int], name: str) -> torch.Tensor:
    group = find_rank_group(name)
    what = f"gather over {group.axis!r}"
    return communicate(
        group,
        what,
        x,
        lambda limit: process_groups.gather(x, sizes, group.group, limit),
        rows_differ=True,
    )


def _scatter(x: torch.Tensor, sizes: Sequence[int], name: str) -> torch.Tensor:
    group = find_rank_group(name)
    what = f"scatter over {group.axis!r}"
    return communicate(
        group, what, x, lambda limit: process_groups.scatter(x, sizes, group.group, limit)
    )


def _exchange(x: torch.Tensor, give: Sequence[int], take: Sequence[int], name: str) -> torch.Tensor:
    group = find_rank_group(name)
    what = f"exchange over {group.axis!r}"
    return communicate(
        group,
        what,
        x,
        lambda limit: process_groups.exchange(x, give, take, group.group, limit),
        rows_differ=True,
    )


_library.impl("ranks_reduce", _reduce, "CompositeExplicitAutograd")
_library.impl("ranks_gather", _gather, "CompositeExplicitAutograd")
_library.impl("ranks_scatter", _scatter, "CompositeExplicitAutograd")
_library.impl("ranks_exchange", _exchange, "CompositeExplicitAutograd")


def _make_rows(x: torch.Tensor, count: int) -> torch.Tensor:
    return x.new_empty((count, *x.shape[1:]))


_library.impl("ranks_reduce", lambda x, _kind, _group: torch.empty_like(x), "Meta")
_library.impl("ranks_gather", lambda x, sizes, _group: _make_rows(x, sum(sizes)), "Meta")
_library.impl(
    "ranks_scatter",
    lambda x, sizes, group: _make_rows(x, sizes[find_rank_group(group).rank]),
    "Meta",
)
_library.impl("ranks_exchange", lambda x, _give, take, _group: _make_rows(x, sum(take)), "Meta")


def _keep_arguments(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    x, *ctx.rest = inputs
    if ctx.rest[0] in ("max", "min"):
        ctx.save_for_backward(x, output)


def _pull_reduce(ctx: Any, g: torch.Tensor) -> tuple:
    kind, group = ctx.rest
    total = torch.ops.forall.ranks_reduce(g, "sum", group)
    if kind == "sum":
        return total, None, None
    x, most = ctx.saved_tensors  # ranks that have the extremum share its derivative equally
    has_it = (x == most).to(g.dtype)
    return total * has_it / torch.ops.forall.ranks_reduce(has_it, "sum", group), None, None


def _pull_gather(ctx: Any, g: torch.Tensor) -> tuple:
    return torch.ops.forall.ranks_scatter(g, *ctx.rest), None, None


def _pull_scatter(ctx: Any, g: torch.Tensor) -> tuple:
    return torch.ops.forall.ranks_gather(g, *ctx.rest), None, None


def _pull_exchange(ctx: Any, g: torch.Tensor) -> tuple:
    give, take, group = ctx.rest
    return torch.ops.forall.ranks_exchange(g, take, give, group), None, None, None


for _name, _pull in (
    ("reduce", _pull_reduce),
    ("gather", _pull_gather),
    ("scatter", _pull_scatter),
    ("exchange", _pull_exchange),
):
    torch.library.register_autograd(
        f"forall::ranks_{_name}", _pull, setup_context=_keep_arguments, lib=_library
    )
