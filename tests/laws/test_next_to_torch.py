"""forall next to torch's own transforms: the right number or a clear error, never a wrong one.

Every word over the transforms of both libraries is applied to w * sin(x)^2, whose derivatives
and rescalings are sums of sinusoids again, so each word has a closed form.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import forall

LIBRARIES = {"forall": forall, "torch": torch.func}
VERBS = ("vmap", "grad", "vjp", "jvp", "jacrev", "jacfwd", "hessian", "linearize")
DIRECTION = torch.tensor([0.5, -1.5, 2.0], dtype=torch.float64)
POINT = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64)
WEIGHT = torch.tensor([1.3, 0.4, -0.6], dtype=torch.float64)

Word = tuple[tuple[str, str], ...]


def applied(library: str, verb: str, h: Callable) -> Callable:
    """An elementwise function out of an elementwise ``h``, by one transform."""
    lib: Any = LIBRARIES[library]
    along = DIRECTION
    if verb == "vmap":
        return lambda x: lib.vmap(h)(torch.stack([x, 2 * x])).sum(0)
    if verb == "grad":
        return lib.grad(lambda x: h(x).sum())
    if verb == "vjp":
        return lambda x: lib.vjp(h, x)[1](along)[0]
    if verb == "jvp":
        return lambda x: lib.jvp(h, (x,), (along,))[1]
    if verb == "linearize":
        return lambda x: lib.linearize(h, x)[1](along)
    if verb == "hessian":
        derivative = lib.hessian(lambda x: h(x).sum())
    else:
        derivative = getattr(lib, verb)(h)
    return lambda x: derivative(x).sum(-1)


class Waves:
    """The closed form: a sum of factor * sin(rate * x + phase), each factor a vector."""

    def __init__(self, terms: list[tuple[Tensor, int, int]]) -> None:
        self.terms = terms

    def after(self, verb: str) -> Waves:
        if verb == "vmap":
            return Waves([(c, r * n, p) for c, r, p in self.terms for n in (1, 2)])
        by = {"vjp": DIRECTION, "jvp": DIRECTION, "linearize": DIRECTION}.get(verb, 1.0)
        once = Waves([(c * r * by, r, p + 1) for c, r, p in self.terms])
        return once.after("grad") if verb == "hessian" else once

    def at(self, x: Tensor) -> Tensor:
        waves = [c * torch.sin(r * x + p * math.pi / 2) for c, r, p in self.terms]
        return torch.stack(waves).sum(0)


def truth(verbs: tuple[str, ...], weight: Tensor) -> Waves:
    """``verbs`` outermost first, of weight * sin(x)^2 = weight / 2 * (1 - cos(2 x))."""
    out = Waves([(weight / 2, 0, 1), (-weight / 2, 2, 1)])
    for verb in reversed(verbs):
        out = out.after(verb)
    return out


def composed(word: Word, weight: Tensor) -> Callable:
    """The same by the transforms themselves; ``weight`` is captured."""

    def h(x: Tensor) -> Tensor:
        return weight * x.sin() * x.sin()

    for library, verb in reversed(word):
        h = applied(library, verb, h)
    return h


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours.detach(), theirs, rtol=1e-9, atol=1e-9)


def check(word: Word, *, differentiated: bool) -> None:
    """One word's value; with ``differentiated`` also gradients for point and weight, outside."""
    verbs = tuple(verb for _, verb in word)
    x = POINT.clone().requires_grad_(differentiated)
    w = WEIGHT.clone().requires_grad_(differentiated)
    y = composed(word, w)(x)
    close(y, truth(verbs, WEIGHT).at(POINT))
    if differentiated:
        gx, gw = torch.autograd.grad(y.sum(), (x, w), allow_unused=False)
        close(gx, truth(("grad", *verbs), WEIGHT).at(POINT))
        close(gw, truth(verbs, torch.ones_like(WEIGHT)).at(POINT))
    else:
        assert not y.requires_grad
