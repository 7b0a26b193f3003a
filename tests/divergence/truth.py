"""The loop over examples, with its derivatives by torch's own autograd, and what is held to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

import forall
from divergence.cases import Case, D
from oracle import stack_trees

KEY = forall.random.key(0)


def copies(stacks: Sequence[Tensor]) -> list[Tensor]:
    return [t.clone() for t in stacks]


def options(case: Case) -> dict[str, Any]:
    """What `forall.vmap` is told besides the function."""
    return {"randomness": KEY} if case.keyed else {}


def looped(f: Callable, in_dims: Sequence[int | None], key: Tensor | None = None) -> Callable:
    """The results of `f` on one example after the other, stacked; draws are those of a key."""

    def run(*stacks: Tensor) -> Any:
        (size,) = {len(t) for t, d in zip(stacks, in_dims, strict=True) if d is not None}
        results = []
        for i in range(size):
            row = [t if d is None else t[i] for t, d in zip(stacks, in_dims, strict=True)]
            if key is None:
                results.append(f(*row))
            else:
                with forall.random.scope(key, i):
                    results.append(f(*row))
        return stack_trees(results)

    return run


def by_loop(case: Case, stacks: Sequence[Tensor]) -> Any:
    return looped(case.plain, [0] * len(stacks), KEY if case.keyed else None)(*stacks)


def by_vmap(case: Case, stacks: Sequence[Tensor], **more: Any) -> Any:
    return forall.vmap(case.f, **options(case), **more)(*stacks)


# --- derivatives ---------------------------------------------------------------------------------


def flat(tree: Any) -> Tensor:
    """All real tensors of a result, one after another."""
    leaves = [t for t in tree_flatten(tree)[0] if isinstance(t, Tensor) and t.is_floating_point()]
    return torch.cat([t.reshape(-1).to(D) for t in leaves])


def total(tree: Any) -> Tensor:
    """One number, to which each entry of a result gives another part."""
    numbers = flat(tree)
    return (numbers * (1 + 0.3 * torch.arange(len(numbers), dtype=D).sin())).sum()


def of_copies(case: Case, f: Callable, reduce: Callable[[Any], Tensor]) -> Callable[..., Tensor]:
    """The reduced result, and with it what is left in the arguments, which are copies here."""

    def run(*args: Tensor) -> Tensor:
        if not case.writes:
            return reduce(f(*args))
        mine = copies(args)
        return reduce((f(*mine), mine))

    return run


def leaves(case: Case, row: Sequence[Tensor]) -> list[Tensor]:
    """Fresh copies of the arguments; those that have a derivative require it."""
    return [t.clone().requires_grad_(i in case.grads) for i, t in enumerate(row)]


def gradient(y: Tensor, xs: Sequence[Tensor]) -> list[Tensor]:
    """The gradient by torch, zero where there is none."""
    if not y.requires_grad:
        return [torch.zeros_like(x) for x in xs]
    return list(
        torch.autograd.grad(y, xs, retain_graph=True, allow_unused=True, materialize_grads=True)
    )


def jacobian(ys: Tensor, xs: Sequence[Tensor]) -> list[Tensor]:
    """Reverse mode, one row after the other."""
    rows = [gradient(y, xs) for y in ys]
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def wanted(case: Case, xs: Sequence[Tensor]) -> list[Tensor]:
    return [xs[i] for i in case.grads]


def for_each(case: Case, stacks: Sequence[Tensor], derive: Callable) -> list[Tensor]:
    """A derivative of each example by itself, stacked: `derive(f, xs)` for leaves `xs`."""

    def one(*row: Tensor) -> list[Tensor]:
        return derive(case.plain, leaves(case, row))

    return looped(one, [0] * len(stacks), KEY if case.keyed else None)(*stacks)
