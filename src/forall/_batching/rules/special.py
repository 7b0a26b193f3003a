"""What is kin to nothing else: counting into bins, segments, quantisation, checks of values."""

from __future__ import annotations

from typing import Any

import torch

from forall._batching.batched import wrap
from forall._batching.families import (
    Stack,
    by_front,
    is_mapped,
    lower,
    pointwise,
    stacked,
)
from forall._batching.table import register
from forall._batching.writing import pointwise_in_place
from forall._core.axes import wrap_dim

aten = torch.ops.aten
Tensor = torch.Tensor


# --- Python's in-place operators, which lack the tag ---------------------------------------------

register(
    {
        getattr(getattr(aten, name), overload): pointwise_in_place
        for name in ("__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__")
        for overload in ("Tensor", "Scalar")
    },
    way="pointwise",
)


# Pointwise, though without the tag.
register(
    {aten.floor_divide.default: pointwise, aten.floor_divide.Scalar: pointwise}, way="pointwise"
)


# --- counting ----------------------------------------------------------------------------------


def _rows(a: Any, size: int) -> Tensor:
    """(B, N), whatever the shape of one example."""
    v = a.v if isinstance(a, Stack) else a.unsqueeze(0).expand(size, *a.shape)
    return v.reshape(size, -1)


def _tally(bins: Tensor, weights: Tensor, valid: Tensor, count: int) -> Tensor:
    """(B, N) places and weights -> (B, count) sums."""
    out = weights.new_zeros((bins.shape[0], count))
    return out.scatter_add(1, torch.where(valid, bins, 0), torch.where(valid, weights, 0))


def _outer_edges(x: Tensor, lo: float, hi: float, room: float) -> tuple[Any, Any]:
    """Torch's range for bins: (0, 0) asks for that of the values; an empty one gets room."""
    if lo == hi == 0 and x.shape[1]:
        low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    else:
        low = torch.full_like(x[:, :1] if x.shape[1] else x.new_empty((x.shape[0], 1)), lo)
        high = torch.full_like(low, hi)
    aten._assert_async.msg(
        (low.isfinite() & high.isfinite()).all(), "histogram: the range of values is not finite"
    )
    flat = low == high
    return torch.where(flat, low - room, low), torch.where(flat, high + room, high)


@by_front
def _histc(size, x, bins=100, min=0, max=0):
    x = _rows(x, size)
    low, high = _outer_edges(x, min, max, 1)
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
    least, most = range or (0, 0)
    low, high = _outer_edges(x, least, most, 0.5)
    # Edges to the last bit: linspace does not round as its formula would.
    edges = torch.stack(
        [
            torch.linspace(a, b, bins + 1, dtype=x.dtype, device=x.device)
            for a, b in _pairs(low, high)
        ]
    )
    return _histogram(x, edges, None if weight is None else _rows(weight, size), density)


@by_front
def _histogram_edges(size, x, bins, *, weight=None, density=False):
    weight = None if weight is None else _rows(weight, size)
    return _histogram(_rows(x, size), _rows(bins, size).contiguous(), weight, density)


register(
    {
        aten.histc.default: _histc,
        aten.histogram.bin_ct: _histogram_counts,
        aten.histogram.bins_tensor: _histogram_edges,
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


def _by_channel(x: Tensor, scale: Tensor, zero: Tensor, *limits: int) -> list[Tensor]:
    """(B, C, *S), (B, C), (B, C): the examples' channels are as good as one example's."""
    out = aten.fake_quantize_per_channel_affine_cachemask.default(
        x.flatten(0, 1), scale.flatten(), zero.flatten(), 0, *limits
    )
    return [o.reshape(x.shape) for o in out]


def _fake_quantize_channels(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    x, scale, zero = (stacked(a, level) for a in args[:3])
    dim = wrap_dim(args[3], args[0].dim()) + 1
    out = _by_channel(x.movedim(dim, 1), scale, zero, *args[4:])
    return tuple(wrap(o.movedim(1, dim), 0, level) for o in out)


def _fake_quantize_tensor(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    if not any(is_mapped(a, level) for a in args[1:4]):
        return pointwise(level, func, args, kwargs)
    x, *by = (stacked(a, level) for a in args[:4])
    scale, zero, on = (a.reshape(a.shape[0], 1) for a in by)
    flat = x.reshape(x.shape[0], 1, args[0].numel())
    out, mask = (o.reshape(x.shape) for o in _by_channel(flat, scale, zero.int(), *args[4:]))
    on = on.reshape(-1, *(1,) * args[0].dim()) >= 1
    return wrap(torch.where(on, out, x), 0, level), wrap(mask | ~on, 0, level)


register(
    {
        aten.fake_quantize_per_tensor_affine_cachemask.default: pointwise,
        aten.fake_quantize_per_channel_affine_cachemask.default: _fake_quantize_channels,
        aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default: (
            _fake_quantize_tensor
        ),
    }
)


# --- what a wrapper cannot do --------------------------------------------------------------------


def _lazy_clone(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """Copy on write is a matter of the memory, which is the stack's."""
    return wrap(args[0].value.clone(), args[0].axis, level)


register({aten._lazy_clone.default: _lazy_clone})


# --- checks of values --------------------------------------------------------------------------


def _assert_all(level: Any, func: Any, args: tuple, kwargs: dict) -> None:
    func((lower(args[0], level) != 0).all(), *args[1:], **kwargs)


register(
    {
        aten._assert_async.default: _assert_all,
        aten._assert_async.msg: _assert_all,
        aten._foobar.default: pointwise,
    }
)
