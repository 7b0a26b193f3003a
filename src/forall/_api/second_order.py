"""`hvp`, `hessian_diag`, `laplacian`: second derivatives without the whole Hessian."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._api import argument_checks
from forall._api.argnums import describe_call
from forall._api.chunk_size import get_torch_chunk_size
from forall._api.define_transform import define_transform
from forall._api.execution.chunked_map import run_each_chunk
from forall._api.jacobian_blocks import InnerJacobian
from forall._api.jvp import push_forward
from forall._api.linearize import linearize_with_aux
from forall._api.typing import (
    Chunk,
)
from forall._api.vmap import vmap
from forall._autodiff import standard_basis
from forall._compat import functorch_interop, pytree

if TYPE_CHECKING:
    from collections.abc import Callable

COLUMNS = 64  # of the Hessian at once, unless chunk_size says otherwise


@define_transform()
def hvp(
    func: Callable,
    argnums: int | tuple[int, ...] = 0,
    *,
    argnames: str | tuple[str, ...] | None = None,
    has_aux: bool = False,
    return_value: bool = False,
) -> Callable:
    """The Hessian of ``func`` times a vector; the Hessian itself is not made.

    The vector comes last: ``hvp(f)(x, v)``, ``hvp(f)(x, y, v)``. For ``f: (*I) -> (*O)`` and ``v``
    of shape ``(*I)`` the result has shape ``(*O, *I)`` and holds

        hvp(f)(x, v)[o, i] = sum over j of d^2 f(x)[o] / d x[i] d x[j] * v[j].

    Cost: for a scalar function one gradient with its tangent, a few times the cost of ``f``. A
    function with more outputs costs a pull-back for each.

    Trees: ``v`` is shaped like the argument that is differentiated, or like the tuple of them;
    the result is as that of `jacrev`.

    Args:
        argnums: one position, or several; several take a tuple of vectors and give a tuple. They
            count the arguments of ``f``, to which the vector does not belong.
        argnames: the same by name, for arguments that are passed by position or by keyword.
        has_aux: ``f`` returns ``(y, aux)``; the result is then ``(hvp, aux)``.
        return_value: the result is ``(hvp, (jacobian, y))``, with has_aux
            ``(hvp, (jacobian, y, aux))``; the Jacobian of a scalar function is its gradient.

    Raises:
        RuntimeError: where the vector does not fit the argument; otherwise as `hessian`.

    Source: Pearlmutter, "Fast exact multiplication by the Hessian" (1994).

    Example:
        >>> def f(x):                                  # (3,) -> ()
        ...     return x.prod()
        >>> x, v = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 0.0, 1.0])
        >>> forall.hvp(f)(x, v)                        # (3,)
        tensor([2., 4., 2.])
    """

    def compute_product(func: Callable, /, *args_and_vector: Any, **kwargs: Any) -> Any:
        call = describe_call("hvp", func, argnums, argnames)
        args, vector = argument_checks.split_off_vector(call, args_and_vector)
        first = InnerJacobian(call, func, args, kwargs, (argnums, argnames), has_aux)
        vectors = argument_checks.select_vector_leaves(call, first.given, vector)
        xs = tuple(first.given.tensors)
        if functorch_interop.must_hand_over():
            j, hv, y = functorch_interop.call_torch_func("jvp", first, xs, vectors, has_aux=True)
        else:
            j, hv, y = push_forward(call, first, xs, vectors, strict=False, has_aux=True)
        return first.answer(first.tree(hv), j, y, return_value)

    return compute_product


@define_transform()
def hessian_diag(
    func: Callable,
    argnums: int | tuple[int, ...] = 0,
    *,
    argnames: str | tuple[str, ...] | None = None,
    has_aux: bool = False,
    return_value: bool = False,
    chunk_size: Chunk = None,
) -> Callable:
    """The diagonal of the Hessian of ``func``, which itself is not made: all d^2 f / d x[i]^2.

    For ``f: (*I) -> (*O)``, ``hessian_diag(f)(x)`` has shape ``(*O, *I)`` and holds

        hessian_diag(f)(x)[o, i] = d^2 f(x)[o] / d x[i]^2.

    Cost: ``f`` is called once, and its Jacobian linearized (see `linearize`). Then as many
    directions as there are numbers in ``x``, ``chunk_size`` at a time; so many columns of the
    Hessian are in memory, and no more.

    Trees: those of `jacrev`.

    Args:
        argnums: one position, or several; several give a tuple in the order asked.
        argnames: the same by name, for arguments that are passed by position or by keyword.
        has_aux: ``f`` returns ``(y, aux)``; the result is then ``(diagonal, aux)``.
        return_value: the result is ``(diagonal, (jacobian, y))``, with has_aux
            ``(diagonal, (jacobian, y, aux))``; the Jacobian of a scalar function is its gradient.
        chunk_size: so many columns at once, 64 if it is None; or ``"auto"`` (see `vmap`). Changes
            memory, not values.

    Raises:
        RuntimeError, ValueError: as `hessian`.

    Source: forward mode over reverse mode, a column at a time: Pearlmutter, "Fast exact
    multiplication by the Hessian" (1994).

    Example:
        >>> def f(x):                                  # (2,) -> (3,)
        ...     return torch.stack([x[0] * x[1], x.sum(), x[0] ** 2])
        >>> forall.hessian_diag(f)(torch.tensor([2.0, 3.0]))         # (3, 2)
        tensor([[0., 0.],
                [0., 0.],
                [2., 0.]])
    """
    which = argnums, argnames
    return _make_diagonal_transform(
        "hessian_diag", which, has_aux, return_value, chunk_size, InnerJacobian.tree
    )


@define_transform()
def laplacian(
    func: Callable,
    argnums: int | tuple[int, ...] = 0,
    *,
    argnames: str | tuple[str, ...] | None = None,
    has_aux: bool = False,
    return_value: bool = False,
    chunk_size: Chunk = None,
) -> Callable:
    """The sum of all d^2 f / d x[i]^2, the trace of a Hessian that is not made.

    For ``f: (*I) -> (*O)``, ``laplacian(f)(x)`` has shape ``(*O)`` and holds

        laplacian(f)(x)[o] = sum over i of d^2 f(x)[o] / d x[i]^2.

    Cost: that of `hessian_diag`.

    Trees: the result is shaped like ``f``'s output. The sum goes over every number in the
    argument, or in all arguments that are asked for.

    Args:
        argnums: one position, or several: ``laplacian(u, (0, 1))(x, y)`` is u_xx + u_yy.
        argnames: the same by name, for arguments that are passed by position or by keyword.
        has_aux: ``f`` returns ``(y, aux)``; the result is then ``(laplacian, aux)``.
        return_value: the result is ``(laplacian, (jacobian, y))``, with has_aux
            ``(laplacian, (jacobian, y, aux))``; the Jacobian of a scalar function is its gradient.
        chunk_size: so many columns of the Hessian at once, 64 if it is None; or ``"auto"`` (see
            `vmap`). Changes memory, not values.

    Raises:
        RuntimeError, ValueError: as `hessian`.

    Source: see `hessian_diag`.

    Example:
        >>> def f(x):                                  # (3,) -> ()
        ...     return x.square().sum() * x[0]
        >>> forall.laplacian(f)(torch.tensor([1.0, 2.0, 3.0]))       # 6x + 2x + 2x at x = 1
        tensor(10.)
    """
    which = argnums, argnames
    return _make_diagonal_transform(
        "laplacian", which, has_aux, return_value, chunk_size, _sum_diagonals
    )


def _make_diagonal_transform(
    verb: str,
    which: tuple[Any, Any],  # argnums, argnames
    has_aux: bool,
    return_value: bool,
    chunk_size: Chunk,
    result: Callable[[InnerJacobian, list], Any],
) -> Callable:
    """Return a function that runs a call: ``result`` of its diagonals, and the value or aux."""
    argument_checks.check_chunk_size(verb, chunk_size)

    def compute_diagonal(func: Callable, /, *args: Any, **kwargs: Any) -> Any:
        first = InnerJacobian(describe_call(verb, func, *which), func, args, kwargs, which, has_aux)
        found, j, y = _find_diagonals(first, chunk_size)
        return first.answer(result(first, found), j, y, return_value)

    return compute_diagonal


def _sum_diagonals(first: InnerJacobian, diagonals: list) -> Any:
    xs = first.given.tensors
    sums = [sum(map(_sum_over_input, row, xs)) for row in diagonals]
    return pytree.unflatten(sums, first.spec)


def _sum_over_input(block: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return a block (*O, *I) summed to (*O), for ``x`` of shape (*I)."""
    return block.reshape(*block.shape[: block.dim() - x.dim()], x.numel()).sum(-1)


def _find_diagonals(first: InnerJacobian, chunk: Chunk) -> tuple[list, list, Any]:
    """Return d^2 y / d x^2 (*O, *I) for each output and input, then the results of ``first``."""
    xs = tuple(first.given.tensors)
    if functorch_interop.must_hand_over():
        chunk = get_torch_chunk_size(chunk)
        j, y = first(*xs)

        def push_along(*directions: torch.Tensor) -> Any:
            return functorch_interop.call_torch_func(
                "jvp", lambda *new: first(*new)[0], xs, directions
            )[1]

        columns = functorch_interop.call_torch_func("vmap", push_along)
    else:
        j, push_along, y = linearize_with_aux(first.call, first, xs, has_aux=True)
        columns = vmap(push_along)
    parts: list[list[list]] = [[[] for _ in row] for row in j]

    def some(numbers: range) -> list:
        found = columns(*standard_basis.make_basis_rows(xs, numbers.start, numbers.stop))
        # A copy, because a view would keep all the columns in memory.
        return [(at, d.clone()) for at, d in _take_diagonal_entries(found, xs, numbers)]

    for found in run_each_chunk(some, sum(x.numel() for x in xs), chunk or COLUMNS, xs, "column"):
        for (o, i), entries in found:
            parts[o][i].append(entries)
    whole = [
        [torch.cat(p, -1).reshape(b.shape) if p else b for p, b in zip(*rows, strict=True)]
        for rows in zip(parts, j, strict=True)
    ]
    return whole, j, y


def _take_diagonal_entries(found: list, xs: tuple, numbers: range) -> Any:
    """Yield the diagonal entries (*O, some of I) of columns ``numbers`` (C, *O, *I)."""
    first = 0
    for i, x in enumerate(xs):
        n = x.numel()
        low, high = max(numbers.start, first), min(numbers.stop, first + n)
        if low < high:
            rows = slice(low - numbers.start, high - numbers.start)
            for o, row in enumerate(found):
                block = row[i].reshape(*row[i].shape[: row[i].dim() - x.dim()], n)
                square = block[rows, ..., low - first : high - first]
                yield (o, i), square.diagonal(dim1=0, dim2=-1)
        first += n
