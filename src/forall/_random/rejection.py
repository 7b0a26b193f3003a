"""Rejection sampling as pointwise operators: each entry uses random bits of its own.

An entry takes its words at the counter (attempt, index): the attempt is the higher word, the index
in the result the lower. So its draw depends on the key and its own parameters alone, however many
attempts other entries need. As operators, these run below every level, on ordinary tensors.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from forall._compat.shapes import broadcast_shapes
from forall._random.threefry import LOW, library, threefry

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor


def register_operator(name: str, parameters: str) -> Callable:
    """Return a decorator that registers a kernel as a pointwise operator.

    Its schema is ``forall::name(k0, k1, place, *parameters)``.
    """

    def enter(kernel: Callable) -> Any:
        library.define(f"{name}(Tensor k0, Tensor k1, Tensor place, {parameters}) -> Tensor")

        def flat(k0: Tensor, k1: Tensor, place: Tensor, *given: Any) -> Tensor:
            all_of_them = (k0, k1, place, *given)
            tensors = [t for t in all_of_them if isinstance(t, torch.Tensor)]
            shape = broadcast_shapes(*(t.shape for t in tensors))
            lined = (
                t.expand(shape).reshape(-1) if isinstance(t, torch.Tensor) else t
                for t in all_of_them
            )
            return kernel(*lined).view(shape)

        def blank(k0: Tensor, k1: Tensor, place: Tensor, *given: Any) -> Tensor:
            tensors = [t for t in (k0, k1, place, *given) if isinstance(t, torch.Tensor)]
            return tensors[3].new_empty(broadcast_shapes(*(t.shape for t in tensors)))

        library.impl(name, flat, "CompositeExplicitAutograd")
        library.impl(name, blank, "Meta")
        return getattr(torch.ops.forall, name).default

    return enter


class _OpenEntries:
    """The entries that have no accepted draw yet, and the random words for their next attempt."""

    def __init__(self, k0: Tensor, k1: Tensor, place: Tensor, *parameters: Tensor) -> None:
        self.k0, self.k1, self.place = k0, k1, place
        self.parameters = parameters
        self.left = torch.arange(place.numel(), device=place.device)
        self.attempt = 0

    def draw_units(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return two uniform numbers in (0, 1) for each open entry."""
        if dtype is torch.float64:
            return self._fine(dtype), self._fine(dtype)
        first, second = self._words()
        return _unit(first, dtype), _unit(second, dtype)

    def _words(self) -> tuple[Tensor, Tensor]:
        attempt = torch.full_like(self.place, self.attempt)
        self.attempt += 1
        return threefry(self.k0, self.k1, attempt, self.place)

    def _fine(self, dtype: torch.dtype) -> Tensor:
        high, low = (w.to(torch.int64) & LOW for w in self._words())
        return ((high << 20 | low >> 12).to(dtype) + 0.5) * 2.0**-52

    def drop_done(self, done: Tensor) -> Tensor:
        """Drop the entries that are done, and return their indices in the result."""
        settled = self.left[done]
        more = ~done
        self.left, self.k0, self.k1, self.place = (
            t[more] for t in (self.left, self.k0, self.k1, self.place)
        )
        self.parameters = tuple(p[more] for p in self.parameters)
        return settled


def _unit(word: Tensor, dtype: torch.dtype) -> Tensor:
    return (((word >> 9) & 0x7FFFFF).to(dtype) + 0.5) * 2.0**-23


@register_operator("gamma", "Tensor alpha, bool logarithm")
def gamma_operator(k0: Tensor, k1: Tensor, place: Tensor, alpha: Tensor, logarithm: bool) -> Tensor:
    """Draw gamma numbers of shape alpha > 0 and scale 1, or logarithms, which do not underflow.

    Source: Marsaglia and Tsang, "A simple method for generating gamma variables" (2000); where
    alpha < 1, alpha + 1 and a power of a uniform number.
    """
    out = torch.full_like(alpha, math.nan)
    boosted = torch.where(alpha < 1, alpha + 1, alpha)
    d = boosted - 1 / 3
    open_ = _OpenEntries(k0, k1, place, alpha, d, 1 / (9 * d).sqrt())
    power, _ = open_.draw_units(alpha.dtype)  # for alpha < 1; its attempt is number 0
    power = torch.where(alpha < 1, power.log() / alpha, 0)
    open_.drop_done(~(alpha > 0))  # these stay nan
    while open_.left.numel():
        _, d, c = open_.parameters
        first, u = open_.draw_units(alpha.dtype)
        x = torch.erfinv(2 * first - 1) * math.sqrt(2)
        v = (1 + c * x) ** 3
        fits = (v > 0) & (u.log() < x * x / 2 + d * (1 - v + v.log()))
        fits |= d.isinf()
        found = d.log() + v.log() if logarithm else d * v
        out[open_.drop_done(fits)] = found[fits]
    return out + power if logarithm else out * power.exp()


@register_operator("poisson", "Tensor rate")
def poisson_operator(k0: Tensor, k1: Tensor, place: Tensor, rate: Tensor) -> Tensor:
    """Draw Poisson counts.

    Source: below a rate of 10 the inverse of the distribution function; else Hörmann, "The
    transformed rejection method for generating Poisson random variables" (1993).
    """
    fine = rate.to(_fine_dtype(rate))
    open_ = _OpenEntries(k0, k1, place, fine)
    u, _ = open_.draw_units(fine.dtype)
    low = fine.clamp(max=10)
    counts = _invert_cdf(u, torch.exp(-low), lambda p, k: p * low / k)
    counts = torch.where(fine >= 0, counts, math.nan)
    open_.drop_done(~(fine >= 10) | fine.isinf())

    def fits(k: Tensor, v: Tensor, hat: Tensor, rate: Tensor) -> Tensor:
        scale = 1.1239 + 1.1328 / (0.931 + 2.53 * rate.sqrt() - 3.4)
        return torch.log(v * scale / hat) <= k * rate.log() - rate - torch.lgamma(k + 1)

    while open_.left.numel():
        (rate_,) = open_.parameters
        b = 0.931 + 2.53 * rate_.sqrt()
        a, ceiling = -0.059 + 0.02483 * b, 0.9277 - 3.6224 / (b - 2)
        _attempt(open_, counts, a, b, rate_ + 0.43, ceiling, fits)
    return torch.where(fine.isinf(), fine, counts).to(rate.dtype)


@register_operator("binomial", "Tensor count, Tensor prob")
def binomial_operator(k0: Tensor, k1: Tensor, place: Tensor, count: Tensor, prob: Tensor) -> Tensor:
    """Draw binomial counts: the number of ``count`` events of probability ``prob`` that happen.

    Source: below 10 expected the inverse of the distribution function; else Hörmann, "The
    generation of binomial random variates" (1993), BTRS.
    """
    n, given = count.to(_fine_dtype(count)), prob.to(_fine_dtype(count))
    p = torch.minimum(given, 1 - given)
    open_ = _OpenEntries(k0, k1, place, n, p)
    u, _ = open_.draw_units(n.dtype)
    few = torch.where(n * p < 10, n, 0)
    odds = p / (1 - p)
    none = torch.exp(few * torch.log1p(-p))
    counts = _invert_cdf(u, none, lambda q, k: q * odds * (few - k + 1).clamp(min=0) / k)
    valid = (n >= 0) & (given >= 0) & (given <= 1)
    counts = torch.where(valid, counts, math.nan)
    open_.drop_done(~(valid & (n * p >= 10)))

    def fits(k: Tensor, v: Tensor, hat: Tensor, n: Tensor, p: Tensor) -> Tensor:
        spread = (n * p * (1 - p)).sqrt()
        scale = (2.83 + 5.1 / (1.15 + 2.53 * spread)) * spread
        m = ((n + 1) * p).floor()
        weight = torch.lgamma(m + 1) + torch.lgamma(n - m + 1) + (k - m) * (p / (1 - p)).log()
        inside = k <= n
        k = torch.where(inside, k, n)
        weight = weight - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
        return inside & (torch.log(v * scale / hat) <= weight)

    while open_.left.numel():
        n_, p_ = open_.parameters
        b = 1.15 + 2.53 * (n_ * p_ * (1 - p_)).sqrt()
        a, ceiling = -0.0873 + 0.0248 * b + 0.01 * p_, 0.92 - 4.2 / b
        _attempt(open_, counts, a, b, n_ * p_ + 0.5, ceiling, fits)
    return torch.where(given > 0.5, n - counts, counts).to(count.dtype)


def _attempt(
    open_: _OpenEntries,
    counts: Tensor,
    a: Tensor,
    b: Tensor,
    center: Tensor,
    ceiling: Tensor,
    fits: Callable,
) -> None:
    """Make one attempt of Hörmann's transformed rejection; most need no density."""
    u, v = open_.draw_units(counts.dtype)
    u = u - 0.5
    room = 0.5 - u.abs()
    k = ((2 * a / room + b) * u + center).floor()
    surely = (room >= 0.07) & (v <= ceiling)
    possibly = (k >= 0) & ~((room < 0.013) & (v > room))
    hat = a / (room * room) + b
    found = surely | (possibly & fits(k.clamp(min=0), v, hat, *open_.parameters))
    counts[open_.drop_done(found)] = k[found]


def _invert_cdf(u: Tensor, p: Tensor, following: Callable) -> Tensor:
    """Return the least count whose distribution function reaches ``u``.

    ``p`` is p(0), and ``following`` gives p(k) from p(k - 1) and k.
    """
    count, total = torch.zeros_like(u), p
    k = 0
    while bool((beyond := (u > total) & (p > 0)).any()):
        k += 1
        p = following(p, k)
        count = torch.where(beyond, k, count)
        total = total + p
    return count


def _fine_dtype(x: Tensor) -> torch.dtype:
    return x.dtype if x.device.type == "mps" else torch.float64
