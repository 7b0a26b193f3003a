"""Operators of one kernel in terms of operators whose formulas hold at any order.

What torch fuses it differentiates once, or in reverse mode only. Where more is asked for, the same
value is computed in small steps. Each function here takes its operator's arguments and gives those
of its results that have a derivative.
"""

from __future__ import annotations

import torch

aten = torch.ops.aten

_LOW = (torch.float16, torch.bfloat16)


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Kernels add up in float32 what has half the bits."""
    return x.float() if x.dtype in _LOW else x


def hardsigmoid(x: torch.Tensor) -> torch.Tensor:
    inside = (x > -3) & (x < 3)
    return torch.where(inside, x / 6 + 0.5, (x >= 3).to(x.dtype))


def aminmax(x, *, dim=None, keepdim=False):
    dims = () if dim is None else dim
    return x.amin(dims, keepdim), x.amax(dims, keepdim)


# ------------------------------------------------------------------- attention


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """(N, H, L, E), (N, G, S, E), (N, G, S, V) -> (N, H, L, V)."""
    if dropout_p:
        raise NotImplementedError(
            "scaled_dot_product_attention: a fused kernel that drops out has one derivative.\n"
            "Use torch.nn.attention.sdpa_kernel(SDPBackend.MATH)."
        )
    n, dtype = q.shape[-1], q.dtype
    q, k, v = map(_wide, (q, k, v))
    if k.shape[-3] != q.shape[-3]:
        k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    scores = q @ k.mT * (n**-0.5 if scale is None else scale)
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    if mask is not None and mask.dtype is torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    return (aten._safe_softmax(scores, -1) @ v).to(dtype)


# --------------------------------------------------------------- normalisation


def layer_norm(x, shape, weight, bias, eps):
    return _normalised(_wide(x), list(range(-len(shape), 0)), weight, bias, eps).to(x.dtype)


def _normalised(x, dims, weight, bias, eps):
    x = x - x.mean(dims, keepdim=True)
    x = x * ((x * x).mean(dims, keepdim=True) + eps).rsqrt()
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def weight_norm(v, g, dim=0):
    """Beside it the norm, which torch's pull-back takes for constant where nobody tells it more."""
    rest = [d for d in range(v.dim()) if d != dim % v.dim()]
    norm = (v * v).sum(rest, keepdim=True).sqrt()
    return v * (g / norm), norm


def batch_norm(x, weight, bias, mean, var, training, momentum, eps):
    place = [1, -1] + [1] * (x.ndim - 2)
    weight, bias = (None if t is None else t.reshape(place) for t in (weight, bias))
    if training or mean is None:
        dims = [d for d in range(x.ndim) if d != 1]
        return _normalised(_wide(x), dims, weight, bias, eps).to(x.dtype)
    y = (_wide(x) - mean.reshape(place)) * (var.reshape(place) + eps).rsqrt()
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(x.dtype)


# ------------------------------------------------------------------- distances


def cdist(x, y, p, compute_mode=None):
    """(*, N, D), (*, M, D) -> (*, N, M)."""
    return _length(x.unsqueeze(-2) - y.unsqueeze(-3), p)


def pdist(x, p=2.0):
    i, j = torch.triu_indices(len(x), len(x), 1, device=x.device)
    return _length(x[i] - x[j], p)


def _length(d: torch.Tensor, p: float) -> torch.Tensor:
    """The p-norm over the last dim; where it has no derivative, this is zero, as in the kernels."""
    if p == 0:
        return (d != 0).sum(-1).to(d.dtype)
    if p == 1 or d.shape[-1] == 0:
        return d.abs().sum(-1)
    if p == float("inf"):
        return d.abs().amax(-1)
    if p == 2:
        return _root((d * d).sum(-1), 0.5)
    a = d.abs()
    return _root((_root(a, p) if p < 2 else a**p).sum(-1), 1 / p)


def _root(s: torch.Tensor, power: float) -> torch.Tensor:
    """``s**power`` without derivative at zero."""
    none = s == 0
    return s.masked_fill(none, 1).pow(power).masked_fill(none, 0)


def cholesky_inverse(x, upper=False):
    """The inverse of the matrix that a triangle of x is the factor of."""
    eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    r = torch.linalg.solve_triangular(x.triu() if upper else x.tril(), eye, upper=upper)
    return r @ r.mH if upper else r.mH @ r
