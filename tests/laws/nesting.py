"""Transforms of functions of a number, each beside what it is in terms of the function's slope."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from forall import grad, grad_and_value, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from oracle import difference


class Cube(torch.autograd.Function):
    """The third power, with a backward of its own."""

    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return a**3

    @staticmethod
    def backward(ctx, g):
        return 3 * ctx.saved_tensors[0] ** 2 * g


def slope(f: Callable) -> Callable:
    def derivative(x: Tensor) -> Tensor:
        x = x.view_as(x) if x.requires_grad else x.detach().requires_grad_()
        return torch.autograd.grad(f(x), x, create_graph=True)[0]

    return derivative


def by_vmap(f: Callable) -> Callable:
    return lambda x: vmap(f)(torch.stack([x, x * 0.5, x * -2])).sum()


def by_grad_and_value(f: Callable) -> Callable:
    def both(x: Tensor) -> Tensor:
        g, value = grad_and_value(f)(x)
        return g + 2 * value

    return both


def by_vjp(f: Callable) -> Callable:
    def both(x: Tensor) -> Tensor:
        y, pull = vjp(f, x)
        return y + pull(3 * torch.ones_like(y))[0]

    return both


def by_jvp(f: Callable) -> Callable:
    def both(x: Tensor) -> Tensor:
        y, t = jvp(f, (x,), (3 * torch.ones_like(x),))
        return y + t

    return both


def by_linearize(f: Callable) -> Callable:
    def both(x: Tensor) -> Tensor:
        y, push = linearize(f, x)
        return y + push(3 * torch.ones_like(x))

    return both


# What ours does to a function of a number, and what that is in terms of its slope.
VERBS: dict[str, tuple[Callable, Callable]] = {
    "vmap": (by_vmap, lambda f: lambda x: f(x) + f(x * 0.5) + f(x * -2)),
    "grad": (grad, slope),
    "grad_and_value": (by_grad_and_value, lambda f: lambda x: slope(f)(x) + 2 * f(x)),
    "vjp": (by_vjp, lambda f: lambda x: f(x) + 3 * slope(f)(x)),
    "jvp": (by_jvp, lambda f: lambda x: f(x) + 3 * slope(f)(x)),
    "linearize": (by_linearize, lambda f: lambda x: f(x) + 3 * slope(f)(x)),
    "jacrev": (jacrev, slope),
    "jacfwd": (jacfwd, slope),
    "hessian": (hessian, lambda f: slope(slope(f))),
}

PAIRS: list[tuple[str, ...]] = list(itertools.product(VERBS, repeat=2))
TRIPLES: list[tuple[str, ...]] = random.Random(0).sample(
    list(itertools.product(VERBS, repeat=3)), 60
)


def nested(names: Sequence[str], f: Callable, which: int) -> Callable:
    """Return `f` under these transforms, or (`which` is 1) what that comes down to."""
    for name in reversed(names):
        f = VERBS[name][which](f)
    return f


def check_nesting(
    names: Sequence[str], captured_requires_grad: bool, device: torch.device | None = None
) -> None:
    """Compare value and gradients, of a function that captures a tensor."""
    results = []
    for which in (0, 1):
        x, w = (
            torch.tensor(
                v, dtype=torch.float64, device=device, requires_grad=captured_requires_grad
            )
            for v in (0.3, 0.7)
        )
        y = nested(names, lambda x: (x * w).sin() * x.exp(), which)(x)  # noqa: B023 - run at once
        if which == 0:
            assert y.requires_grad == captured_requires_grad
        grads = torch.autograd.grad(y, (x, w)) if captured_requires_grad else ()
        results.append([y, *grads])
    found = difference(*results)
    assert found is None, found
