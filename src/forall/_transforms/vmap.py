"""`vmap`: one function of one example, for all examples at once."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from forall._batching import border
from forall._batching.interpreter import VmapLevel, running
from forall._core import errors
from forall._core.levels import top
from forall._torch import handover, trees
from forall._transforms import checks

if TYPE_CHECKING:
    from collections.abc import Callable


def vmap(
    func: Callable,
    in_dims: Any = 0,
    out_dims: Any = 0,
    randomness: str = "error",
    *,
    chunk_size: int | None = None,
) -> Callable:
    """``func`` of one example, for all examples at once.

    The law: ``vmap(f)(xs)`` equals ``torch.stack([f(x) for x in xs])``, values, shapes and dtypes.

    For ``f: (*S) -> (*R)`` and ``xs: (B, *S)``, ``vmap(f)(xs)`` has shape ``(B, *R)``.

    Args:
        func: takes tensors, or trees of them, and returns tensors, numbers, or trees of them.
            Other results (None, strings) pass through.
        in_dims: for each argument the dim that counts the examples; None shares the argument
            between them. One int for all arguments, or a tuple with an int, None or a tree of
            them per argument. Negative dims count from the end. A dict names arguments, keyword
            arguments included; those it does not name are shared.
        out_dims: where the examples go in each result: one int, or a tree like the result. None
            for a result that is the same for all examples.
        randomness: ``"error"`` forbids random operators, ``"different"`` draws anew for each
            example, ``"same"`` draws once for all.
        chunk_size: run at most so many examples at once. Changes memory, not values.

    Keyword arguments are shared between the examples.

    Raises:
        ValueError: where the arguments and ``in_dims`` do not fit, or sizes differ.

    Example:
        >>> xs, ys = torch.arange(6.0).reshape(3, 2), torch.ones(2)
        >>> vmap(torch.dot, in_dims=(0, None))(xs, ys)          # (3, 2), (2,) -> (3,)
        tensor([1., 5., 9.])
    """
    checks.callable_("vmap", func)
    checks.randomness("vmap", randomness)
    checks.chunk_size("vmap", chunk_size)

    @functools.wraps(func, updated=())
    def mapped(*args: Any, **kwargs: Any) -> Any:
        if handover.needed():
            return handover.call(
                "vmap", func, in_dims, out_dims, randomness, chunk_size=chunk_size
            )(*args, **kwargs)
        call = f"vmap({errors.name_of(func)}, in_dims={in_dims!r})"
        inputs, dims_given = (args, kwargs), in_dims
        if isinstance(in_dims, dict):
            args, kwargs = checks.named(call, func, in_dims, args, kwargs)
            inputs, dims_given = (args, kwargs), checks.named_dims(in_dims, args, kwargs)
        leaves, spec, dims, size = checks.inputs(call, inputs, dims_given)
        if chunk_size is None or chunk_size >= size:
            return _run(func, leaves, spec, dims, size, out_dims, randomness, call)
        return _in_chunks(
            func, leaves, spec, dims, size, out_dims, randomness, call, chunk_size
        )

    return mapped


def _run(
    func: Callable,
    leaves: list,
    spec: Any,
    dims: list,
    size: int,
    out_dims: Any,
    randomness: str,
    call: str,
) -> Any:
    level = VmapLevel(size, randomness, top())
    entered = [
        border.enter(leaf, dim, level) if dim is not None else leaf
        for leaf, dim in zip(leaves, dims, strict=True)
    ]
    args, kwargs = trees.unflatten(entered, spec)
    with running(level):
        result = func(*args, **kwargs)
        results, out_spec = trees.flatten(result)
        results = [
            torch.tensor(r) if isinstance(r, (int, float, complex)) else r for r in results
        ]
    places = checks.out_dims(call, out_dims, out_spec)
    left = []
    seen: set[int] = set()
    for r, place in zip(results, places, strict=True):
        left.append(_leave(r, place, level, call, seen))
    return trees.unflatten(left, out_spec)


def _leave(r: Any, place: int | None, level: VmapLevel, call: str, seen: set[int]) -> Any:
    if not isinstance(r, torch.Tensor):
        return r
    if place is None:
        return checks.unmapped_result(call, r, level)
    rank = r.dim() + 1
    if not -rank <= place < rank:
        raise checks.out_dim_outside(call, r, place)
    stack = border.leave(r, place % rank, level)
    if id(r) in seen:  # one tensor returned twice: the loop would stack it twice
        stack = stack.clone()
    seen.add(id(r))
    return stack


def _in_chunks(
    func: Callable,
    leaves: list,
    spec: Any,
    dims: list,
    size: int,
    out_dims: Any,
    randomness: str,
    call: str,
    chunk: int,
) -> Any:
    parts = []
    for start in range(0, size, chunk):
        n = min(chunk, size - start)
        part = [
            leaf.narrow(dim, start, n) if dim is not None else leaf
            for leaf, dim in zip(leaves, dims, strict=True)
        ]
        out = _run(func, part, spec, dims, n, out_dims, randomness, call)
        flat, out_spec = trees.flatten(out)
        parts.append(flat)
    places = checks.out_dims(call, out_dims, out_spec)
    joined = [
        torch.cat(column, place % column[0].dim())
        if place is not None and isinstance(column[0], torch.Tensor)
        else column[0]
        for column, place in zip(zip(*parts, strict=True), places, strict=True)
    ]
    return trees.unflatten(joined, out_spec)
