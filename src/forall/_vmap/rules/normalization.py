"""Rules of layer norm, RMS norm, group norm, weight norm and renorm.

Torch's kernel normalises all examples at once. An unbatched weight is applied by the fused kernel.
A batched weight scales the kernel's result, and in the backward pass the cotangent before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._core.half_precision import to_float32
from forall._core.levels import has_any_tangent
from forall._vmap.registry import register_rows
from forall._vmap.rule_makers.basic import (
    MappedStack,
    expand_stack,
    get_value,
    make_stack_handler,
    pad_example_rank,
)

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten
Tensor = torch.Tensor


def is_any_mapped(*params: Any) -> bool:
    """True if any parameter is batched."""
    return any(isinstance(p, MappedStack) for p in params)


def scale_and_shift(x: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> Tensor:
    """Return x * weight + bias, rounded once, in x's dtype."""
    if weight is None:
        return x if bias is None else (x + bias).to(x.dtype)
    return (x * weight if bias is None else torch.addcmul(bias, x, weight)).to(x.dtype)


def recompute_normalized(x: Tensor, mean: Tensor | None, rstd: Tensor, dims: list[int]) -> Tensor:
    """Normalise x as the kernel did, for the cotangent of a weight.

    Torch gives mean and rstd no tangents, so they are computed again if x has a tangent. The eps
    that was added to the variance follows from the kernel's rstd.
    """
    if not has_any_tangent(x):
        return (x if mean is None else x - mean) * rstd
    if mean is not None:
        x = x - x.mean(dims, keepdim=True)
    square = (x * x).mean(dims, keepdim=True)
    return x * (square + (rstd**-2 - square).detach()).rsqrt()


def cast_to_param(param: Any, x: Tensor) -> Tensor:
    """Return a cotangent in the dtype of its parameter."""
    return x if param is None else x.to((param.v if is_any_mapped(param) else param).dtype)


def make_kernel_weight(x: Tensor, shape: list[int], *params: Any) -> Tensor | None:
    """Return the weight that the kernel gets if it is not to scale by batched parameters.

    It is None, except for the mixed-precision kernel (half input, float parameters): that one needs
    a weight, which is ones.
    """
    for p in params:
        if p is not None and (dtype := get_value(p).dtype) != x.dtype:
            return torch.ones(shape, dtype=dtype, device=x.device)
    return None


def scale_cotangent(
    g: Tensor, weight: Any, shape: list[int], place: Callable, *others: Any
) -> tuple[Tensor, Tensor | None]:
    """Return the cotangent of the kernel's result, and the weight for the kernel.

    ``place(weight, rank)`` reshapes a batched weight so that it broadcasts to the cotangent.
    """
    if is_any_mapped(weight, *others):
        g, weight = (
            scale_and_shift(g, place(weight, g.dim() - 1)),
            make_kernel_weight(g, shape, weight, *others),
        )
    return g, weight


# --- over the last dims: (B, *L, *D), parameters (B, *D) -----------------------------------------


@make_stack_handler
def _layer_norm(size, x, shape, weight, bias, eps):
    v = x.v if isinstance(x, MappedStack) else x
    if not is_any_mapped(weight, bias):
        return aten.native_layer_norm.default(v, shape, weight, bias, eps)
    w = make_kernel_weight(v, shape, weight, bias)
    out, *found = aten.native_layer_norm.default(v, shape, w, None, eps)
    rank = v.dim() - isinstance(x, MappedStack)
    out = scale_and_shift(out, pad_example_rank(weight, rank), pad_example_rank(bias, rank))
    return out, *(s if isinstance(x, MappedStack) else s.expand(size, *s.shape) for s in found)


@make_stack_handler
def _layer_norm_backward(size, g, x, shape, mean, rstd, weight, bias, mask):
    g, x, mean, rstd = (expand_stack(a, size) for a in (g, x, mean, rstd))
    outer = x.dim() - len(shape)
    dx = None
    if mask[0]:
        gx, w = scale_cotangent(g, weight, shape, pad_example_rank, bias)
        args = (gx.contiguous(), x.contiguous(), shape, mean.contiguous(), rstd.contiguous(), w)
        dx = aten.native_layer_norm_backward.default(*args, None, [True, False, False])[0]
    gp = to_float32(g)
    dw = None
    if mask[1]:
        dims = [*range(outer, x.dim())]
        dw = sum_outer_dims(
            gp * recompute_normalized(to_float32(x), mean, rstd, dims), outer, weight
        )
    return dx, dw, sum_outer_dims(gp, outer, bias) if mask[2] else None


def sum_outer_dims(x: Tensor, outer: int, param: Any) -> Tensor:
    """Sum over the outer dims to the cotangent of a parameter: (B, *L, *D) -> (B, *D)."""
    x = x.sum(list(range(1, outer))) if outer > 1 else x
    return cast_to_param(param, x)


@make_stack_handler
def _rms_norm(size, x, shape, weight, eps):
    v = x.v if isinstance(x, MappedStack) else x
    if not is_any_mapped(weight):
        return aten._fused_rms_norm.default(v, shape, weight, eps)
    out, rstd = aten._fused_rms_norm.default(v, shape, make_kernel_weight(v, shape, weight), eps)
    out = scale_and_shift(out, pad_example_rank(weight, v.dim() - isinstance(x, MappedStack)))
    return out, rstd if isinstance(x, MappedStack) else rstd.expand(size, *rstd.shape)


@make_stack_handler
def _rms_norm_backward(size, g, x, shape, rstd, weight, mask):
    g, x, rstd = (expand_stack(a, size) for a in (g, x, rstd))
    dx = dw = None
    if mask[0]:
        gx, w = scale_cotangent(g, weight, shape, pad_example_rank)
        args = (gx.contiguous(), x.contiguous(), shape, rstd.contiguous(), w, [True, False])
        dx = aten._fused_rms_norm_backward.default(*args)[0]
    if mask[1]:
        outer = x.dim() - len(shape)
        hat = recompute_normalized(to_float32(x), None, rstd, [*range(outer, x.dim())])
        dw = sum_outer_dims(to_float32(g) * hat, outer, weight)
    return dx, dw


# --- group norm: (B, N, C, *S) as B*N images, parameters (B, C) ----------------------------------


def align_channels(p: Any, rank: int) -> Tensor | None:
    """Reshape (B, C) to (B, 1, C, 1, ..) for (B, N, C, *S), or an unbatched (C,) to (C, 1, ..)."""
    if p is None:
        return None
    return (p.v.unsqueeze(1) if isinstance(p, MappedStack) else p).unflatten(
        -1, (-1, *(1,) * (rank - 2))
    )


@make_stack_handler
def _group_norm(size, x, weight, bias, n, c, hw, groups, eps):
    v = expand_stack(x, size)
    own = is_any_mapped(weight, bias)
    w, b = (make_kernel_weight(v, [c], weight, bias), None) if own else (weight, bias)
    flat = v.flatten(0, 1).contiguous()
    outs = aten.native_group_norm.default(flat, w, b, size * n, c, hw, groups, eps)
    out, *found = (o.unflatten(0, (size, n)) for o in outs)
    if own:
        out = scale_and_shift(
            out, align_channels(weight, v.dim() - 1), align_channels(bias, v.dim() - 1)
        )
    return out, *found


@make_stack_handler
def _group_norm_backward(size, g, x, mean, rstd, weight, n, c, hw, groups, mask):
    g, x, mean, rstd = (expand_stack(a, size) for a in (g, x, mean, rstd))
    dx = dw = db = None
    if mask[0]:
        gx, w = scale_cotangent(g, weight, [c], align_channels)
        flat = [a.flatten(0, 1).contiguous() for a in (gx, x, mean, rstd)]
        sizes = (size * n, c, hw, groups, [True, False, False])
        dx = aten.native_group_norm_backward.default(*flat, w, *sizes)[0].view(x.shape)
    gp = to_float32(g).reshape(size, n, c, hw)
    if mask[1]:
        xp = to_float32(x).reshape(size, n, groups, c * hw // groups)
        hat = recompute_normalized(xp, mean.unsqueeze(-1), rstd.unsqueeze(-1), [-1])
        dw = cast_to_param(weight, (gp * hat.view(gp.shape)).sum((1, 3)))
    if mask[2]:
        db = cast_to_param(weight, gp.sum((1, 3)))
    return dx, dw, db


# --- norms of slices along a dim: (B, *S) -> B*S[dim] rows ---------------------------------------


def move_dim_to_rows(x: Tensor, dim: int) -> Tensor:
    return x.movedim(dim + 1, 1).flatten(0, 1).contiguous()


def move_rows_to_dim(x: Tensor, dim: int, size: int) -> Tensor:
    return x.unflatten(0, (size, x.shape[0] // max(size, 1))).movedim(1, dim + 1)


def make_slice_handler(op: Any, tensors: int):
    """Return the handler of ``op(*tensors, .., dim, *rest)``, run on the slices along ``dim``."""
    where = next(i for i, a in enumerate(op._schema.arguments) if a.name == "dim")

    @make_stack_handler
    def rule(size, *args):
        stacks = [expand_stack(a, size) for a in args[:tensors]]
        rest = [*args[tensors:], *[0] * (where + 1 - len(args))]
        dim = rest[where - tensors] % (stacks[0].dim() - 1)
        rest[where - tensors] = 0
        outs = op(*(move_dim_to_rows(s, dim) for s in stacks), *rest)
        if isinstance(outs, Tensor):
            return move_rows_to_dim(outs, dim, size)
        return tuple(move_rows_to_dim(o, dim, size) for o in outs)

    return rule


register_rows(
    {
        aten.native_layer_norm.default: _layer_norm,
        aten.native_layer_norm_backward.default: _layer_norm_backward,
        aten._fused_rms_norm.default: _rms_norm,
        aten._fused_rms_norm_backward.default: _rms_norm_backward,
        aten.native_group_norm.default: _group_norm,
        aten.native_group_norm_backward.default: _group_norm_backward,
        aten.renorm.default: make_slice_handler(aten.renorm.default, 1),
        aten._weight_norm_interface.default: make_slice_handler(
            aten._weight_norm_interface.default, 2
        ),
        aten._weight_norm_interface_backward.default: make_slice_handler(
            aten._weight_norm_interface_backward.default, 4
        ),
    }
)
