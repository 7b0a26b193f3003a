"""Draws from discrete distributions: integers, signs, permutations, choices."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from forall._compat.documented_error import documented_error
from forall._core.axes import wrap_dim
from forall._core.errors import format_columns, format_short
from forall._random import rejection
from forall._random.continuous import (
    check_draw_shape,
    choose_dtype,
    draw_unit,
    gumbel,
    make_parameter,
)
from forall._random.keys import check_shape, draw_bits, draw_words, split_words
from forall._random.threefry import LOW, make_counters

if TYPE_CHECKING:
    from collections.abc import Sequence

Tensor = torch.Tensor


def bernoulli(key: Tensor, p: Any = 0.5, shape: Sequence[int] | None = None) -> Tensor:
    """True with probability ``p``: (2,) -> shape, of dtype bool.

    The same draws as ``jax.random.bernoulli``.

    Args:
        p: a number, or a tensor that broadcasts to ``shape``.
        shape: that of ``p`` where it is None.

    Raises:
        TypeError, ValueError: for a key that is none, for a ``p`` that does not fit the shape.

    Source: whether a uniform number is below p.

    Example:
        >>> forall.random.bernoulli(forall.random.key(0), 0.9, (4,))
        tensor([False, False,  True,  True])
    """
    dtype = choose_dtype(None, p)
    p = make_parameter(p, dtype, key)
    return draw_unit("bernoulli", key, check_draw_shape("bernoulli", shape, p.shape), dtype) < p


def rademacher(key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype = torch.int64) -> Tensor:
    """-1 or 1, equally likely: (2,) -> shape.

    The same draws as ``jax.random.rademacher``.

    Raises:
        TypeError, ValueError: for a key that is none.

    Example:
        >>> forall.random.rademacher(forall.random.key(0), (4,))
        tensor([-1, -1,  1,  1])
    """
    return bernoulli(key, 0.5, shape).to(dtype) * 2 - 1


def randint(
    key: Tensor,
    shape: Sequence[int],
    minval: Any,
    maxval: Any,
    dtype: torch.dtype = torch.int64,
) -> Tensor:
    """Integers from ``minval`` to below ``maxval``, all equally likely: (2,) -> shape.

    Equally likely up to 2**-33 for ranges of at most 2**31, up to range / 2**63 for larger ones.

    Args:
        minval: an int, or an integer tensor that broadcasts to ``shape``.
        maxval: likewise; itself it is not drawn.

    Raises:
        TypeError, ValueError: for a key that is none, for bounds that do not fit the shape, for
            ints that leave no integer between them.

    Source: the upper half of the product of the range and 64 random bits; Lemire, "Fast random
    integer generation in an interval" (2019).

    Example:
        >>> forall.random.randint(forall.random.key(0), (4,), 0, 10)
        tensor([4, 2, 9, 5])
    """
    if isinstance(minval, int) and isinstance(maxval, int) and not 0 < maxval - minval < 1 << 63:
        raise documented_error(ValueError, "random-range")(
            "randint(key, shape, minval, maxval): there must be 1 to 2**63 - 1 integers to draw.\n"
            f"{format_columns([('minval', str(minval)), ('maxval', str(maxval))])}\n"
            "maxval itself is not drawn; bits gives whole words."
        )
    low, high = (make_parameter(v, torch.int64, key) for v in (minval, maxval))
    check_draw_shape("randint", shape, low.shape, high.shape)
    drawn = draw_below(key, shape, high - low)
    return (low + drawn).to(dtype)


def draw_below(key: Tensor, shape: Sequence[int], span: Tensor) -> Tensor:
    """Draw integers from 0 to below ``span``."""
    w0, w1 = (w.to(torch.int64) & LOW for w in draw_words("randint", key, shape))
    near = span.clamp(min=1, max=1 << 31)
    short_ = (w0 * near + (w1 * near >> 32)) >> 32
    far = ((w0 & 0x7FFFFFFF) << 32 | w1) % span.clamp(min=1)
    return torch.where(span > 1 << 31, far, short_)


def poisson(
    key: Tensor,
    lam: Any,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype = torch.int64,
) -> Tensor:
    """Counts of the Poisson distribution of mean ``lam``: (2,) -> shape.

    Args:
        lam: at least 0; a number, or a tensor that broadcasts to ``shape``.
        shape: that of ``lam`` where it is None.

    Raises:
        TypeError, ValueError: for a key that is none, for a ``lam`` that does not fit the shape.

    Source: Hörmann, "The transformed rejection method for generating Poisson random variables"
    (1993); below 10 the inverse of the distribution function.

    Example:
        >>> x = forall.random.poisson(forall.random.key(0), 4.0, (10000,)).double()
        >>> bool((x.mean() - 4).abs() < 0.1) and bool((x.var() - 4).abs() < 0.2)
        True
    """
    k0, k1 = split_words("poisson", key)
    rate = make_parameter(lam, choose_dtype(None, lam), key).detach()
    shape = check_draw_shape("poisson", shape, rate.shape)
    return rejection.poisson_operator(
        k0, k1, make_counters(shape, key.device)[1], rate.expand(shape)
    ).to(dtype)


def categorical(
    key: Tensor,
    logits: Tensor,
    dim: int = -1,
    shape: Sequence[int] | None = None,
) -> Tensor:
    """Places along ``dim``, each with its softmax probability: (2,), (*L, n) -> shape.

    Args:
        logits: logarithms of the probabilities, up to a constant.
        dim: along which the classes lie.
        shape: what the other dims broadcast to; these themselves where it is None.

    Raises:
        TypeError, ValueError: for a key that is none, for logits that do not fit the shape.

    Source: the greatest of logits with Gumbel noise; Maddison, Tarlow and Minka, "A* sampling"
    (2014).

    Example:
        >>> logits = torch.tensor([0.0, 1.0, float("-inf")])
        >>> forall.random.categorical(forall.random.key(0), logits, shape=(9,))
        tensor([1, 1, 1, 1, 1, 1, 0, 0, 1])
    """
    logits = make_parameter(logits, choose_dtype(None, logits), key).movedim(dim, -1)
    shape = check_draw_shape("categorical", shape, logits.shape[:-1])
    noise = gumbel(key, (*shape, logits.shape[-1]), logits.dtype)
    return (logits + noise).argmax(-1)


def permutation(key: Tensor, x: int | Tensor, dim: int = 0, *, independent: bool = False) -> Tensor:
    """``x`` in another order along ``dim``, all orders equally likely; an int means arange(x).

    Args:
        independent: each line along ``dim`` in an order of its own.

    Raises:
        TypeError, ValueError: for a key that is none, for a tensor of rank 0.
        IndexError: for a dim that x does not have.

    Source: the order of random numbers of 63 bits, of which two are hardly ever equal.

    Example:
        >>> forall.random.permutation(forall.random.key(0), 6)
        tensor([4, 3, 2, 1, 5, 0])
    """
    if isinstance(x, int):
        return _draw_order(key, (x,), 0)
    if not x.dim():
        raise documented_error(ValueError, "random-shapes")(
            "permutation(key, x): a tensor of rank 0 has no order.\n"
            f"{format_columns([('x', format_short(x))])}\n"
            "Give an int n for the numbers below n, or a tensor of rank 1 or more."
        )
    dim = wrap_dim(dim, x.dim())
    if independent:
        return x.gather(dim, _draw_order(key, x.shape, dim))
    return x.index_select(dim, _draw_order(key, (x.shape[dim],), 0))


def _draw_order(key: Tensor, shape: Sequence[int], dim: int) -> Tensor:
    return draw_bits("permutation", key, shape, 64).argsort(stable=True, dim=dim)


def choice(
    key: Tensor,
    a: int | Tensor,
    shape: Sequence[int] = (),
    replace: bool = True,
    p: Tensor | None = None,
    dim: int = 0,
) -> Tensor:
    """Entries of ``a`` along ``dim``, drawn at random; an int means arange(a).

    The places of the entries drawn take the shape ``shape``, where ``dim`` was.

    Args:
        replace: whether an entry may be drawn more than once.
        p: how likely each entry is, up to a factor; all alike where it is None.

    Raises:
        TypeError: for a key that is none.
        ValueError: for a key that is none, for more entries than there are without replacement,
            for a ``p`` that has not one number for each entry.

    Example:
        >>> forall.random.choice(forall.random.key(0), torch.tensor([2.0, 3.0, 5.0]), (4,))
        tensor([3., 2., 5., 3.])
    """
    whole = isinstance(a, int)
    dim = 0 if whole else wrap_dim(dim, a.dim())
    n = a if whole else a.shape[dim]
    shape = check_shape("choice", shape)
    drawn = math.prod(shape)
    if drawn and (n < 1 or (not replace and drawn > n)):
        raise documented_error(ValueError, "random-range")(
            "choice(key, a, shape): there are fewer entries than are drawn.\n"
            f"{format_columns([('entries', str(n)), ('drawn', str(drawn))])}\n"
            "Draw with replace=True, or draw fewer."
        )
    if p is not None and p.shape != (n,):
        raise documented_error(ValueError, "random-shapes")(
            "choice(key, a, shape, p=p): p has one number for each entry.\n"
            f"{format_columns([('entries', str(n)), ('p', format_short(p))])}\n"
            "Give a tensor of rank 1."
        )
    places = _draw_indices(key, n, shape, drawn, replace, p)
    if whole:
        return places
    taken = a.index_select(dim, places.reshape(-1))
    return taken.reshape((*a.shape[:dim], *shape, *a.shape[dim + 1 :]))


def _draw_indices(key: Tensor, n: int, shape: tuple, drawn: int, replace: bool, p: Any) -> Tensor:
    if replace and p is None:
        return randint(key, shape, 0, max(n, 1))
    if replace:
        return categorical(key, p.log(), shape=shape)
    if p is None:
        return permutation(key, n)[:drawn].reshape(shape)
    noise = gumbel(key, (n,), choose_dtype(None, p))
    return (noise + p.log()).topk(drawn).indices.reshape(shape)
