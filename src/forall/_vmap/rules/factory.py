"""Rules of factory functions: clone and ``*_like``, fill, linspace and logspace. And isin."""

from __future__ import annotations

from typing import Any

import torch

from forall._vmap.batched_indices import flat
from forall._vmap.batched_tensor import wrap
from forall._vmap.memory_layout import asks_first, expanded_inside
from forall._vmap.mutation.in_place import level_write, writable
from forall._vmap.registry import register
from forall._vmap.rule_makers.basic import (
    Stack,
    by_front,
    front,
    is_mapped,
    level_on,
    lower,
    pointwise,
    stacked,
)

aten = torch.ops.aten
Tensor = torch.Tensor


# --- clone and *_like, in the memory format of the example -------------------------------------

_CHANNELS_LAST = {torch.channels_last: 4, torch.channels_last_3d: 5}


def _like(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    x = args[0]
    layout = kwargs.get("memory_format")
    if layout is None or layout is torch.preserve_format:
        return wrap(func(x.value, *args[1:], **kwargs), x.axis, level)
    v, rest = front(x), {**kwargs, "memory_format": torch.contiguous_format}
    if layout is torch.contiguous_format:
        return wrap(func(v, *args[1:], **rest), 0, level)
    if x.dim() != _CHANNELS_LAST[layout]:
        raise RuntimeError(f"required rank {_CHANNELS_LAST[layout]} tensor to use {layout} format")
    last = func(v.movedim(2, -1), *args[1:], **rest)  # (B, N, .., C) in memory
    return wrap(last.movedim(-1, 2), 0, level)


register(
    dict.fromkeys(
        (
            aten.clone.default,
            aten._to_copy.default,
            aten.zeros_like.default,
            aten.ones_like.default,
            aten.empty_like.default,
            aten.full_like.default,
            aten.lift_fresh_copy.default,
        ),
        asks_first(_like, expanded_inside),
    )
)


# --- fill --------------------------------------------------------------------------------------


def _fill_in_place(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    func(writable(level, func, args[0], []), *args[1:])
    return args[0]


def _fill_from(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    if args[1].dim():
        raise RuntimeError(
            f"fill_ only supports 0-dimension value tensor but got tensor with {args[1].dim()} "
            "dimensions."
        )
    return level_write(level, func, [args[0]], [args[1]])


def _filled(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    x, value = args
    if not is_mapped(value, level):
        return wrap(func(x.value, lower(value, level)), x.axis, level)
    v = front(value).to(dtype=x.dtype, device=x.device)
    v = v.reshape(level.size, *(1,) * x.dim())
    return wrap(v.expand(level.size, *x.shape).clone(), 0, level)


def _copied(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return src in the shape and dtype of x."""
    with level_on(level):
        return aten.copy_.default(aten.empty_like.default(args[0]), args[1])


register(
    {
        aten.fill_.Scalar: _fill_in_place,
        aten.zero_.default: _fill_in_place,
        aten.fill_.Tensor: _fill_from,
        aten.copy.default: _copied,
        aten.fill.Scalar: _filled,
        aten.fill.Tensor: _filled,
        aten.complex.default: pointwise,  # without the tag `pointwise`
        aten.polar.default: pointwise,
    }
)


# --- linspace and logspace ---------------------------------------------------------------------


def _steps(level: Any, start: Any, end: Any, steps: int, kwargs: dict) -> tuple[Tensor, Any]:
    """Return the values (B, steps), computed from both ends as in torch, and the result's dtype."""
    ends = [a for a in (start, end) if isinstance(a, Tensor)]
    if any(a.dim() for a in ends):
        raise RuntimeError("linspace and logspace take tensors of rank 0 only")
    dtype = kwargs.get("dtype")
    if dtype is None:
        dtype = torch.get_default_dtype()
        if any(a.is_complex() for a in ends):
            dtype = torch.complex128 if dtype is torch.float64 else torch.complex64
    working = dtype if dtype.is_floating_point or dtype.is_complex else torch.float64
    device = kwargs.get("device") or ends[0].device
    start, end = (
        stacked(a, level).to(dtype=working, device=device).unsqueeze(1)
        if isinstance(a, Tensor)
        else torch.full((1, 1), a, dtype=working, device=device)
        for a in (start, end)
    )
    if not (dtype.is_floating_point or dtype.is_complex):
        most = torch.iinfo(dtype)
        for e in (start, end):  # nan is in no range
            fits = ((e >= most.min) & (e <= most.max)).all()
            aten._assert_async.msg(fits, f"value cannot be converted to {dtype} without overflow")
    n = torch.arange(steps, device=device)
    step = (end - start) / max(steps - 1, 1)
    return torch.where(
        n < max(steps // 2, 1), start + step * n, end - step * (steps - 1 - n)
    ), dtype


def _linspace(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    out, dtype = _steps(level, *args[:3], kwargs)
    return wrap(out.to(dtype), 0, level)


def _logspace(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    base = args[3] if len(args) > 3 else kwargs.get("base", 10.0)
    out, dtype = _steps(level, *args[:3], kwargs)
    return wrap(torch.pow(base, out).to(dtype), 0, level)


register(
    {
        getattr(packet, name): rule
        for packet, rule in ((aten.linspace, _linspace), (aten.logspace, _logspace))
        for name in ("Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor")
    }
)


@by_front
def _isin(size: int, x: Any, among: Any, assume_unique: bool = False, invert: bool = False):
    """Search each example's values in its sorted candidates."""
    if not isinstance(among, Stack):
        return aten.isin.Tensor_Tensor(x.v, among, assume_unique=assume_unique, invert=invert)
    x = x.v if isinstance(x, Stack) else x.expand(size, *x.shape)
    dtype = torch.promote_types(x.dtype, among.v.dtype)
    dtype = torch.uint8 if dtype is torch.bool else dtype
    entries, among = flat(x).to(dtype), flat(among.v).to(dtype)
    if not among.shape[1]:
        return torch.full(x.shape, invert, dtype=torch.bool, device=x.device)
    among = among.sort(1).values
    near = torch.searchsorted(among, entries.contiguous()).clamp(max=among.shape[1] - 1)
    found = among.gather(1, near) == entries
    return (found != invert).reshape(x.shape)


register({aten.isin.Tensor_Tensor: _isin})
