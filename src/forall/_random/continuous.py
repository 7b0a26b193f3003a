"""Draws from continuous distributions: uniform, normal, and those computed from them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from forall._compat.documented_error import documented_error
from forall._compat.shapes import broadcast_shapes
from forall._core.errors import format_columns, format_short, type_name_of
from forall._core.half_precision import HALVES
from forall._random.keys import check_shape, draw_bits, split

if TYPE_CHECKING:
    from collections.abc import Sequence

Tensor = torch.Tensor

# (bits drawn, bits kept): the mantissa's are kept, so that all results are equally far apart.
_MANTISSA = {
    torch.float32: (32, 23),
    torch.float64: (64, 52),
    torch.float16: (16, 10),
    torch.bfloat16: (8, 7),
}
_MKL = torch.backends.mkl.is_available()


def draw_unit(verb: str, key: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Draw uniform numbers in [0, 1)."""
    if dtype not in _MANTISSA:
        raise documented_error(TypeError, "random-dtype")(
            f"{verb}(key, ...): the dtype must be a floating-point one.\n"
            f"{format_columns([('dtype', str(dtype))])}\n"
            "Take torch.float32, float64, float16 or bfloat16."
        )
    drawn, kept = _MANTISSA[dtype]
    whole = (draw_bits(verb, key, shape, drawn) >> (drawn - kept)) & ((1 << kept) - 1)
    return whole.to(dtype) * 2.0**-kept


def choose_dtype(dtype: torch.dtype | None, *parameters: Any) -> torch.dtype:
    """Return the dtype asked for, else that of the parameters, else torch's default."""
    if dtype is not None:
        if not isinstance(dtype, torch.dtype):
            raise documented_error(TypeError, "random-dtype")(
                "forall.random: a dtype is one of torch's.\n"
                f"{format_columns([('dtype', format_short(dtype), type_name_of(dtype))])}\n"
                "Take torch.float32, float64, float16 or bfloat16. For a mean and a deviation "
                "write mean + std * normal(key, shape)."
            )
        return dtype
    found = [p.dtype for p in parameters if isinstance(p, torch.Tensor) and p.is_floating_point()]
    return max(found, key=lambda d: d.itemsize) if found else torch.get_default_dtype()


def make_parameter(value: Any, dtype: torch.dtype, key: Tensor) -> Tensor:
    """Return a parameter as a tensor on the key's device."""
    if isinstance(value, torch.Tensor):
        return value.to(device=key.device, dtype=dtype)
    if isinstance(value, (bool, int, float, complex)):  # to fill does not wait for the device
        return torch.full((), value, dtype=dtype, device=key.device)
    return torch.tensor(value, dtype=dtype, device=key.device)


def check_draw_shape(
    verb: str, shape: Sequence[int] | None, *parameters: torch.Size
) -> tuple[int, ...]:
    """Return the shape of a draw; raise if the parameters do not broadcast to it."""
    together = broadcast_shapes(*parameters)
    if shape is None:
        return tuple(together)
    shape = check_shape(verb, shape)
    short = len(together) > len(shape)
    if short or any(n not in (1, m) for n, m in zip(together[::-1], shape[::-1], strict=False)):
        rows = [("shape", str(shape)), ("parameters", str(tuple(together)))]
        raise documented_error(ValueError, "random-shapes")(
            f"{verb}(key, ...): the parameters do not broadcast to the shape.\n"
            f"{format_columns(rows)}\n"
            "Give the shape of the whole result, or None for that of the parameters."
        )
    return shape


def uniform(
    key: Tensor,
    shape: Sequence[int] = (),
    dtype: torch.dtype | None = None,
    minval: Any = 0.0,
    maxval: Any = 1.0,
) -> Tensor:
    """Numbers from ``minval`` to below ``maxval``, all equally likely: (2,) -> shape.

    The same numbers as ``jax.random.uniform``, bit for bit in float32. Differentiable in
    ``minval`` and ``maxval``, numbers or tensors that broadcast to ``shape``.

    Args:
        dtype: floating-point; torch's default where it is None.

    Raises:
        TypeError, ValueError: for a key that is none, for a dtype that is not floating-point.

    Source: 23 random bits (52 in float64) over 2**23, as in JAX.

    Example:
        >>> forall.random.uniform(forall.random.key(0), (3,))
        tensor([0.9477, 0.9786, 0.3323])
    """
    dtype = choose_dtype(dtype, minval, maxval)
    u = draw_unit("uniform", key, shape, dtype)
    if (isinstance(minval, float) and isinstance(maxval, float)) and (minval, maxval) == (0.0, 1.0):
        return u
    low, high = make_parameter(minval, dtype, key), make_parameter(maxval, dtype, key)
    check_draw_shape("uniform", shape, low.shape, high.shape)
    # JAX's compilers round once where a product is added to; a double does not round the product.
    fine = torch.float64 if dtype is torch.float32 and key.device.type != "mps" else dtype
    scaled = (u.to(fine) * (high - low).to(fine) + low.to(fine)).to(dtype)
    return torch.maximum(low, scaled)  # rounding must not lead below


def normal(key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype | None = None) -> Tensor:
    """Numbers of the standard normal distribution: (2,) -> shape.

    Those of ``jax.random.normal``, up to rounding. For another mean and spread, differentiable in
    both, write ``mean + std * normal(key, shape)``.

    Args:
        dtype: floating-point, or complex for variance 1 in the plane; torch's default where None.

    Raises:
        TypeError, ValueError: for a key that is none, for a dtype that is neither.

    Source: the inverse error function of uniform numbers in (-1, 1), as in JAX.

    Example:
        >>> forall.random.normal(forall.random.key(0), (3,))
        tensor([ 1.6226,  2.0253, -0.4336])
    """
    shape, dtype = check_shape("normal", shape), choose_dtype(dtype)
    if dtype.is_complex:
        real = dtype.to_real()
        a, b = (normal(k, shape, real) for k in split(key))
        return torch.complex(a, b) * math.sqrt(0.5)
    if dtype in HALVES:  # their tails would end at 3 standard deviations
        return normal(key, shape, torch.float32).to(dtype)
    low = -1 + (2.0**-53 if dtype is torch.float64 else 2.0**-24)  # the first number above -1
    u = draw_unit("normal", key, shape, dtype)
    return _inverse_erf((u * (1 - low) + low).clamp(min=low)) * math.sqrt(2)


def _inverse_erf(x: Tensor) -> Tensor:
    """Compute erfinv. Without MKL torch takes Newton steps in float32, imprecise near -1 and 1."""
    if x.dtype is torch.float32 and x.device.type == "cpu" and not _MKL:
        return torch.erfinv(x.to(torch.float64)).to(torch.float32)
    return torch.erfinv(x)


def truncated_normal(
    key: Tensor,
    lower: Any,
    upper: Any,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Standard normal numbers between ``lower`` and ``upper``: (2,) -> shape.

    Differentiable in both bounds. Bounds that are both further out than float32 can tell (13
    standard deviations; 37 in float64) give the nearer one.

    Args:
        lower: a number, or a tensor that broadcasts to ``shape``.
        upper: likewise.
        shape: that of the bounds where it is None.

    Raises:
        TypeError, ValueError: for a key that is none, for bounds that do not fit the shape.

    Source: the inverse of the distribution function, on the side where it is small.

    Example:
        >>> x = forall.random.truncated_normal(forall.random.key(0), 1.0, 2.0, (1000,))
        >>> bool(((x > 1) & (x < 2)).all())
        True
    """
    dtype = choose_dtype(dtype, lower, upper)
    if dtype in HALVES:
        return truncated_normal(key, lower, upper, shape, torch.float32).to(dtype)
    low, high = make_parameter(lower, dtype, key), make_parameter(upper, dtype, key)
    shape = check_draw_shape("truncated_normal", shape, low.shape, high.shape)
    mirrored = low > 0
    near, far = torch.where(mirrored, -low, high), torch.where(mirrored, -high, low)
    # torch.special.ndtr is zero from 8 standard deviations on.
    top, bottom = (torch.erfc(x * -math.sqrt(0.5)) / 2 for x in (near, far))
    p = draw_unit("truncated_normal", key, shape, dtype) * (top - bottom) + bottom
    tiny = torch.finfo(dtype).tiny
    x = torch.where(top > tiny, torch.special.ndtri(p.clamp(min=tiny)), near)
    x = torch.where(mirrored, -x, x)
    inward = torch.full_like(x, math.inf)
    return torch.clamp(
        x, torch.nextafter(low.detach(), inward), torch.nextafter(high.detach(), -inward)
    )


def exponential(key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype | None = None) -> Tensor:
    """Numbers of the exponential distribution of mean 1: (2,) -> shape.

    For a rate, differentiable in it, write ``exponential(key, shape) / rate``.

    Raises:
        TypeError, ValueError: for a key that is none, for a dtype that is not floating-point.

    Source: -log(1 - u) of a uniform u.

    Example:
        >>> forall.random.exponential(forall.random.key(0), (3,))
        tensor([2.9501, 3.8434, 0.4039])
    """
    return -torch.log1p(-draw_unit("exponential", key, shape, choose_dtype(dtype)))


def gumbel(key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype | None = None) -> Tensor:
    """Numbers of the standard Gumbel distribution: (2,) -> shape.

    The greatest of ``logits + gumbel(key, logits.shape)`` is a draw by the logits.

    Raises:
        TypeError, ValueError: for a key that is none, for a dtype that is not floating-point.

    Source: -log(-log(u)) of a uniform u.

    Example:
        >>> forall.random.gumbel(forall.random.key(0), (3,))
        tensor([ 2.9234,  3.8326, -0.0969])
    """
    dtype = choose_dtype(dtype)
    u = draw_unit("gumbel", key, shape, dtype).clamp(min=torch.finfo(dtype).tiny)
    return -torch.log(-torch.log(u))


def laplace(key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype | None = None) -> Tensor:
    """Numbers of the Laplace distribution of mean 0 and scale 1: (2,) -> shape.

    Raises:
        TypeError, ValueError: for a key that is none, for a dtype that is not floating-point.

    Source: the inverse of the distribution function, on either side.

    Example:
        >>> forall.random.laplace(forall.random.key(0), (3,))
        tensor([-2.2570, -3.1503,  0.4086])
    """
    dtype = choose_dtype(dtype)
    u = uniform(key, shape, dtype, -1 + torch.finfo(dtype).eps / 2, 1.0)
    return torch.sign(u) * torch.log1p(-u.abs())


def multivariate_normal(
    key: Tensor,
    mean: Tensor,
    cov: Tensor,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Normal vectors of this mean and covariance: (2,), (*M, n), (*C, n, n) -> (*shape, n).

    Differentiable in both.

    Args:
        shape: what *M and *C broadcast to; that of both together where it is None.

    Raises:
        TypeError, ValueError: for a key that is none, for parameters that do not fit.
        torch.linalg.LinAlgError: for a covariance that is not positive definite.

    Source: mean + L z, with the Cholesky factor L of the covariance and standard normal z.

    Example:
        >>> mean, cov = torch.zeros(2), torch.tensor([[2.0, 1.0], [1.0, 2.0]])
        >>> x = forall.random.multivariate_normal(forall.random.key(0), mean, cov, (10000,))
        >>> torch.allclose(x.T @ x / 10000, cov, atol=0.1)
        True
    """
    dtype = choose_dtype(dtype, mean, cov)
    mean, cov = make_parameter(mean, dtype, key), make_parameter(cov, dtype, key)
    n = mean.shape[-1] if mean.dim() else 0
    if not mean.dim() or cov.shape[-2:] != (n, n):
        rows = [("mean", str(tuple(mean.shape))), ("cov", str(tuple(cov.shape)))]
        raise documented_error(ValueError, "random-shapes")(
            "multivariate_normal(key, mean, cov): the shapes must end in n and in n, n.\n"
            f"{format_columns(rows)}\nGive a mean for every row of the covariance."
        )
    shape = check_draw_shape("multivariate_normal", shape, mean.shape[:-1], cov.shape[:-2])
    z = normal(key, (*shape, n), dtype)
    return mean + (torch.linalg.cholesky(cov) @ z.unsqueeze(-1)).squeeze(-1)
