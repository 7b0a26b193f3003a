"""Makers of handlers for operators that act along dims of each example.

The position of the dims among an operator's arguments, and their default, are read from its schema
once, when the row is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._core.axes import stacked_dim, stacked_dims
from forall._vmap.rule_makers.basic import expand_to_stack, wrap_results

if TYPE_CHECKING:
    from collections.abc import Callable

    from forall._vmap.registry import Handler

Tensor = torch.Tensor


class StackHandler:
    """A handler that computes by ``run``, which takes stacks (B, *S), and dims as dims of stacks.

    Code that has stacks without wrappers calls ``run`` itself.
    """

    __slots__ = ("handle", "run")

    def __init__(self, handle: Handler, run: Callable) -> None:
        self.handle = handle
        self.run = run

    def __call__(self, level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
        return self.handle(level, func, args, kwargs)


def make_dim_handler(
    op: Any, tensors: int = 1, *, run: Any = None, empty_is_all: bool = True
) -> StackHandler:
    """``op(*tensors, .., dim, ..)``: (B, *S) -> (B, *R), its dims counting those of an example.

    A rank-0 example gets a temporary axis, which is removed from the results. If the op takes a
    list of dims, None and (unless ``empty_is_all`` is off) an empty list name every dim of the
    example. ``run`` is called on the stacks in the place of the op.
    """
    run = run or op
    arguments = op._schema.arguments
    where = next(i for i, a in enumerate(arguments) if a.name == "dim")
    many = "List" in str(arguments[where].type)
    defaults = [a.default_value for a in arguments[: where + 1]]
    by_name = arguments[where].kwarg_only

    def stack_dim(dim: Any, rank: int) -> Any:
        if not many:
            return stacked_dim(dim, rank)
        if not empty_is_all and dim is not None and not len(dim):
            return []
        return stacked_dims(dim, rank) or [1]  # the temporary axis of a rank-0 example

    def handler(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
        values = [expand_to_stack(a, level) for a in args[:tensors]]
        rank = values[0].dim() - 1
        if by_name:
            dim = stack_dim(kwargs.get("dim", defaults[where]), rank)
            rest, kwargs = args[tensors:], {**kwargs, "dim": dim}
        else:
            rest = [*args[tensors:], *defaults[len(args) :]]
            rest[where - tensors] = stack_dim(rest[where - tensors], rank)
        if rank:
            return wrap_results(run(*values, *rest, **kwargs), 0, level)
        out = run(*[v.unsqueeze(1) for v in values], *rest, **kwargs)
        if isinstance(out, Tensor):
            return wrap_results(_drop_lent_axis(out), 0, level)
        return wrap_results(tuple(_drop_lent_axis(o) for o in out), 0, level)

    return StackHandler(handler, run)


def _drop_lent_axis(out: Tensor) -> Tensor:
    """(B, 1) or (B,) -> (B,)."""
    return out.squeeze(1) if out.dim() == 2 else out
