"""Sparse tensors under vmap.

A sparse tensor that all examples share is not wrapped. An operator with a sparse tensor among its
operands that fails on the stacks runs for one example after another, as in the loop.
"""

from __future__ import annotations

from typing import Any

import torch

from forall._compat import pytree
from forall._compat.op_schema import get_facts
from forall._compat.wrapper_tensor import Wrapper
from forall._core.looped_operators import note_looped_operator
from forall._core.sparse_operands import alias_constant, is_sparse
from forall._vmap.batched_tensor import BatchedTensor
from forall._vmap.rule_makers import basic

_ALIAS = torch.ops.aten.alias.default


def can_stay_unwrapped(out: Any, args: tuple) -> bool:
    """True if a sparse result that all examples share needs no wrapper, as it has no history."""
    return is_sparse(out) and not any(
        type(a) is BatchedTensor and a.requires_grad and torch.is_grad_enabled() for a in args
    )


def can_run_per_example(func: Any, args: tuple, kwargs: dict) -> bool:
    """True if an operator that has failed on stacks may run for one example after another."""
    if not any(is_sparse(a) for a in pytree.get_leaves((args, kwargs))):
        return False
    fact = get_facts(func)
    return not fact.mutates and not fact.seeded


def run_per_example(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """Run an operator for one example after another, with a warning."""
    if func is _ALIAS and not isinstance(args[0], Wrapper):  # compressed rows have no such view
        return alias_constant(args[0])
    outs = basic.call_per_example(level, func, args, kwargs)
    note_looped_operator(
        str(func),
        f"vmap: {func} has no rule for a tensor of this layout and runs once per example.\n"
        "Use .to_dense() to make it fast.",
    )
    out = basic.stack_results(outs)
    out = out if level.size else basic.drop_examples(out)
    return basic.wrap_results(out, 0, level)
