"""`associative_scan`: all prefix results of an associative function, in log steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._compat import pytree
from forall._compat.dispatch_state import functions_off
from forall._compat.documented_error import documented_error
from forall._control_flow.loop_carry import (
    OperatorCall,
    find_leaf_paths,
    has_same_meta,
    order_keys,
)
from forall._core.errors import format_columns, format_short, type_name_of

if TYPE_CHECKING:
    from collections.abc import Callable


def associative_scan(
    fn: Callable[[Any, Any], Any], elems: Any, reverse: bool = False, axis: int = 0
) -> Any:
    """All partial results of an associative function along a dim.

    The law, under every transform: for ``fn(a, fn(b, c)) = fn(fn(a, b), c)`` and elements x0, x1,
    ... along ``axis``, the result holds along it ``x0, fn(x0, x1), fn(fn(x0, x1), x2), ...``.

    ``fn`` is given slices of many elements, with the dim ``axis`` still there, and combines them
    element by element, as ``a + b`` does: about ``2 log2(n)`` calls, on under ``2 n`` elements.

    Args:
        fn: takes two trees like ``elems`` and returns one.
        elems: a tree of tensors of one size along ``axis``.
        reverse: from the last element on: ``.., fn(x_n, x_n-1), x_n``.
        axis: counts from the end if negative, by the dims of the first tensor.

    Raises:
        ValueError, IndexError: where the sizes along ``axis`` differ, or a tensor lacks that dim.
        TypeError: where ``fn`` returns another structure, shape or dtype than it was given.

    Source: Blelloch, "Prefix sums and their applications" (1990); ``jax.lax.associative_scan``.

    Example:
        >>> def after(f, g):                             # of lines y = a x + b, one after the other
        ...     return f[0] * g[0], g[0] * f[1] + g[1]
        >>> a, b = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 1.0, 1.0])
        >>> associative_scan(after, (a, b))
        (tensor([1., 2., 6.]), tensor([ 1.,  3., 10.]))
    """
    call = OperatorCall("associative_scan(*)", fn)
    leaves, spec = pytree.flatten(elems)
    axis = _check_axis(call, elems, leaves, axis)

    def combine_leaves(a: list, b: list) -> list:
        given = pytree.unflatten(b, spec)
        found, its_spec = pytree.flatten(order_keys(given, fn(pytree.unflatten(a, spec), given)))
        if its_spec != spec:
            raise _structures_differ(call, spec, its_spec)
        with functions_off():
            for i, (old, new) in enumerate(zip(b, found, strict=True)):
                if not (isinstance(new, torch.Tensor) and has_same_meta(old, new)):
                    raise _leaves_differ(call, find_leaf_paths(elems)[i], old, new)
        return found

    if reverse:
        leaves = [x.flip(axis) for x in leaves]
    found = _partial_results(combine_leaves, leaves, axis)
    if reverse:
        found = [x.flip(axis) for x in found]
    return pytree.unflatten(found, spec)


def _partial_results(combined: Callable, xs: list, axis: int) -> list:
    """Compute all prefix results: odd indices from pairs of neighbours, even ones from odd ones."""
    n = xs[0].shape[axis]
    if n < 2:
        return xs
    pairs = combined(_slice_each(xs, axis, 0, n - 1, 2), _slice_each(xs, axis, 1, n, 2))
    odd = _partial_results(combined, pairs, axis)
    before = odd if n % 2 else _slice_each(odd, axis, 0, n // 2 - 1)
    even = _slice_each(xs, axis, 0, 1)
    if n > 2:
        later = combined(before, _slice_each(xs, axis, 2, n, 2))
        even = [torch.cat(both, axis) for both in zip(even, later, strict=True)]
    return [_interleave(a, b, axis) for a, b in zip(even, odd, strict=True)]


def _slice_each(xs: list, axis: int, start: int, stop: int, step: int = 1) -> list:
    place = (slice(None),) * axis + (slice(start, stop, step),)
    return [x[place] for x in xs]


def _interleave(even: torch.Tensor, odd: torch.Tensor, axis: int) -> torch.Tensor:
    """Interleave (.., n or n + 1, ..) and (.., n, ..): first, first, second, second, ..."""
    n = odd.shape[axis]
    both = torch.stack([even.narrow(axis, 0, n), odd], axis + 1).flatten(axis, axis + 1)
    rest = even.shape[axis] - n
    return torch.cat([both, even.narrow(axis, n, rest)], axis) if rest else both


def _check_axis(call: OperatorCall, elems: Any, leaves: list, axis: int) -> int:
    """Return the dim as a non-negative number; raise unless all tensors have one size there."""
    names = find_leaf_paths(elems)
    with functions_off():
        for name, x in zip(names, leaves, strict=True):
            if not isinstance(x, torch.Tensor):
                raise documented_error(TypeError, "scan-elements")(
                    f"{call}: elems must hold tensors only.\n"
                    f"{format_columns([('elems' + name, format_short(x), type_name_of(x))])}\n"
                    "Put what is the same for all elements into the function."
                )
        if not leaves:
            raise documented_error(ValueError, "scan-elements")(
                f"{call}: elems holds no tensor.\nPass at least one."
            )
        place = axis + leaves[0].dim() if axis < 0 else axis
        for name, x in zip(names, leaves, strict=True):
            if not 0 <= place < x.dim():
                raise documented_error(IndexError, "scan-elements")(
                    f"{call}: a tensor has no dim {axis}.\n"
                    f"{format_columns([('elems' + name, format_short(x))])}\n"
                    "Name the dim that counts the elements: axis."
                )
        sizes = {x.shape[place] for x in leaves}
        if len(sizes) > 1:
            rows = [
                ("elems" + name, format_short(x), f"axis {axis}", f"size {x.shape[place]}")
                for name, x in zip(names, leaves, strict=True)
            ]
            raise documented_error(ValueError, "scan-elements")(
                f"{call}: the numbers of elements differ.\n"
                f"{format_columns(rows)}\nAll must have one size."
            )
    return place


def _structures_differ(call: OperatorCall, given: Any, returned: Any) -> TypeError:
    rows = [("given", pytree.format_tree(given)), ("returned", pytree.format_tree(returned))]
    return documented_error(TypeError, "scan-function")(
        f"{call}: the function returns another structure than it was given.\n"
        f"{format_columns(rows)}\n"
        "Return a tree like each of the two that it takes."
    )


def _leaves_differ(call: OperatorCall, path: str, given: Any, returned: Any) -> TypeError:
    rows = [
        ("given", "a" + path, format_short(given)),
        ("returned", "a" + path, format_short(returned)),
    ]
    return documented_error(TypeError, "scan-function")(
        f"{call}: the function returns another shape or dtype than it was given.\n"
        f"{format_columns(rows)}\n"
        "It is given slices of many elements, the axis that counts them included, and returns "
        "their like."
    )
