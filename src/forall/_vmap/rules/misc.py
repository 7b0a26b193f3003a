"""Rules of other operators: histograms, segment_reduce, assertions, untagged pointwise ones."""

from __future__ import annotations

from math import isfinite, prod
from typing import TYPE_CHECKING, Any

import torch

from forall._compat.assertions import REQUIRE, require
from forall._core.axes import wrap_dim
from forall._vmap.batched_tensor import wrap_stack
from forall._vmap.mutation.in_place import pointwise_in_place
from forall._vmap.registry import register_rows
from forall._vmap.rule_makers.basic import (
    expand_stack,
    expand_to_stack,
    lower_shared,
    make_stack_handler,
)
from forall._vmap.rule_makers.pointwise import handle_pointwise

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten
Tensor = torch.Tensor


# --- Python's in-place operators, which lack the tag `pointwise` ---------------------------------

register_rows(
    {
        getattr(getattr(aten, name), overload): pointwise_in_place
        for name in ("__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__")
        for overload in ("Tensor", "Scalar")
    },
    way="pointwise",
)


# Pointwise, though without the tag.
register_rows(
    dict.fromkeys(
        (
            aten.floor_divide.default,
            aten.floor_divide.Scalar,
            aten.hardshrink_backward.default,
            aten.softshrink_backward.default,
            aten.hardsigmoid_backward.default,
            aten.hardswish.default,
            aten.hardswish_backward.default,
            aten.hardtanh_backward.default,
            aten.leaky_relu_backward.default,
            aten._prelu_kernel.default,
            aten._prelu_kernel_backward.default,
            aten.rsub.Tensor,
            aten._add_relu.Tensor,
            aten._add_relu.Scalar,
        ),
        handle_pointwise,
    ),
    way="pointwise",
)


# --- histograms --------------------------------------------------------------------------------


def _flatten_examples(a: Any, size: int) -> Tensor:
    """Flatten each example: return (B, N)."""
    v = expand_stack(a, size)
    return v.reshape(size, -1)


def _sum_by_bin(
    bins: Tensor, weights: Any, valid: Tensor, count: int, dtype: torch.dtype
) -> Tensor:
    """Sum the weights (B, N), or ones for None, by bin: return (B, count)."""
    weights = valid.to(dtype) if weights is None else torch.where(valid, weights, 0)
    out = weights.new_zeros((bins.shape[0], count))
    return out.scatter_add(1, torch.where(valid, bins, 0), weights)


_ENDLESS = "histogram: the range of values is not finite"


def _find_range(x: Tensor, limits: Any, room: float) -> tuple[Any, Any]:
    """Return torch's range of the bins, by default that of the values.

    An empty range is widened by ``room`` on both sides.
    """
    if limits is None and x.shape[1]:
        low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    else:
        limits = limits or (0, 1)
        if not all(map(isfinite, limits)):
            raise RuntimeError(_ENDLESS)
        low, high = (x.new_full((x.shape[0], 1), limit) for limit in limits)
        return _widen_bounds(low, high, room)
    require((low.isfinite() & high.isfinite()).all(), _ENDLESS)
    return _widen_bounds(low, high, room)


def _widen_bounds(low: Tensor, high: Tensor, room: float) -> tuple[Tensor, Tensor]:
    """No range is empty."""
    flat = low == high
    return torch.where(flat, low - room, low), torch.where(flat, high + room, high)


@make_stack_handler
def _histc(size, x, bins=100, min=0, max=0):
    x = _flatten_examples(x, size)
    of_values = min == max == 0 and x.shape[1]
    low, high = _find_range(x, None if of_values else (min, max), 1)
    valid = (x >= low) & (x <= high)
    # The order of operations is the kernel's, as entries often lie on the edges.
    place = torch.where(valid, (x - low) * bins / (high - low), 0).long().clamp(max=bins - 1)
    return _sum_by_bin(place, None, valid, bins, x.dtype)


@make_stack_handler
def _histogram_counts(size, x, bins=100, *, range=None, weight=None, density=False):
    x = _flatten_examples(x, size).unsqueeze(-1)
    edges = _make_edges(x, [bins], range)
    return _histogramdd(x, edges, _flatten_weight(weight, size), density), edges[0]


@make_stack_handler
def _histogram_edges(size, x, bins, *, weight=None, density=False):
    x, edges = _flatten_examples(x, size).unsqueeze(-1), _flatten_examples(bins, size)
    return _histogramdd(x, [edges], _flatten_weight(weight, size), density), edges


def _flatten_weight(weight: Any, size: int) -> Tensor | None:
    return None if weight is None else _flatten_examples(weight, size)


def _flatten_points(x: Any, size: int) -> Tensor:
    """Flatten each example into points of D coordinates: return (B, N, D)."""
    v = expand_stack(x, size)
    return v.reshape(size, -1, v.shape[-1])


def _make_edges(x: Tensor, bins: list[int], limits: list[float] | None) -> list[Tensor]:
    """Return the edges (B, bins + 1) for each coordinate of x (B, N, D).

    They are exact to the last bit: linspace does not round as its formula would.
    """
    found = []
    for d, n in enumerate(bins):
        low, high = _find_range(x[..., d], limits and limits[2 * d : 2 * d + 2], 0.5)
        limits_of_each = zip(low.squeeze(1).unbind(), high.squeeze(1).unbind(), strict=True)
        ends = [torch.linspace(a, b, n + 1, dtype=x.dtype) for a, b in limits_of_each]
        found.append(torch.stack(ends).to(x.device))
    return found


def _histogramdd(x: Tensor, edges: list[Tensor], weight: Any, density: bool) -> Tensor:
    """Return the histogram (B, *bins) of x (B, N, D) for edges (B, bins + 1) per coordinate.

    A bin includes its left edge, the last bin its right edge too.
    """
    place, valid = torch.zeros_like(x[..., 0], dtype=torch.long), True
    for d, e in enumerate(edges):
        along = x[..., d].contiguous()
        valid = valid & (along >= e[:, :1]) & (along <= e[:, -1:])
        at = torch.searchsorted(e.contiguous(), along, right=True) - 1
        place = place * (e.shape[1] - 1) + at.clamp(0, e.shape[1] - 2)
    counts = [e.shape[1] - 1 for e in edges]
    out = _sum_by_bin(place, weight, valid, prod(counts), x.dtype).unflatten(1, counts)
    if density:
        out = out / out.flatten(1).sum(1).view(-1, *(1,) * len(counts))
        for d, e in enumerate(edges):
            shape = [-1, *(counts[d] if d == i else 1 for i in range(len(counts)))]
            out = out / e.diff(dim=1).view(shape)
    return out


@make_stack_handler
def _histogramdd_edges(size, x, bins, *, range=None, weight=None, density=False):
    return _make_edges(_flatten_points(x, size), bins, range)


@make_stack_handler
def _histogramdd_by_counts(size, x, bins, *, range=None, weight=None, density=False):
    x = _flatten_points(x, size)
    return _histogramdd(x, _make_edges(x, bins, range), _flatten_weight(weight, size), density)


@make_stack_handler
def _histogramdd_by_edges(size, x, bins, *, weight=None, density=False):
    edges = [_flatten_examples(e, size) for e in bins]
    return _histogramdd(_flatten_points(x, size), edges, _flatten_weight(weight, size), density)


register_rows(
    {
        aten._histogramdd_bin_edges.default: _histogramdd_edges,
        aten._histogramdd_from_bin_cts.default: _histogramdd_by_counts,
        aten._histogramdd_from_bin_tensors.default: _histogramdd_by_edges,
        aten.histc.default: _histc,
        aten.histogram.bin_ct: _histogram_counts,
        aten.histogram.bins_tensor: _histogram_edges,
    }
)


# --- segments ----------------------------------------------------------------------------------


def _make_segment_handler(tensors: int) -> Callable:
    """Return a handler on batched data and lengths: the kernels take batch dims before the axis.

    ``tensors`` is the number of tensors among the positional arguments; the last is the data.
    """

    def handler(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
        given = [expand_to_stack(a, level) for a in args[:tensors]]
        named = {
            k: expand_to_stack(a, level) if isinstance(a, Tensor) else a for k, a in kwargs.items()
        }
        named["axis"] = wrap_dim(kwargs.get("axis", 0), args[tensors - 1].dim()) + 1
        if not level.size and tensors == 1:
            named["unsafe"] = True  # the check of the lengths asks for their sum: there is none
        return wrap_stack(func(*given, *args[tensors:], **named), 0, level)

    return handler


register_rows(
    {
        aten.segment_reduce.default: _make_segment_handler(1),
        aten._segment_reduce_backward.default: _make_segment_handler(3),
    }
)


# --- copy on write -------------------------------------------------------------------------------


def _lazy_clone(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """Copy at once: a wrapper has no memory of its own to share until a write."""
    return wrap_stack(args[0].value.clone(), args[0].axis, level)


register_rows({aten._lazy_clone.default: _lazy_clone})


# --- checks of values --------------------------------------------------------------------------


def _assert_all(level: Any, func: Any, args: tuple, kwargs: dict) -> None:
    func((lower_shared(args[0], level) != 0).all(), *args[1:], **kwargs)


register_rows(
    {
        aten._assert_async.default: _assert_all,
        aten._assert_async.msg: _assert_all,
        REQUIRE: _assert_all,
        aten._foobar.default: handle_pointwise,
    }
)
