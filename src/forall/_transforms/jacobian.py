"""`jacrev`, `jacfwd`, `hessian`: all derivatives of a function at a point."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from forall._batching import border
from forall._core.errors import Call
from forall._core.levels import top
from forall._derivatives import basis
from forall._torch import handover, trees
from forall._transforms import checks
from forall._transforms.arguments import pick, put
from forall._transforms.jvp import push
from forall._transforms.vjp import Pullback, pullback
from forall._transforms.vmap import vmap

if TYPE_CHECKING:
    from collections.abc import Callable


def jacrev(
    func: Callable,
    argnums: int | tuple[int, ...] = 0,
    *,
    has_aux: bool = False,
    chunk_size: int | None = None,
    _preallocate_and_copy: bool = False,
) -> Callable:
    """The Jacobian of ``func`` at a point, by reverse mode.

    For ``f: (*I) -> (*O)``, ``jacrev(f)(x)`` has shape ``(*O, *I)`` and holds

        jacrev(f)(x)[o, i] = d f(x)[o] / d x[i].

    Cost: one forward pass, then one pull-back per number in the output, stacked as `vmap` does.
    When the output is larger than the input, `jacfwd` gives the same answer for less.

    Trees: the result is shaped like ``f``'s output, with a tree like ``x`` at every leaf.

    Args:
        argnums: one position, or several; several give a tuple in the order asked.
        has_aux: ``f`` returns ``(y, aux)``; the result is then ``(jacobian, aux)``.
        chunk_size: pull back at most so many rows at once. Changes memory, not values.
        _preallocate_and_copy: torch.func's, for memory alone; it changes nothing here.

    Raises:
        RuntimeError: for an argument at ``argnums`` or an output that is complex or an integer,
            for an output that is no tensor, and for an ``argnums`` that the call does not have.
        ValueError: where the arguments at ``argnums`` hold no tensor; a chunk_size below 1.

    Source: Baydin, Pearlmutter, Radul and Siskind, "Automatic differentiation in machine
    learning: a survey" (2018), section 3.2.

    Example:
        >>> def f(x):                                  # (2,) -> (3,)
        ...     return torch.stack([x[0] * x[1], x.sum(), x[0] ** 2])
        >>> jacrev(f)(torch.tensor([2.0, 3.0]))        # (3, 2)
        tensor([[3., 2.],
                [1., 1.],
                [4., 0.]])
    """
    del _preallocate_and_copy
    checks.callable_("jacrev", func)
    checks.chunk_size("jacrev", chunk_size)
    return _jacrev("jacrev", func, argnums, has_aux, chunk_size)


def jacfwd(
    func: Callable,
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    *,
    randomness: str = "error",
    chunk_size: int | None = None,
) -> Callable:
    """The Jacobian of ``func`` at a point, by forward mode.

    For ``f: (*I) -> (*O)``, ``jacfwd(f)(x)`` has shape ``(*O, *I)`` and holds

        jacfwd(f)(x)[o, i] = d f(x)[o] / d x[i].

    Cost: one `jvp` per number in the input, stacked by `vmap`; no graph in memory. When the input
    is larger than the output, `jacrev` gives the same answer for less.

    Trees: the result is shaped like ``f``'s output, with a tree like ``x`` at every leaf.

    Args:
        argnums: one position, or several; several give a tuple in the order asked.
        has_aux: ``f`` returns ``(y, aux)``; the result is then ``(jacobian, aux)``.
        randomness: what `vmap` does with random numbers drawn inside ``f``. ``"same"`` gives the
            derivative of one draw.
        chunk_size: push at most so many columns at once. Changes memory, not values.

    Raises:
        RuntimeError: for an argument at ``argnums`` or an output that is complex, for an output
            that is no tensor, and for an ``argnums`` that the call does not have.
        ValueError: for an integer argument at ``argnums``, and where they hold no tensor; a
            chunk_size below 1.

    Source: Baydin, Pearlmutter, Radul and Siskind, "Automatic differentiation in machine
    learning: a survey" (2018), section 3.1.

    Example:
        >>> def f(x):                                  # (2,) -> (3,)
        ...     return torch.stack([x[0] * x[1], x.sum(), x[0] ** 2])
        >>> jacfwd(f)(torch.tensor([2.0, 3.0]))        # (3, 2)
        tensor([[3., 2.],
                [1., 1.],
                [4., 0.]])
    """
    checks.callable_("jacfwd", func)
    checks.randomness("jacfwd", randomness)
    checks.chunk_size("jacfwd", chunk_size)
    return _jacfwd("jacfwd", func, argnums, has_aux, randomness, chunk_size)


def hessian(
    func: Callable,
    argnums: int | tuple[int, ...] = 0,
    *,
    has_aux: bool = False,
    chunk_size: int | None = None,
) -> Callable:
    """All second derivatives of ``func`` at a point: forward mode over reverse mode.

    For ``f: (*I) -> (*O)``, ``hessian(f)(x)`` has shape ``(*O, *I, *I)`` and holds

        hessian(f)(x)[o, i, j] = d^2 f(x)[o] / d x[i] d x[j],

    the same as ``jacfwd(jacrev(f))(x)``.

    Cost: for a scalar function, one gradient with its tangent per number in ``x``. To multiply by
    the Hessian without making it, see `grad`.

    Trees: the tree of the output, with one like ``x`` at every leaf, and another at its leaves.

    Args:
        argnums: one position, or several; several give a tuple of tuples.
        has_aux: ``f`` returns ``(y, aux)``; the result is then ``(hessian, aux)``.
        chunk_size: push at most so many columns, and pull back at most so many rows, at once.

    Raises:
        RuntimeError, ValueError: as `jacfwd`.

    Source: Pearlmutter, "Fast exact multiplication by the Hessian" (1994), one column per
    direction.

    Example:
        >>> def f(x):                                  # (2,) -> (3,)
        ...     return torch.stack([x[0] * x[1], x.sum(), x[0] ** 2])
        >>> hessian(f)(torch.tensor([2.0, 3.0]))       # (3, 2, 2)
        tensor([[[0., 1.],
                 [1., 0.]],
        <BLANKLINE>
                [[0., 0.],
                 [0., 0.]],
        <BLANKLINE>
                [[2., 0.],
                 [0., 0.]]])
    """
    checks.callable_("hessian", func)
    checks.chunk_size("hessian", chunk_size)
    inner = _jacrev("hessian", func, argnums, has_aux, chunk_size)
    return _jacfwd("hessian", inner, argnums, has_aux, "error", chunk_size)


# --- rows --------------------------------------------------------------------------------------


def _jacrev(verb: str, func: Callable, argnums: Any, has_aux: bool, chunk: int | None) -> Callable:
    @functools.wraps(func, updated=())
    def jacobian(*args: Any, **kwargs: Any) -> Any:
        if handover.needed():

            def f(*xs: Any) -> Any:  # Dynamo cannot look into a functools.partial
                return func(*xs, **kwargs)

            return handover.call("jacrev", f, argnums, has_aux=has_aux, chunk_size=chunk)(*args)
        call = Call(verb, func, argnums=argnums)
        chosen = pick(call, args, argnums)
        checks.real(call, "inputs", trees.leaves(chosen))
        trees.map_tensors(border.refuse_torchs, chosen)

        def of_chosen(x: Any) -> Any:
            return func(*put(args, argnums, x), **kwargs)

        pull, _, aux = pullback(call, of_chosen, (chosen,), has_aux)
        checks.real(call, "outputs", pull.outputs)
        stacks = _rows(pull, chunk)
        first, rows = 0, []
        for y in pull.outputs:
            n = y.numel()
            block = [s[first : first + n].reshape((*y.shape, *s.shape[1:])) for s in stacks]
            rows.append(pull.tree(block)[0])
            first += n
        result = trees.unflatten(rows, pull.out_spec)
        return (result, aux) if has_aux else result

    return jacobian


def _rows(pull: Pullback, chunk: int | None) -> list[torch.Tensor]:
    """(N, *I) for each input: the pull-backs of all N directions of the outputs together."""
    total = sum(y.numel() for y in pull.outputs)
    if not total:
        return [torch.zeros(0, *x.shape, dtype=x.dtype, device=x.device) for x in pull.own]
    step = chunk or total
    parts = [
        pull.stacked(basis.rows(pull.outputs, i, min(i + step, total)), top())
        for i in range(0, total, step)
    ]
    return parts[0] if len(parts) == 1 else [torch.cat(p) for p in zip(*parts, strict=True)]


# --- columns -----------------------------------------------------------------------------------


def _jacfwd(
    verb: str, func: Callable, argnums: Any, has_aux: bool, randomness: str, chunk: int | None
) -> Callable:
    @functools.wraps(func, updated=())
    def jacobian(*args: Any, **kwargs: Any) -> Any:
        if handover.needed():

            def f(*xs: Any) -> Any:  # Dynamo cannot look into a functools.partial
                return func(*xs, **kwargs)

            return handover.call("jacfwd", f, argnums, has_aux, randomness=randomness)(*args)
        call = Call(verb, func, argnums=argnums)
        flat, spec = trees.flatten(pick(call, args, argnums))
        places = [i for i, x in enumerate(flat) if isinstance(x, torch.Tensor)]
        xs = _moved(call, flat)

        def of_tensors(*new: Any) -> Any:
            leaves = _filled(flat, places, new)
            return func(*put(args, argnums, trees.unflatten(leaves, spec)), **kwargs)

        kept: list[Any] = []

        def column(*directions: torch.Tensor) -> Any:
            value, tangent, *aux = push(
                call, of_tensors, tuple(xs), directions, strict=False, has_aux=has_aux
            )
            checks.real(call, "outputs", trees.leaves(value))
            leaves, out_spec = trees.flatten(tangent)
            kept.append(out_spec)
            return leaves, aux

        directions = basis.rows(xs, 0, sum(x.numel() for x in xs))
        stacks, aux = vmap(column, 0, (-1, None), randomness, chunk_size=chunk)(*directions)
        nothing = [None] * len(flat)
        blocks = [_filled(nothing, places, _blocks(y, xs)) for y in stacks]
        result = trees.unflatten([trees.unflatten(b, spec) for b in blocks], kept[0])
        return (result, aux[0]) if has_aux else result

    return jacobian


def _moved(call: Call, leaves: list) -> list[torch.Tensor]:
    """The tensors whose numbers are the columns."""
    checks.some_tensor(call, leaves)
    checks.real(call, "inputs", leaves)
    trees.map_tensors(border.refuse_torchs, leaves)
    return [
        checks.differentiable(call, x, ValueError) for x in leaves if isinstance(x, torch.Tensor)
    ]


def _filled(leaves: list, places: list[int], new: Any) -> list:
    out = list(leaves)
    for i, x in zip(places, new, strict=True):
        out[i] = x
    return out


def _blocks(stack: torch.Tensor, xs: list) -> list[torch.Tensor]:
    """(*O, N), N counting the numbers of all ``xs`` together -> (*O, *I) for each of them."""
    parts = stack.split([x.numel() for x in xs], -1)
    return [p.reshape((*stack.shape[:-1], *x.shape)) for p, x in zip(parts, xs, strict=True)]
