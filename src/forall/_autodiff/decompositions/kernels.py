"""Decompositions of fused operators into operators whose derivative formulas hold at any order.

Torch differentiates many fused operators once only, or in reverse mode only. If another derivative
is needed, the operator is decomposed. Each function here takes its operator's arguments and returns
those of the operator's results that have a derivative.
"""

from __future__ import annotations

import torch

from forall._autodiff.decompositions.losses import reduce_loss
from forall._compat.documented_error import documented_error
from forall._core.half_precision import to_float32

aten = torch.ops.aten


def hardsigmoid(x: torch.Tensor) -> torch.Tensor:
    inside = (x > -3) & (x < 3)
    return torch.where(inside, x / 6 + 0.5, (x >= 3).to(x.dtype))


def glu(x, dim=-1):
    a, b = x.chunk(2, dim)
    return a * b.sigmoid()


def mse_loss(x, y, reduction=1):
    return reduce_loss((x - y).square(), reduction)


def huber_loss(x, y, reduction=1, delta=1.0):
    d = x - y
    size = d.abs()
    return reduce_loss(
        torch.where(size < delta, 0.5 * d * d, delta * (size - 0.5 * delta)), reduction
    )


def soft_margin_loss(x, y, reduction=1):
    return reduce_loss(-torch.nn.functional.logsigmoid(x * y), reduction)


def polar(size, angle):
    return torch.complex(size * angle.cos(), size * angle.sin())


def aminmax(x, *, dim=None, keepdim=False):
    dims = () if dim is None else dim
    return x.amin(dims, keepdim), x.amax(dims, keepdim)


def logcumsumexp(x, dim):
    """Add up the last 1, 2, 4, ... terms before each entry, until these are all.

    Terms are scaled by the larger one before they are added, so that nothing overflows, in
    derivatives of any order.
    """
    if x.dim() == 0:
        return x.clone()
    size, width = x.shape[dim], 1
    while width < size:
        later, earlier = x.narrow(dim, width, size - width), x.narrow(dim, 0, size - width)
        x = torch.cat([x.narrow(dim, 0, width), _logaddexp(later, earlier)], dim)
        width *= 2
    return x


def _logaddexp(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return ``log(exp(a) + exp(b))``, with derivative zero where both are minus infinity."""
    real = (a.real, b.real) if a.is_complex() else (a, b)
    scale = torch.maximum(*real).detach()
    infinite = scale.isinf()
    scale = scale.masked_fill(infinite, 0)
    total = (a - scale).exp() + (b - scale).exp()
    none = infinite & (total == 0)
    return (total.masked_fill(none, 1).log() + scale).masked_fill(none, -torch.inf)


# ----------------------------------------------------------------------- norms


def vector_norm(x, p=2, dim=None, keepdim=False, *, dtype=None):
    x = to_float32(x) if dtype is None else x.to(dtype)
    dims = list(range(x.dim())) if dim is None else dim
    return _compute_norm(x, p, dims, keepdim).to(dtype or x.dtype.to_real())


def norm(x, p=2, dim=(), keepdim=False, *, dtype=None):
    """Compute the older operator ``aten.norm``, whose forward formula has a wrong shape."""
    return torch.linalg.vector_norm(x, 2 if p is None else p, dim or None, keepdim, dtype=dtype)


def dist(x, y, p=2):
    return torch.linalg.vector_norm(x - y, p)


def renorm(x, p, dim, maxnorm):
    rest = [d for d in range(x.dim()) if d != dim % x.dim()]
    length = torch.linalg.vector_norm(to_float32(x), p, rest, keepdim=True)
    return (x * torch.where(length > maxnorm, maxnorm / (length + 1e-7), 1)).to(x.dtype)


def std(x, dim=None, correction=None, keepdim=False):
    var = torch.var(to_float32(x), dim, correction=correction, keepdim=keepdim)
    return _safe_pow(var, 0.5).to(x.dtype.to_real())


def std_mean(x, dim=None, correction=None, keepdim=False):
    mean = torch.mean(x, () if dim is None else dim, keepdim)
    return std(x, dim, correction, keepdim), mean


# ------------------------------------------------------------------- attention


def fused_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Compute attention: (N, H, L, E), (N, G, S, E), (N, G, S, V) -> (N, H, L, V)."""
    if dropout_p:
        raise documented_error(NotImplementedError, "no-keyed-draw")(
            "scaled_dot_product_attention: a fused kernel that drops out has one derivative.\n"
            "Use torch.nn.attention.sdpa_kernel(SDPBackend.MATH)."
        )
    n, dtype = q.shape[-1], q.dtype
    q, k, v = map(to_float32, (q, k, v))
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
    return _normalize(to_float32(x), list(range(-len(shape), 0)), weight, bias, eps).to(x.dtype)


def _normalize(x, dims, weight, bias, eps):
    x = x - x.mean(dims, keepdim=True)
    x = x * ((x * x).mean(dims, keepdim=True) + eps).rsqrt()
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def weight_norm(v, g, dim=0):
    """Return (weight, norm). Torch's backward takes the norm for a constant."""
    rest = [d for d in range(v.dim()) if d != dim % v.dim()]
    norm = (v * v).sum(rest, keepdim=True).sqrt()
    return v * (g / norm), norm


def batch_norm(x, weight, bias, mean, var, training, momentum, eps):
    place = [1, -1] + [1] * (x.ndim - 2)
    weight, bias = (None if t is None else t.reshape(place) for t in (weight, bias))
    if training or mean is None:
        dims = [d for d in range(x.ndim) if d != 1]
        return _normalize(to_float32(x), dims, weight, bias, eps).to(x.dtype)
    y = (to_float32(x) - mean.reshape(place)) * (var.reshape(place) + eps).rsqrt()
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(x.dtype)


# ------------------------------------------------------------------- distances


def cdist(x, y, p, compute_mode=None):
    """Compute distances of rows: (*, N, D), (*, M, D) -> (*, N, M)."""
    return _compute_norm(x.unsqueeze(-2) - y.unsqueeze(-3), p)


def pdist(x, p=2.0):
    i, j = torch.triu_indices(len(x), len(x), 1, device=x.device)
    return _compute_norm(x[i] - x[j], p)


def _compute_norm(
    d: torch.Tensor, p: float, dims: list[int] | int = -1, keepdim: bool = False
) -> torch.Tensor:
    """The p-norm. Its derivative is zero where it has none, as in the kernels."""
    if p == 0:
        return (d != 0).sum(dims, keepdim).to(d.abs().dtype)
    if p == 1 or d.numel() == 0:
        return d.abs().sum(dims, keepdim)
    if p == float("inf"):
        return d.abs().amax(dims, keepdim)
    if p == -float("inf"):
        return d.abs().amin(dims, keepdim)
    if p == 2:
        return _safe_pow((d * d.conj()).real.sum(dims, keepdim), 0.5)
    a = d.abs()
    return _safe_pow((_safe_pow(a, p) if p < 2 else a**p).sum(dims, keepdim), 1 / p)


def _safe_pow(s: torch.Tensor, power: float) -> torch.Tensor:
    """Return ``s**power``, with derivative zero at zero."""
    none = s == 0
    return s.masked_fill(none, 1).pow(power).masked_fill(none, 0 if power > 0 else torch.inf)


# -------------------------------------------------------------------- matrices


def det(x):
    """The determinant, with correct derivatives where singular values are equal or zero.

    The matrix is multiplied by its singular vectors, as constants, which makes it diagonal. The
    block of the largest singular values is eliminated. The determinant of the remaining block, of
    three rows, is a polynomial.
    """
    n = x.shape[-1]
    if n <= _SMALL:
        return _small_det(x)
    u, s, vh = torch.linalg.svd(x.detach())
    phase = torch.linalg.det(u) * torch.linalg.det(vh)
    m = u.mH @ x @ vh.mH
    k = n - _SMALL
    top = s[..., :k]
    # If one of these is zero up to rounding, so are the first three derivatives.
    none = top <= s[..., :1] * (n * torch.finfo(x.dtype).eps)
    rows = m[..., :k, :] / top.masked_fill(none, 1).unsqueeze(-1)
    block = rows[..., :k] + torch.diag_embed(none.to(x.dtype))
    sign, log = torch.linalg.slogdet(block)
    rest = m[..., k:, k:] - m[..., k:, :k] @ torch.linalg.solve(block, rows[..., k:])
    return phase * top.masked_fill(none, 0).prod(-1) * sign * log.exp() * _small_det(rest)


_SMALL = 3


def _small_det(x: torch.Tensor) -> torch.Tensor:
    """The determinant of a matrix of at most three rows, as a polynomial."""
    n = x.shape[-1]
    if n == 0:
        return x.new_ones(x.shape[:-2])
    if n == 1:
        return x[..., 0, 0]
    if n == 2:
        return x[..., 0, 0] * x[..., 1, 1] - x[..., 0, 1] * x[..., 1, 0]
    a, b, c = x.unbind(-2)
    return (a * torch.linalg.cross(b, c)).sum(-1)


def cholesky_inverse(x, upper=False):
    """The inverse of the matrix whose Cholesky factor is a triangle of x."""
    eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    r = torch.linalg.solve_triangular(x.triu() if upper else x.tril(), eye, upper=upper)
    return r @ r.mH if upper else r.mH @ r
