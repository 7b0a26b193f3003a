"""Rules of factory functions: clone and ``*_like``, fill, linspace and logspace. And isin."""

from __future__ import annotations

from typing import Any

import torch

from forall._compat.assertions import require
from forall._vmap.batched_indices import flatten_examples
from forall._vmap.batched_tensor import wrap_stack
from forall._vmap.memory_layout import is_expanded_inside, keep_example_layout
from forall._vmap.mutation.in_place import get_writable_stack, write_all
from forall._vmap.registry import register_rows
from forall._vmap.rule_makers.basic import (
    MappedStack,
    expand_stack,
    expand_to_stack,
    is_mapped,
    lower_shared,
    make_stack_handler,
    move_to_front,
    reenter_level,
)
from forall._vmap.rule_makers.pointwise import handle_pointwise

aten = torch.ops.aten
Tensor = torch.Tensor


# --- clone and *_like, in the memory format of the example -------------------------------------

_CHANNELS_LAST = {torch.channels_last: 4, torch.channels_last_3d: 5}


def _like(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    x = args[0]
    layout = kwargs.get("memory_format")
    if layout is None or layout is torch.preserve_format:
        return wrap_stack(func(x.value, *args[1:], **kwargs), x.axis, level)
    v, rest = move_to_front(x), {**kwargs, "memory_format": torch.contiguous_format}
    if layout is torch.contiguous_format:
        return wrap_stack(func(v, *args[1:], **rest), 0, level)
    if x.dim() != _CHANNELS_LAST[layout]:
        raise RuntimeError(f"required rank {_CHANNELS_LAST[layout]} tensor to use {layout} format")
    last = func(v.movedim(2, -1), *args[1:], **rest)  # (B, N, .., C) in memory
    return wrap_stack(last.movedim(-1, 2), 0, level)


register_rows(
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
        keep_example_layout(_like, is_expanded_inside),
    )
)


# --- fill --------------------------------------------------------------------------------------


def _fill_in_place(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    func(get_writable_stack(level, func, args[0], []), *args[1:])
    return args[0]


def _fill_from(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    if args[1].dim():
        raise RuntimeError(
            f"fill_ only supports 0-dimension value tensor but got tensor with {args[1].dim()} "
            "dimensions."
        )
    return write_all(level, func, [args[0]], [args[1]])


def _fill(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    x, value = args
    if not is_mapped(value, level):
        return wrap_stack(func(x.value, lower_shared(value, level)), x.axis, level)
    v = move_to_front(value).to(dtype=x.dtype, device=x.device)
    v = v.reshape(level.size, *(1,) * x.dim())
    return wrap_stack(v.expand(level.size, *x.shape).clone(), 0, level)


def _copy(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return src in the shape and dtype of x."""
    with reenter_level(level):
        return aten.copy_.default(aten.empty_like.default(args[0]), args[1])


register_rows(
    {
        aten.fill_.Scalar: _fill_in_place,
        aten.zero_.default: _fill_in_place,
        aten.fill_.Tensor: _fill_from,
        aten.copy.default: _copy,
        aten.fill.Scalar: _fill,
        aten.fill.Tensor: _fill,
        aten.complex.default: handle_pointwise,  # without the tag `pointwise`
        aten.polar.default: handle_pointwise,
    }
)


# --- linspace and logspace ---------------------------------------------------------------------


def _compute_steps(
    level: Any, start: Any, end: Any, steps: int, kwargs: dict
) -> tuple[Tensor, Any]:
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
        expand_to_stack(a, level).to(dtype=working, device=device).unsqueeze(1)
        if isinstance(a, Tensor)
        else torch.full((1, 1), a, dtype=working, device=device)
        for a in (start, end)
    )
    if not (dtype.is_floating_point or dtype.is_complex):
        most = torch.iinfo(dtype)
        for e in (start, end):  # nan is in no range
            fits = ((e >= most.min) & (e <= most.max)).all()
            require(fits, f"value cannot be converted to {dtype} without overflow")
    n = torch.arange(steps, device=device)
    step = (end - start) / max(steps - 1, 1)
    return torch.where(
        n < max(steps // 2, 1), start + step * n, end - step * (steps - 1 - n)
    ), dtype


def _linspace(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    out, dtype = _compute_steps(level, *args[:3], kwargs)
    return wrap_stack(out.to(dtype), 0, level)


def _logspace(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    base = args[3] if len(args) > 3 else kwargs.get("base", 10.0)
    out, dtype = _compute_steps(level, *args[:3], kwargs)
    return wrap_stack(torch.pow(base, out).to(dtype), 0, level)


register_rows(
    {
        getattr(packet, name): rule
        for packet, rule in ((aten.linspace, _linspace), (aten.logspace, _logspace))
        for name in ("Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor")
    }
)


@make_stack_handler
def _isin(size: int, x: Any, among: Any, assume_unique: bool = False, invert: bool = False):
    """Search each example's values in its sorted candidates."""
    if not isinstance(among, MappedStack):
        return aten.isin.Tensor_Tensor(x.v, among, assume_unique=assume_unique, invert=invert)
    x = expand_stack(x, size)
    dtype = torch.promote_types(x.dtype, among.v.dtype)
    dtype = torch.uint8 if dtype is torch.bool else dtype
    entries, among = flatten_examples(x).to(dtype), flatten_examples(among.v).to(dtype)
    if not among.shape[1]:
        return torch.full(x.shape, invert, dtype=torch.bool, device=x.device)
    among = among.sort(1).values
    near = torch.searchsorted(among, entries.contiguous()).clamp(max=among.shape[1] - 1)
    found = among.gather(1, near) == entries
    return (found != invert).reshape(x.shape)


register_rows({aten.isin.Tensor_Tensor: _isin})
