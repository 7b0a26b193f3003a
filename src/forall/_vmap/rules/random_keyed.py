"""Rules of the operators behind `forall.random`: pointwise, without torch's dtype promotion."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._random import rejection
from forall._vmap.registry import register
from forall._vmap.rule_makers.basic import Stack, by_front, pointwise

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten
Tensor = torch.Tensor


def _entry_by_entry(op: Any) -> Callable:
    @by_front
    def rule(size: int, *args: Any) -> Any:
        ranks = [a.v.dim() - 1 if isinstance(a, Stack) else a.dim() for a in args if _has_rank(a)]
        return op(*[_lined(a, max(ranks)) if isinstance(a, Stack) else a for a in args])

    return rule


def _has_rank(a: Any) -> bool:
    return isinstance(a, (Stack, Tensor))


def _lined(a: Stack, rank: int) -> Tensor:
    """Pad the rank of examples with leading ones: (B, *P) -> (B, 1, .., *P)."""
    return a.v.reshape(a.v.shape[0], *(1,) * (rank - a.v.dim() + 1), *a.v.shape[1:])


register(
    # They are pointwise, though torch does not tag them.
    dict.fromkeys((aten._standard_gamma_grad.default, aten._dirichlet_grad.default), pointwise)
)
register(
    {
        op: _entry_by_entry(op)
        for op in (
            torch.ops.forall.threefry2x32.default,
            rejection.gamma,
            rejection.poisson,
            rejection.binomial,
        )
    }
)
