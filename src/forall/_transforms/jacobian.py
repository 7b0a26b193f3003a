"""`jacrev`, `jacfwd`, `hessian`: all derivatives of a function at a point."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from forall._core.errors import name_of
from forall._core.levels import top
from forall._derivatives import basis
from forall._torch import handover, trees
from forall._transforms import checks
from forall._transforms.arguments import pick, put
from forall._transforms.jvp import push
from forall._transforms.vjp import pullback
from forall._transforms.vmap import vmap

if TYPE_CHECKING:
    from collections.abc import Callable


def jacrev(
    func: Callable,
    argnums: int | tuple[int, ...] = 0,
    *,
    has_aux: bool = False,
    chunk_size: int | None = None,
) -> Callable:
    """The Jacobian by reverse mode."""
    checks.callable_("jacrev", func)
    checks.chunk_size("jacrev", chunk_size)

    @functools.wraps(func, updated=())
    def jacobian(*args: Any, **kwargs: Any) -> Any:
        if handover.needed():
            return handover.call(
                "jacrev", func, argnums, has_aux=has_aux, chunk_size=chunk_size
            )(*args, **kwargs)
        call = f"jacrev({name_of(func)}, argnums={argnums!r})"
        chosen = pick(call, args, argnums)

        def of_chosen(x: Any) -> Any:
            return func(*put(args, argnums, x), **kwargs)

        pull, _, aux = pullback(call, of_chosen, (chosen,), has_aux)
        outs = pull.outputs
        total = sum(y.numel() for y in outs)
        step = chunk_size or max(total, 1)
        parts = [
            pull.stacked(basis.rows(outs, i, min(i + step, total)), top())
            for i in range(0, total, step)
        ] or [[torch.zeros(0, *x.shape, dtype=x.dtype, device=x.device) for x in pull.own]]
        stacks = parts[0] if len(parts) == 1 else [torch.cat(p) for p in zip(*parts, strict=True)]
        first, rows = 0, []
        for y in outs:
            n = y.numel()
            block = [s[first : first + n].reshape((*y.shape, *s.shape[1:])) for s in stacks]
            rows.append(pull.tree(block)[0])
            first += n
        result = trees.unflatten(rows, pull.out_spec)
        return (result, aux) if has_aux else result

    return jacobian


def jacfwd(
    func: Callable,
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    *,
    randomness: str = "error",
    chunk_size: int | None = None,
) -> Callable:
    """The Jacobian by forward mode."""
    checks.callable_("jacfwd", func)
    checks.randomness("jacfwd", randomness)
    checks.chunk_size("jacfwd", chunk_size)

    @functools.wraps(func, updated=())
    def jacobian(*args: Any, **kwargs: Any) -> Any:
        if handover.needed():
            return handover.call("jacfwd", func, argnums, has_aux, randomness=randomness)(
                *args, **kwargs
            )
        call = f"jacfwd({name_of(func)}, argnums={argnums!r})"
        chosen = pick(call, args, argnums)
        flat, spec = trees.flatten(chosen)
        places = [i for i, x in enumerate(flat) if isinstance(x, torch.Tensor)]
        xs = [checks.differentiable(call, flat[i]) for i in places]
        kept: list[Any] = []

        def of_tensors(*new: Any) -> Any:
            leaves = list(flat)
            for i, x in zip(places, new, strict=True):
                leaves[i] = x
            return func(*put(args, argnums, trees.unflatten(leaves, spec)), **kwargs)

        def column(*directions: torch.Tensor) -> Any:
            out = push(call, of_tensors, tuple(xs), directions, False, has_aux)
            tangents, out_spec = trees.flatten(out[1])
            kept.append(out_spec)
            return tangents, out[2] if has_aux else None

        total = sum(x.numel() for x in xs)
        directions = basis.rows(xs, 0, total)
        columns_, aux = vmap(
            column, 0, (-1, None if has_aux else 0), randomness, chunk_size=chunk_size
        )(*directions)
        result = []
        for y in columns_:
            blocks, first = [], 0
            for x in xs:
                n = x.numel()
                blocks.append(y[..., first : first + n].reshape((*y.shape[:-1], *x.shape)))
                first += n
            leaves: list[Any] = [None] * len(flat)
            for i, b in zip(places, blocks, strict=True):
                leaves[i] = b
            result.append(trees.unflatten(leaves, spec))
        result = trees.unflatten(result, kept[0])
        return (result, aux) if has_aux else result

    return jacobian


def hessian(
    func: Callable,
    argnums: int | tuple[int, ...] = 0,
    *,
    has_aux: bool = False,
    chunk_size: int | None = None,
) -> Callable:
    """All second derivatives: forward mode over reverse mode."""
    checks.callable_("hessian", func)
    inner = jacrev(func, argnums, has_aux=has_aux, chunk_size=chunk_size)
    return jacfwd(inner, argnums, has_aux=has_aux, chunk_size=chunk_size)


