"""What is kin to nothing else: counting into bins, segments, quantisation, checks of values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._batching.batched import wrap
from forall._batching.families import (
    Stack,
    by_front,
    front,
    is_mapped,
    loop,
    lower,
    pointwise,
    stacked,
)
from forall._batching.table import register
from forall._core.axes import wrap_dim
from forall._core.errors import data_dependent

if TYPE_CHECKING:
    from collections.abc import Sequence

aten = torch.ops.aten
Tensor = torch.Tensor


# --- counting ----------------------------------------------------------------------------------


def _rows(a: Any, size: int) -> Tensor:
    """(B, N), whatever the shape of one example."""
    v = a.v if isinstance(a, Stack) else a.unsqueeze(0).expand(size, *a.shape)
    return v.reshape(size, -1)


def _tally(bins: Tensor, weights: Tensor, valid: Tensor, count: int) -> Tensor:
    """(B, N) places and weights -> (B, count) sums."""
    out = weights.new_zeros((bins.shape[0], count))
    return out.scatter_add(1, torch.where(valid, bins, 0), torch.where(valid, weights, 0))


def _outer_edges(x: Tensor, lo: float, hi: float) -> tuple[Any, Any]:
    """Torch's range for bins: (0, 0) asks for that of the values, and none may be empty."""
    if lo == hi == 0 and x.shape[1]:
        low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    else:
        low = torch.full_like(x[:, :1] if x.shape[1] else x.new_empty((x.shape[0], 1)), lo)
        high = torch.full_like(low, hi)
    aten._assert_async.msg(
        (low.isfinite() & high.isfinite()).all(), "histogram: the range of values is not finite"
    )
    flat = low == high
    return torch.where(flat, low - 1, low), torch.where(flat, high + 1, high)


@by_front
def _histc(size, x, bins=100, min=0, max=0):
    x = _rows(x, size)
    low, high = _outer_edges(x, min, max)
    valid = (x >= low) & (x <= high)
    # In the kernel's own order of operations: entries lie on the edges more often than not.
    place = torch.where(valid, (x - low) * bins / (high - low), 0).long().clamp(max=bins - 1)
    return _tally(place, torch.ones_like(x), valid, bins)


def _histogram(x: Tensor, edges: Tensor, weight: Any, density: bool) -> tuple[Tensor, Tensor]:
    """(B, N), (B, bins + 1): a bin holds its left edge, the last one its right edge too."""
    count = edges.shape[1] - 1
    valid = (x >= edges[:, :1]) & (x <= edges[:, -1:])
    place = torch.searchsorted(edges, x.contiguous(), right=True) - 1
    weights = torch.ones_like(x) if weight is None else weight
    out = _tally(place.clamp(0, count - 1), weights, valid, count)
    if density:
        out = out / out.sum(1, keepdim=True) / edges.diff(dim=1)
    return out, edges


def _pairs(low: Tensor, high: Tensor) -> zip:
    return zip(low.squeeze(1).unbind(), high.squeeze(1).unbind(), strict=True)


@by_front
def _histogram_counts(size, x, bins=100, *, range=None, weight=None, density=False):
    x = _rows(x, size)
    low, high = _outer_edges(x, *(range or (0, 0)))
    # Edges to the last bit: linspace does not round as its formula would.
    edges = torch.stack(
        [torch.linspace(a, b, bins + 1, dtype=x.dtype, device=x.device) for a, b in _pairs(low, high)]
    )
    return _histogram(x, edges, None if weight is None else _rows(weight, size), density)


@by_front
def _histogram_edges(size, x, bins, *, weight=None, density=False):
    weight = None if weight is None else _rows(weight, size)
    return _histogram(_rows(x, size), _rows(bins, size).contiguous(), weight, density)


def _bincount(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """Where every example asks for the same length; else there is no stack of the results."""
    x, weights, least = (*args, *(None, 0)[len(args) - 1 :])
    v = stacked(x, level)
    size, numel = v.shape
    needs = v.amax(1) + 1 if numel and size else v.new_full((size,), least)
    longest = max(least, int(needs.max())) if size else least
    if size and int(needs.clamp(min=least).min()) != longest:
        raise data_dependent("bincount", "Give minlength, one more than the largest value.")
    if numel and size and int(v.min()) < 0:
        raise RuntimeError("bincount only supports 1-d non-negative integral inputs.")
    flat = v + longest * torch.arange(size, device=v.device, dtype=v.dtype).unsqueeze(1)
    if weights is not None:
        weights = stacked(weights, level).reshape(-1)
    counts = torch.bincount(flat.long().reshape(-1), weights, minlength=size * longest)
    return wrap(counts.reshape(size, longest), 0, level)


register(
    {
        aten.histc.default: _histc,
        aten.histogram.bin_ct: _histogram_counts,
        aten.histogram.bins_tensor: _histogram_edges,
        aten.bincount.default: _bincount,
    }
)


# --- segments ----------------------------------------------------------------------------------


def _segment_reduce(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """The kernel takes batch dims before the axis, for data and lengths alike."""
    kwargs = {k: stacked(a, level) if isinstance(a, Tensor) else a for k, a in kwargs.items()}
    kwargs["axis"] = wrap_dim(kwargs.get("axis", 0), args[0].dim()) + 1
    if not level.size:
        kwargs["unsafe"] = True  # the check of the lengths asks for their sum, and there is none
    return wrap(func(stacked(args[0], level), *args[1:], **kwargs), 0, level)


def _segment_reduce_backward(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    kwargs = {k: stacked(a, level) if isinstance(a, Tensor) else a for k, a in kwargs.items()}
    kwargs["axis"] = wrap_dim(kwargs.get("axis", 0), args[2].dim()) + 1
    return wrap(func(*(stacked(a, level) for a in args[:3]), *args[3:], **kwargs), 0, level)


register(
    {
        aten.segment_reduce.default: _segment_reduce,
        aten._segment_reduce_backward.default: _segment_reduce_backward,
    }
)


# --- fake quantisation -------------------------------------------------------------------------


def _per_channel(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """Examples' channels next to each other: (B, C, ..) -> (B * C, ..), one scale for each."""
    x, scale, zero, axis = (stacked(a, level) for a in args[:3]), *args[3:4]
    return x
