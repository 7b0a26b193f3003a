"""Rules of layer norm, RMS norm, group norm, weight norm and renorm.

Torch's kernel normalises all examples at once. An unbatched weight is applied by the fused kernel.
A batched weight scales the kernel's result, and in the backward pass the cotangent before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._core.levels import moves
from forall._vmap.registry import register
from forall._vmap.rule_makers.basic import Stack, by_front

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten
Tensor = torch.Tensor


def stack(a: Any, size: int) -> Tensor:
    """Return (B, *S), expanded if ``a`` is unbatched."""
    return a.v if isinstance(a, Stack) else a.expand(size, *a.shape)


def is_own(*params: Any) -> bool:
    """True if any parameter is batched."""
    return any(isinstance(p, Stack) for p in params)


def scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> Tensor:
    """Return x * weight + bias, rounded once, in x's dtype."""
    if weight is None:
        return x if bias is None else (x + bias).to(x.dtype)
    return (x * weight if bias is None else torch.addcmul(bias, x, weight)).to(x.dtype)


def precise(x: Tensor) -> Tensor:
    """Convert half precision to float32, for sums over many entries."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def normal(x: Tensor, mean: Tensor | None, rstd: Tensor, dims: list[int]) -> Tensor:
    """Normalise x as the kernel did, for the cotangent of a weight.

    Torch gives mean and rstd no tangents, so they are computed again if x has a tangent. The eps
    that was added to the variance follows from the kernel's rstd.
    """
    if not moves(x):
        return (x if mean is None else x - mean) * rstd
    if mean is not None:
        x = x - x.mean(dims, keepdim=True)
    square = (x * x).mean(dims, keepdim=True)
    return x * (square + (rstd**-2 - square).detach()).rsqrt()


def like(param: Any, x: Tensor) -> Tensor:
    """Return a cotangent in the dtype of its parameter."""
    return x if param is None else x.to((param.v if is_own(param) else param).dtype)


def stand_in(x: Tensor, shape: list[int], *params: Any) -> Tensor | None:
    """Return the weight that the kernel gets if it is not to scale by batched parameters.

    It is None, except for the mixed-precision kernel (half input, float parameters): that one needs
    a weight, which is ones.
    """
    for p in params:
        if p is not None and (dtype := (p.v if isinstance(p, Stack) else p).dtype) != x.dtype:
            return torch.ones(shape, dtype=dtype, device=x.device)
    return None


def unscaled(
    g: Tensor, weight: Any, shape: list[int], place: Callable, *others: Any
) -> tuple[Tensor, Tensor | None]:
    """Return the cotangent of the kernel's result, and the weight for the kernel.

    ``place(weight, rank)`` reshapes a batched weight so that it broadcasts to the cotangent.
    """
    if is_own(weight, *others):
        g, weight = scaled(g, place(weight, g.dim() - 1)), stand_in(g, shape, weight, *others)
    return g, weight


# --- over the last dims: (B, *L, *D), parameters (B, *D) -----------------------------------------


def trailing(p: Any, rank: int) -> Tensor | None:
    """Reshape (B, *D) to (B, 1, .., *D) for examples of this rank; an unbatched one broadcasts."""
    if not isinstance(p, Stack):
        return p
    return p.v.reshape(p.v.shape[0], *(1,) * (rank - p.v.dim() + 1), *p.v.shape[1:])


@by_front
def _layer_norm(size, x, shape, weight, bias, eps):
    v = x.v if isinstance(x, Stack) else x
    if not is_own(weight, bias):
        return aten.native_layer_norm.default(v, shape, weight, bias, eps)
    w = stand_in(v, shape, weight, bias)
    out, *found = aten.native_layer_norm.default(v, shape, w, None, eps)
    rank = v.dim() - isinstance(x, Stack)
    out = scaled(out, trailing(weight, rank), trailing(bias, rank))
    return out, *(s if isinstance(x, Stack) else s.expand(size, *s.shape) for s in found)


@by_front
def _layer_norm_backward(size, g, x, shape, mean, rstd, weight, bias, mask):
    g, x, mean, rstd = (stack(a, size) for a in (g, x, mean, rstd))
    outer = x.dim() - len(shape)
    dx = None
    if mask[0]:
        gx, w = unscaled(g, weight, shape, trailing, bias)
        args = (gx.contiguous(), x.contiguous(), shape, mean.contiguous(), rstd.contiguous(), w)
        dx = aten.native_layer_norm_backward.default(*args, None, [True, False, False])[0]
    gp = precise(g)
    dw = None
    if mask[1]:
        dims = [*range(outer, x.dim())]
        dw = over(gp * normal(precise(x), mean, rstd, dims), outer, weight)
    return dx, dw, over(gp, outer, bias) if mask[2] else None


def over(x: Tensor, outer: int, param: Any) -> Tensor:
    """Sum over the outer dims to the cotangent of a parameter: (B, *L, *D) -> (B, *D)."""
    x = x.sum(list(range(1, outer))) if outer > 1 else x
    return like(param, x)


@by_front
def _rms_norm(size, x, shape, weight, eps):
    v = x.v if isinstance(x, Stack) else x
    if not is_own(weight):
        return aten._fused_rms_norm.default(v, shape, weight, eps)
    out, rstd = aten._fused_rms_norm.default(v, shape, stand_in(v, shape, weight), eps)
    out = scaled(out, trailing(weight, v.dim() - isinstance(x, Stack)))
    return out, rstd if isinstance(x, Stack) else rstd.expand(size, *rstd.shape)


@by_front
def _rms_norm_backward(size, g, x, shape, rstd, weight, mask):
    g, x, rstd = (stack(a, size) for a in (g, x, rstd))
    dx = dw = None
    if mask[0]:
        gx, w = unscaled(g, weight, shape, trailing)
        args = (gx.contiguous(), x.contiguous(), shape, rstd.contiguous(), w, [True, False])
        dx = aten._fused_rms_norm_backward.default(*args)[0]
    if mask[1]:
        outer = x.dim() - len(shape)
        hat = normal(precise(x), None, rstd, [*range(outer, x.dim())])
        dw = over(precise(g) * hat, outer, weight)
    return dx, dw


# --- group norm: (B, N, C, *S) as B*N images, parameters (B, C) ----------------------------------


def channels(p: Any, rank: int) -> Tensor | None:
    """Reshape (B, C) to (B, 1, C, 1, ..) for (B, N, C, *S), or an unbatched (C,) to (C, 1, ..)."""
    if p is None:
        return None
    return (p.v.unsqueeze(1) if isinstance(p, Stack) else p).unflatten(-1, (-1, *(1,) * (rank - 2)))


@by_front
def _group_norm(size, x, weight, bias, n, c, hw, groups, eps):
    v = stack(x, size)
    own = is_own(weight, bias)
    w, b = (stand_in(v, [c], weight, bias), None) if own else (weight, bias)
    flat = v.flatten(0, 1).contiguous()
    outs = aten.native_group_norm.default(flat, w, b, size * n, c, hw, groups, eps)
    out, *found = (o.unflatten(0, (size, n)) for o in outs)
    if own:
        out = scaled(out, channels(weight, v.dim() - 1), channels(bias, v.dim() - 1))
    return out, *found


@by_front
def _group_norm_backward(size, g, x, mean, rstd, weight, n, c, hw, groups, mask):
    g, x, mean, rstd = (stack(a, size) for a in (g, x, mean, rstd))
    dx = dw = db = None
    if mask[0]:
        gx, w = unscaled(g, weight, [c], channels)
        flat = [a.flatten(0, 1).contiguous() for a in (gx, x, mean, rstd)]
        sizes = (size * n, c, hw, groups, [True, False, False])
        dx = aten.native_group_norm_backward.default(*flat, w, *sizes)[0].view(x.shape)
    gp = precise(g).reshape(size, n, c, hw)
    if mask[1]:
        xp = precise(x).reshape(size, n, groups, c * hw // groups)
        hat = normal(xp, mean.unsqueeze(-1), rstd.unsqueeze(-1), [-1])
        dw = like(weight, (gp * hat.view(gp.shape)).sum((1, 3)))
    if mask[2]:
        db = like(weight, gp.sum((1, 3)))
    return dx, dw, db


# --- norms of slices along a dim: (B, *S) -> B*S[dim] rows ---------------------------------------


def rows(x: Tensor, dim: int) -> Tensor:
    return x.movedim(dim + 1, 1).flatten(0, 1).contiguous()


def from_rows(x: Tensor, dim: int, size: int) -> Tensor:
    return x.unflatten(0, (size, x.shape[0] // max(size, 1))).movedim(1, dim + 1)


def by_rows(op: Any, tensors: int):
    """Return the handler of ``op(*tensors, .., dim, *rest)``, run on the slices along ``dim``."""
    where = next(i for i, a in enumerate(op._schema.arguments) if a.name == "dim")

    @by_front
    def rule(size, *args):
        stacks = [stack(a, size) for a in args[:tensors]]
        rest = [*args[tensors:], *[0] * (where + 1 - len(args))]
        dim = rest[where - tensors] % (stacks[0].dim() - 1)
        rest[where - tensors] = 0
        outs = op(*(rows(s, dim) for s in stacks), *rest)
        if isinstance(outs, Tensor):
            return from_rows(outs, dim, size)
        return tuple(from_rows(o, dim, size) for o in outs)

    return rule


register(
    {
        aten.native_layer_norm.default: _layer_norm,
        aten.native_layer_norm_backward.default: _layer_norm_backward,
        aten._fused_rms_norm.default: _rms_norm,
        aten._fused_rms_norm_backward.default: _rms_norm_backward,
        aten.native_group_norm.default: _group_norm,
        aten.native_group_norm_backward.default: _group_norm_backward,
        aten.renorm.default: by_rows(aten.renorm.default, 1),
        aten._weight_norm_interface.default: by_rows(aten._weight_norm_interface.default, 2),
        aten._weight_norm_interface_backward.default: by_rows(
            aten._weight_norm_interface_backward.default, 4
        ),
    }
)
