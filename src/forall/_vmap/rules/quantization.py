"""Rules of quantisation, with one scale for all examples, and of fake quantisation."""

from __future__ import annotations

from typing import Any

import torch

from forall._compat.documented_error import documented_error
from forall._core.axes import wrap_dim
from forall._vmap.batched_tensor import wrap_stack
from forall._vmap.registry import register_rows
from forall._vmap.rule_makers.basic import (
    expand_stack,
    expand_to_stack,
    is_mapped,
    lower_shared,
    make_stack_handler,
    move_to_front,
)
from forall._vmap.rule_makers.pointwise import handle_pointwise

aten = torch.ops.aten
Tensor = torch.Tensor


# --- fake quantisation -------------------------------------------------------------------------


def _fake_quantize(x: Tensor, scale: Tensor, zero: Tensor, *limits: int) -> list[Tensor]:
    """Fake-quantise per channel, with the batch axis folded in: (B, C, *S), (B, C), (B, C)."""
    out = aten.fake_quantize_per_channel_affine_cachemask.default(
        x.flatten(0, 1), scale.flatten(), zero.flatten(), 0, *limits
    )
    return [o.reshape(x.shape) for o in out]


def _fake_quantize_channels(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    x, scale, zero = (expand_to_stack(a, level) for a in args[:3])
    dim = wrap_dim(args[3], args[0].dim()) + 1
    out = _fake_quantize(x.movedim(dim, 1), scale, zero, *args[4:])
    return tuple(wrap_stack(o.movedim(1, dim), 0, level) for o in out)


def _fake_quantize_tensor(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    if not any(is_mapped(a, level) for a in args[1:4]):
        return handle_pointwise(level, func, args, kwargs)
    x, *by = (expand_to_stack(a, level) for a in args[:4])
    scale, zero, on = (a.reshape(a.shape[0], 1) for a in by)
    flat = x.reshape(x.shape[0], 1, args[0].numel())
    out, mask = (o.reshape(x.shape) for o in _fake_quantize(flat, scale, zero.int(), *args[4:]))
    on = on.reshape(-1, *(1,) * args[0].dim()) >= 1
    return wrap_stack(torch.where(on, out, x), 0, level), wrap_stack(mask | ~on, 0, level)


register_rows(
    {
        aten.fake_quantize_per_tensor_affine_cachemask.default: handle_pointwise,
        aten.fake_quantize_per_channel_affine_cachemask.default: _fake_quantize_channels,
        aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default: (
            _fake_quantize_tensor
        ),
    }
)


# --- learned scales ------------------------------------------------------------------------------


def _make_learned_handler(op: Any, tensors: int, *, by_channel: bool):
    """Return the handler of ``op(*tensors, scale, zero, [axis,] ..)``, run by a per-channel kernel.

    The batch axis is folded into the channels, or takes their place.
    """

    def rule(size, *args):
        given, rest = (
            [expand_stack(a, size) for a in args[: tensors + 2]],
            list(args[tensors + 2 :]),
        )
        *xs, scale, zero = given
        rank = xs[0].dim() - 1
        dim = wrap_dim(rest.pop(0), rank) + 1 if by_channel else 1
        if tensors == 2 and not by_channel:  # as the per-tensor backward kernel rounds
            zero = (zero + 0.5).clamp(*rest[:2]).trunc()
        xs = [x.movedim(dim, 1) if by_channel else x.unsqueeze(1) for x in xs]
        outs = op(*(x.flatten(0, 1) for x in xs), scale.flatten(), zero.flatten(), 0, *rest)
        x, *of_scale = outs if isinstance(outs, tuple) else (outs,)
        x = x.reshape(xs[0].shape)
        x = x.movedim(1, dim) if by_channel else x.squeeze(1)
        return (x, *(o.reshape(scale.shape) for o in of_scale)) if of_scale else x

    return make_stack_handler(rule)


_FORWARD = aten._fake_quantize_learnable_per_channel_affine.default
_BACKWARD = aten._fake_quantize_learnable_per_channel_affine_backward.default
register_rows(
    {
        _FORWARD: _make_learned_handler(_FORWARD, 1, by_channel=True),
        _BACKWARD: _make_learned_handler(_BACKWARD, 2, by_channel=True),
        aten._fake_quantize_learnable_per_tensor_affine.default: _make_learned_handler(
            _FORWARD, 1, by_channel=False
        ),
        aten._fake_quantize_learnable_per_tensor_affine_backward.default: _make_learned_handler(
            _BACKWARD, 2, by_channel=False
        ),
    }
)


# --- quantised tensors ---------------------------------------------------------------------------


def _lower_scales(func: Any, args: tuple, level: Any) -> list:
    """Return the arguments after the first, one level down, or refuse if any of them is batched.

    A batched quantised tensor has one scale for all examples.
    """
    if any(is_mapped(a, level) for a in args[1:]):
        raise _make_scale_error(func)
    return [lower_shared(a, level) for a in args[1:]]


def _make_scale_error(func: Any) -> NotImplementedError:
    return documented_error(NotImplementedError, "quantized-scale")(
        f"vmap: {func} would give each example a scale of its own, and quantised tensors that "
        "differ in scale have no stack.\nGive all examples one scale, or use torch.fake_quantize_*."
    )


def _quantize(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    rest = _lower_scales(func, args, level)
    return wrap_stack(func(args[0].value, *rest, **kwargs), args[0].axis, level)


def _quantize_channels(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    scales, zeros, axis, *rest = _lower_scales(func, args, level)
    axis = wrap_dim(axis, args[0].dim()) + 1
    return wrap_stack(func(move_to_front(args[0]), scales, zeros, axis, *rest, **kwargs), 0, level)


def _refuse_scales(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    raise _make_scale_error(func)


def _run_on_stack(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    out = func(args[0].value, *args[1:], **kwargs)
    return wrap_stack(out, args[0].axis, level) if isinstance(out, Tensor) else out


register_rows(
    {
        aten.quantize_per_tensor.default: _quantize,
        aten.quantize_per_tensor.tensor_qparams: _quantize,
        aten.quantize_per_channel.default: _quantize_channels,
        aten.quantize_per_tensor_dynamic.default: _refuse_scales,
        aten.quantize_per_tensor.tensors: _refuse_scales,
        aten.dequantize.self: _run_on_stack,
        aten.int_repr.default: _run_on_stack,
        aten.q_scale.default: _run_on_stack,
        aten.q_zero_point.default: _run_on_stack,
    }
)
