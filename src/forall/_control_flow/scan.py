"""`scan` and `map`: a function runs along the first dim of its arguments."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch

from forall._api.vmap import vmap
from forall._compat import pytree
from forall._compat.dispatch_state import functions_off
from forall._compat.documented_error import documented_error
from forall._control_flow.loop_carry import (
    OperatorCall,
    check_carry,
    find_leaf_paths,
    stack_ys,
)
from forall._core.errors import format_columns, format_short, type_name_of

if TYPE_CHECKING:
    from collections.abc import Callable


def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
) -> tuple[Any, Any]:
    """``f`` along the first dim of ``xs``, with a carry from each step to the next.

    The law, under every transform, is that of

        carry, ys = init, []
        for x in xs:
            carry, y = f(carry, x)
            ys.append(y)
        return carry, torch.stack(ys)

    on trees: for leaves of ``xs`` with shape ``(n, *S)`` and of ``y`` with shape ``(*R)``, ``f``
    sees ``(*S)``, and ``ys`` has leaves of shape ``(n, *R)``. The carry keeps its structure, and
    its shapes, dtypes and devices. A Python number in ``init`` may become a tensor of shape (),
    which then keeps its dtype.

    Cost: n calls of ``f``.

    Args:
        f: takes a carry and a slice of ``xs``, returns a carry and a ``y``, which may be None.
        xs: a tree of tensors with first dims of one size; None to run ``length`` times without.
        length: the number of steps, where no tensor in ``xs`` tells it.
        reverse: go from the last slice to the first. ``ys`` are in the order of ``xs`` either way.
        unroll: accepted as ``jax.lax`` has it. Nothing is compiled here, so it changes nothing.

    With no steps ``f`` runs once on stand-ins, under a `vmap` of no examples, to learn what shapes
    ``ys`` have. The result's carry is ``init``.

    Raises:
        ValueError: where the sizes of first dims, or ``length``, do not agree, or nothing tells it.
        TypeError: where ``f`` returns no pair, or a carry or a y of another structure, shape, dtype
            or device than in the step before.

    Source: ``jax.lax.scan``.

    Example:
        >>> def step(total, x):                          # (), (2,) -> (), ()
        ...     total = total + x.sum()
        ...     return total, total / 2
        >>> scan(step, 0.0, torch.arange(6.0).reshape(3, 2))
        (tensor(15.), tensor([0.5000, 3.0000, 7.5000]))
    """
    call = OperatorCall("scan(*)", f)
    leaves, spec = pytree.flatten(xs)
    n = _find_length(call, xs, leaves, length)
    if not n:
        return init, _make_empty_ys(call, f, init, leaves, spec)
    slices = [[None] * n if leaf is None else leaf.unbind() for leaf in leaves]
    carry, y, its_spec = init, None, None
    rows: list[list] = []
    for done, i in enumerate(reversed(range(n)) if reverse else range(n)):
        given = carry
        carry, new = _check_pair(call, f(given, pytree.unflatten([s[i] for s in slices], spec)))
        carry = check_carry(call, "carry", given, carry, done)
        y = check_carry(call, "y", y, new, done) if done else new
        row, its_spec = pytree.flatten(y)
        rows.append(row)
    if reverse:
        rows.reverse()
    by_leaf = [list(column) for column in zip(*rows, strict=True)]
    ys = [
        stack_ys(call, c, "y" + path) for c, path in zip(by_leaf, find_leaf_paths(y), strict=True)
    ]
    return carry, pytree.unflatten(ys, its_spec)


def _check_pair(call: OperatorCall, result: Any) -> tuple[Any, Any]:
    if isinstance(result, (tuple, list)) and len(result) == 2:
        return result[0], result[1]
    raise documented_error(TypeError, "scan-results")(
        f"{call}: the function must return a pair, the carry and a y.\n"
        f"{format_columns([('returned', format_short(result), type_name_of(result))])}\n"
        "Where there is no y to keep, return (carry, None)."
    )


def _make_empty_ys(call: OperatorCall, f: Callable, init: Any, leaves: list, spec: Any) -> Any:
    """Return the ys of zero steps: empty tensors of the shapes that ys would have."""
    tensors = [leaf for leaf in leaves if leaf is not None]

    def one(_: torch.Tensor, *of_them: torch.Tensor) -> Any:
        left = iter(of_them)
        x = pytree.unflatten([None if leaf is None else next(left) for leaf in leaves], spec)
        carry, y = _check_pair(call, f(init, x))
        check_carry(call, "carry", init, carry, 0)
        return y

    return vmap(one, randomness="different")(torch.empty(0), *tensors)


def _find_length(call: OperatorCall, xs: Any, leaves: list, length: Any) -> int:
    """Return the number of steps; raise if sizes disagree or nothing defines it."""
    sizes = [] if length is None else [("length", "", operator.index(length))]
    with functions_off():
        for i, leaf in enumerate(leaves):
            if leaf is None:
                continue
            path = f"xs{find_leaf_paths(xs)[i]}"
            if not isinstance(leaf, torch.Tensor) or not leaf.dim():
                raise documented_error(TypeError, "number-of-steps")(
                    f"{call}: there is no first dim to go along.\n"
                    f"{format_columns([(path, format_short(leaf), type_name_of(leaf))])}\n"
                    "Every leaf of xs must be a tensor with at least one dim. Put what is the same "
                    "for all steps into the function."
                )
            sizes.append((path, format_short(leaf), leaf.shape[0]))
    if not sizes:
        raise documented_error(ValueError, "number-of-steps")(
            f"{call}: nothing tells the number of steps.\nPass xs with a tensor, or length."
        )
    if any(n != sizes[0][-1] for *_, n in sizes):
        raise documented_error(ValueError, "number-of-steps")(
            f"{call}: the numbers of steps differ.\n"
            f"{format_columns([(path, text, f'{n} steps') for path, text, n in sizes])}\n"
            "First dims, and length where it is given, must agree."
        )
    n = sizes[0][2]
    if n < 0:
        raise documented_error(ValueError, "number-of-steps")(
            f"{call}: length={n} is below 0.\nPass how often the function is to run."
        )
    return n


def map(f: Callable[[Any], Any], xs: Any, *, batch_size: int | None = None) -> Any:
    """``f`` of each slice of ``xs`` along the first dim, one after another.

    The law, under every transform: ``map(f, xs)`` equals ``torch.stack([f(x) for x in xs])``, on
    trees as in `scan`. It has the values of `vmap`, for less memory and more time.

    Cost: n calls of ``f``, or ``n / batch_size``, each for so many slices at once.

    Args:
        f: takes a slice of ``xs``, a tree like it.
        xs: a tree of tensors with first dims of one size.
        batch_size: run so many slices at once, by `vmap`. Changes no value.

    Raises:
        ValueError: where the sizes of first dims do not agree, and for a batch_size below 1.
        TypeError: as `scan`.

    Source: ``jax.lax.map``.

    Example:
        >>> map(torch.linalg.norm, torch.tensor([[3.0, 4.0], [6.0, 8.0]]))
        tensor([ 5., 10.])
    """
    call = OperatorCall("map(*)", f)
    if batch_size is not None and (not isinstance(batch_size, int) or batch_size < 1):
        rows = [("batch_size", format_short(batch_size), type_name_of(batch_size))]
        raise documented_error(ValueError, "chunk-size")(
            f"{call}: a batch holds at least one slice.\n"
            f"{format_columns(rows)}\n"
            "Pass an int above 0, or None to run the slices one by one."
        )
    leaves = pytree.get_leaves(xs)
    n = _find_length(call, xs, leaves, None)
    if batch_size is None or not n or any(leaf is None for leaf in leaves):
        return scan(lambda carry, x: (carry, f(x)), (), xs)[1]
    return vmap(f, randomness="different", chunk_size=batch_size)(xs)
