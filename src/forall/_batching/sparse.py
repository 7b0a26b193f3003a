"""Sparse tensors.

One that all examples share needs no stand-in. What stacks with one among them cannot do, an
operator does for one example after another, as the loop would.
"""

from __future__ import annotations

from typing import Any

import torch

from forall._batching import families
from forall._batching.batched import Batched
from forall._core.errors import slow
from forall._core.levels import second_name
from forall._torch import trees
from forall._torch.dispatch import below_autograd, no_dispatch
from forall._torch.schema import facts
from forall._torch.wrapper import COMPRESSED, Wrapper, is_sparse

_ALIAS = torch.ops.aten.alias.default


def stands_for_itself(out: Any, args: tuple) -> bool:
    """Whether a result that all examples share goes on as it is: no history would be lost."""
    return is_sparse(out) and not any(
        type(a) is Batched and a.requires_grad and torch.is_grad_enabled() for a in args
    )


def constant(t: torch.Tensor) -> torch.Tensor:
    """A second name, which may be that of a view."""
    if isinstance(t, Wrapper):
        return second_name(t)
    with no_dispatch(), below_autograd():
        return t.detach()


def of_coordinates(stack: torch.Tensor) -> torch.Tensor:
    """Compressed rows as coordinates: only these have one tensor for all examples."""
    return stack.to_sparse() if stack.layout in COMPRESSED else stack


def can_run_apart(func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether an operator that has failed on stacks may do for one example after another."""
    if not any(is_sparse(a) for a in trees.leaves((args, kwargs))):
        return False
    fact = facts(func)
    return not fact.mutates and not fact.seeded


def apart(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """One example after another, with a warning."""
    if func is _ALIAS and not isinstance(args[0], Wrapper):  # compressed rows have no such view
        return constant(args[0])
    outs = families.each(level, func, args, kwargs)
    slow(
        f"vmap: {func} has no rule for a tensor of this layout and runs once per example.\n"
        "Use .to_dense() to make it fast."
    )
    out = families.restacked(outs)
    out = out if level.size else families.without_examples(out)
    return families.wrapped(out, 0, level)
