"""Slices ``x[i:j]`` and ``x[i:j] = v`` with per-example bounds.

Torch would convert each bound of a slice to one int. If all examples pick the same number of
entries, one gather picks them all; writes into its result go back to x, see `view_copies`. A single
value is written through a mask, even if the number of entries differs. In all other cases the
examples diverge.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forall._divergence.batched_scalar import BatchedScalar, make_number, read_scalar
from forall._vmap.mutation.view_copies import sync_aliases
from forall._vmap.registry import CALLS
from forall._vmap.rules.api_overrides import (
    count_consumed_dims,
    expand_ellipsis,
    fit_value,
    gather_range,
    is_mapped_number,
)

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor
_EVERYTHING = slice(None)
_BASIC = (int, type(None))


class _Range(NamedTuple):
    """A slice of one dim of x, with bounds in [0, size]: Numbers or Python ints."""

    dim: int  # of x
    start: Any
    stop: Any
    step: int | None


def _is_per_example(bound: Any) -> bool:
    return type(bound) is BatchedScalar or is_mapped_number(bound)


def _has_differing_bound(entry: Any) -> bool:
    """Return True if an entry of an index is a slice with a bound of each example."""
    return type(entry) is slice and any(map(_is_per_example, (entry.start, entry.stop, entry.step)))


def _find_ranges(x: Tensor, entries: list) -> dict[int, _Range] | None:
    """Return the slices that differ, by their places among the entries; None for odd bounds."""
    found, dim = {}, 0
    for n, entry in enumerate(entries):
        if _has_differing_bound(entry):
            start = _clamp_bound(entry.start, x.shape[dim], 0)
            stop = _clamp_bound(entry.stop, x.shape[dim], x.shape[dim])
            step = entry.step
            if start is None or stop is None or not (step is None or type(step) is int):
                return None
            found[n] = _Range(dim, start, stop, step)
        dim += count_consumed_dims(entry)
    return found


def _clamp_bound(bound: Any, size: int, default: int) -> Any:
    """Return a bound as an index in [0, size]; None if torch has to raise the error for it."""
    if bound is None:
        return default
    if is_mapped_number(bound) and not (bound.is_floating_point() or bound.is_complex()):
        bound = read_scalar(bound.detach())
    if type(bound) is int:
        return min(max(bound + size if bound < 0 else bound, 0), size)
    if type(bound) is not BatchedScalar or bound.kind is not int:
        return None
    low, high = bound.bounds
    if low >= 0 and high <= size:
        return bound
    place = bound.tensor
    return make_number(torch.where(place < 0, place + size, place).clamp(0, size))


def _pick(read: Callable, x: Tensor, entries: list, ranges: dict[int, _Range]) -> Tensor | None:
    """Return ``x[entries]``, one gather for each range; None if examples differ in how many."""
    sizes = {}
    for n, found in ranges.items():
        size = found.stop - found.start
        if type(size) is not int or (found.step or 1) < 1:
            return None
        sizes[n] = max(size, 0)
    for n, found in ranges.items():
        start = found.start
        if type(start) is int:
            x = x.narrow(found.dim, min(start, x.shape[found.dim] - sizes[n]), sizes[n])
        else:
            x = gather_range(x, found.dim, start.tensor, sizes[n])
    rest = [slice(None, None, ranges[n].step) if n in ranges else e for n, e in enumerate(entries)]
    if all(type(e) is slice and e == _EVERYTHING for e in rest):
        return x
    found = read(x, tuple(rest))
    return x[tuple(rest)] if found is NotImplemented else found


def _make_get_item(before: Callable) -> Callable:
    def get_item(x: Tensor, index: Any) -> Any:
        if not _has_ranges(index):
            return before(x, index)
        entries = expand_ellipsis(x, index)
        ranges = _find_ranges(x, entries)
        found = None if ranges is None else _pick(before, x, entries, ranges)
        return before(x, index) if found is None else found

    return get_item


def _make_set_item(before: Callable, read: Callable) -> Callable:
    def set_item(x: Tensor, index: Any, value: Any) -> Any:
        if not _has_ranges(index):
            return before(x, index, value)
        entries = expand_ellipsis(x, index)
        ranges = _find_ranges(x, entries)
        if ranges is None:
            return before(x, index, value)
        if _is_one_value(value) and _is_basic(entries):
            _fill(x, entries, ranges, value)
            return x
        found = _pick(read, x, entries, ranges)
        if found is None or not _is_basic(entries):
            return before(x, index, value)
        found.copy_(fit_value(value, found, found.dim()))
        sync_aliases()  # while the gathered copy is alive
        return x

    return set_item


def _has_ranges(index: Any) -> bool:
    return (
        any(map(_has_differing_bound, index))
        if type(index) is tuple
        else _has_differing_bound(index)
    )


def _is_one_value(value: Any) -> bool:
    return not value.dim() if isinstance(value, Tensor) else type(value) in (int, float, bool)


def _is_basic(entries: list) -> bool:
    """Return True if they pick a view, in which each range keeps its dim."""
    return all(type(e) in _BASIC or type(e) is slice for e in entries)


def _fill(x: Tensor, entries: list, ranges: dict[int, _Range], value: Any) -> None:
    """Write one value into ``x[entries]``."""
    view = x[tuple(_EVERYTHING if n in ranges else e for n, e in enumerate(entries))]
    mask, dim = None, 0
    for n, entry in enumerate(entries):
        if n in ranges:
            inside = _mask_range(ranges[n], x).reshape(-1, *(1,) * (view.dim() - dim - 1))
            mask = inside if mask is None else mask & inside
        dim += type(entry) is not int
    view.masked_fill_(mask, fit_value(value, view, 0))


def _mask_range(found: _Range, x: Tensor) -> Tensor:
    """Return a mask of the indices of a dim that are in a range."""
    place = torch.arange(x.shape[found.dim], device=x.device)
    start, stop = (b.tensor if type(b) is BatchedScalar else b for b in (found.start, found.stop))
    inside = (place >= start) & (place < stop)
    step = found.step or 1
    return inside if step == 1 else inside & ((place - start) % step == 0)


_read = CALLS[Tensor.__getitem__]
CALLS[Tensor.__getitem__] = _make_get_item(_read)
CALLS[Tensor.__setitem__] = _make_set_item(CALLS[Tensor.__setitem__], _read)
