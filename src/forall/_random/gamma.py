"""Gamma, beta and Dirichlet draws, differentiable in their parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._compat.documented_error import documented_error
from forall._core.errors import format_columns
from forall._core.half_precision import HALVES
from forall._random import rejection
from forall._random.continuous import check_draw_shape, choose_dtype, make_parameter
from forall._random.keys import split, split_words
from forall._random.threefry import make_counters

if TYPE_CHECKING:
    from collections.abc import Sequence

Tensor = torch.Tensor
aten = torch.ops.aten


class GammaDraw(torch.autograd.Function):
    """A draw or its logarithm; its derivative in alpha is taken at a fixed quantile.

    Source: Figurnov, Mohamed and Mnih, "Implicit reparameterization gradients" (2018); torch has
    the formula for its own draws.
    """

    @staticmethod
    def forward(key, alpha, logarithm):
        place = make_counters(alpha.shape, key.device)[1]
        return rejection.gamma_operator(*split_words("gamma", key), place, alpha, logarithm)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, alpha, ctx.logarithm = inputs
        ctx.save_for_backward(alpha, output)

    @staticmethod
    def backward(ctx, g):
        alpha, drawn = ctx.saved_tensors
        if not ctx.logarithm:
            return None, g * aten._standard_gamma_grad(alpha, drawn), None
        x = drawn.exp().clamp(min=torch.finfo(drawn.dtype).tiny)
        return None, g * aten._standard_gamma_grad(alpha, x) / x, None


def gamma(
    key: Tensor,
    a: Any,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Numbers of the gamma distribution of shape ``a`` and scale 1: (2,) -> shape.

    Differentiable in ``a``, once: the derivative of the number at its place in the distribution.
    For a rate, differentiable in it, write ``gamma(key, a, shape) / rate``.

    Args:
        a: a number, or a tensor that broadcasts to ``shape``; nan where it is not above 0.
        shape: that of ``a`` where it is None.

    Raises:
        TypeError, ValueError: for a key that is none, for an ``a`` that does not fit the shape.

    Source: Marsaglia and Tsang, "A simple method for generating gamma variables" (2000).

    Example:
        >>> x = forall.random.gamma(forall.random.key(0), 3.0, (10000,))
        >>> bool((x.mean() - 3).abs() < 0.1)
        True
    """
    return _draw_gamma("gamma", key, a, shape, choose_dtype(dtype, a), logarithm=False)


def _draw_gamma(
    verb: str, key: Tensor, a: Any, shape: Any, dtype: torch.dtype, *, logarithm: bool
) -> Tensor:
    split_words(verb, key)
    working = torch.float32 if dtype in HALVES else dtype
    alpha = make_parameter(a, working, key)
    alpha = alpha.expand(check_draw_shape(verb, shape, alpha.shape))
    return GammaDraw.apply(key, alpha, logarithm).to(dtype)


def beta(
    key: Tensor,
    a: Any,
    b: Any,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Numbers of the beta distribution, once differentiable in ``a`` and ``b``: (2,) -> shape.

    Args:
        a: above 0; a number, or a tensor that broadcasts to ``shape``.
        b: likewise.
        shape: that of ``a`` and ``b`` together where it is None.

    Raises:
        TypeError, ValueError: for a key that is none, for parameters that do not fit the shape.

    Source: X / (X + Y) of gamma draws X and Y, by their logarithms.

    Example:
        >>> x = forall.random.beta(forall.random.key(0), 1.0, 3.0, (10000,))
        >>> bool((x.mean() - 0.25).abs() < 0.01)
        True
    """
    dtype = choose_dtype(dtype, a, b)
    a, b = make_parameter(a, dtype, key), make_parameter(b, dtype, key)
    shape = check_draw_shape("beta", shape, a.shape, b.shape)
    first, second = split(key)
    x = _draw_gamma("beta", first, a, shape, dtype, logarithm=True)
    y = _draw_gamma("beta", second, b, shape, dtype, logarithm=True)
    return torch.sigmoid(x - y)


def dirichlet(
    key: Tensor,
    alpha: Tensor,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Probabilities of the Dirichlet distribution: (2,), (*A, n) -> (*shape, n).

    Differentiable in ``alpha``, once.

    Args:
        shape: what *A broadcasts to; *A itself where it is None.

    Raises:
        TypeError, ValueError: for a key that is none, for an alpha that does not fit.

    Source: gamma draws over their sum, by their logarithms.

    Example:
        >>> p = forall.random.dirichlet(forall.random.key(0), torch.ones(3), (10000,))
        >>> torch.allclose(p.mean(0), torch.full((3,), 1 / 3), atol=0.01)
        True
    """
    dtype = choose_dtype(dtype, alpha)
    alpha = make_parameter(alpha, dtype, key)
    if not alpha.dim():
        raise documented_error(ValueError, "random-shapes")(
            "dirichlet(key, alpha): alpha has one entry for each probability.\n"
            f"{format_columns([('alpha', str(tuple(alpha.shape)))])}\n"
            "Give a tensor of rank 1 or more."
        )
    shape = (*check_draw_shape("dirichlet", shape, alpha.shape[:-1]), alpha.shape[-1])
    return torch.softmax(_draw_gamma("dirichlet", key, alpha, shape, dtype, logarithm=True), -1)
