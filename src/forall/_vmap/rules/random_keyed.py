"""Rules of the operators behind `forall.random`: pointwise, without torch's dtype promotion."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._random import rejection
from forall._vmap.registry import register_rows
from forall._vmap.rule_makers.basic import (
    MappedStack,
    get_example_rank,
    make_stack_handler,
    pad_example_rank,
)
from forall._vmap.rule_makers.pointwise import handle_pointwise

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten
Tensor = torch.Tensor


def _make_pointwise_handler(op: Any) -> Callable:
    @make_stack_handler
    def rule(size: int, *args: Any) -> Any:
        rank = max(get_example_rank(a) for a in args if isinstance(a, (MappedStack, Tensor)))
        return op(*[pad_example_rank(a, rank) for a in args])

    return rule


register_rows(
    # They are pointwise, though torch does not tag them.
    dict.fromkeys(
        (aten._standard_gamma_grad.default, aten._dirichlet_grad.default), handle_pointwise
    )
)
register_rows(
    {
        op: _make_pointwise_handler(op)
        for op in (
            torch.ops.forall.threefry2x32.default,
            rejection.gamma_operator,
            rejection.poisson_operator,
            rejection.binomial_operator,
        )
    }
)
