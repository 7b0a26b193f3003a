"""Transforms and their nestings, each beside what it has to equal.

The truth of `vmap` is the loop over examples; that of a derivative is torch.autograd's reverse mode
on plain tensors, row by row, of one call of the function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draws import make_generator
from forall import (
    grad,
    hessian,
    hessian_diag,
    hvp,
    jacfwd,
    jacrev,
    jvp,
    laplacian,
    linearize,
    vmap,
)

D = torch.float64


def numbers(*shape: int, seed: int = 0) -> Tensor:
    generator = make_generator(10 * sum(shape) + len(shape) + seed)
    drawn = torch.randn(shape, dtype=D, generator=generator, device="cpu")
    return drawn.to(torch.get_default_device())


DIRECTION = torch.tensor([0.5, -1.0, 2.0], dtype=D)


def total(y: Tensor) -> Tensor:
    """One number, to which each entry gives another part."""
    weights = torch.arange(1, y.numel() + 1, dtype=D).reshape(y.shape)
    return (y * weights).sum()


def scalar(f: Callable) -> Callable:
    return lambda a: total(f(a))


# --- the truth -----------------------------------------------------------------------------------


def looped(f: Callable) -> Callable:
    return lambda xs: torch.stack([f(x) for x in xs])


def leaf_or_alias(x: Tensor) -> Tensor:
    return x.view_as(x) if x.requires_grad else x.detach().clone().requires_grad_()


def rows(f: Callable) -> Callable:
    """The Jacobian, from one call of f."""

    def jacobian(x: Tensor) -> Tensor:
        x = leaf_or_alias(x)
        with torch.enable_grad():
            y = f(x)
            found = [gradient(entry, x) for entry in y.reshape(-1)]
        return torch.stack(found).reshape(*y.shape, *x.shape)

    return jacobian


def gradient(y: Tensor, x: Tensor) -> Tensor:
    if not y.requires_grad:
        return torch.zeros_like(x)
    (g,) = torch.autograd.grad(y, x, create_graph=True, allow_unused=True, materialize_grads=True)
    return g


def slope(f: Callable) -> Callable:
    """The gradient of a function of one number as its value."""
    return rows(f)


def pushed(f: Callable, t: Tensor) -> Callable:
    """The derivative in one direction, from one call of f."""
    return lambda x: rows(f)(x).flatten(-x.dim()) @ t.expand_as(x).reshape(-1)


# --- ours beside it ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Word:
    """A nesting of transforms; both take f and give a function of a tensor of this shape."""

    shape: tuple[int, ...]
    ours: Callable
    truth: Callable


def tangent(f: Callable, t: Tensor) -> Callable:
    return lambda x: jvp(f, (x,), (t.expand_as(x),))[1]


def played(f: Callable, t: Tensor) -> Callable:
    return lambda x: linearize(f, x)[1](t.expand_as(x))


T = DIRECTION
WORDS = {
    "vmap": Word((4, 3), vmap, looped),
    "grad": Word((3,), lambda f: grad(scalar(f)), lambda f: slope(scalar(f))),
    "jvp": Word((3,), lambda f: tangent(f, T), lambda f: pushed(f, T)),
    "jacrev": Word((3,), jacrev, rows),
    "jacfwd": Word((3,), jacfwd, rows),
    "hessian": Word((3,), lambda f: hessian(scalar(f)), lambda f: rows(slope(scalar(f)))),
    "vmap of vmap": Word((2, 2, 3), lambda f: vmap(vmap(f)), lambda f: looped(looped(f))),
    "vmap of grad": Word(
        (4, 3), lambda f: vmap(grad(scalar(f))), lambda f: looped(slope(scalar(f)))
    ),
    "grad of vmap": Word(
        (4, 3), lambda f: grad(scalar(vmap(f))), lambda f: slope(scalar(looped(f)))
    ),
    "vmap of jvp": Word((4, 3), lambda f: vmap(tangent(f, T)), lambda f: looped(pushed(f, T))),
    "jvp of vmap": Word((4, 3), lambda f: tangent(vmap(f), T), lambda f: pushed(looped(f), T)),
    "vmap of jacrev": Word((2, 3), lambda f: vmap(jacrev(f)), lambda f: looped(rows(f))),
    "vmap of jacfwd": Word((2, 3), lambda f: vmap(jacfwd(f)), lambda f: looped(rows(f))),
    "jacrev of vmap": Word((2, 3), lambda f: jacrev(vmap(f)), lambda f: rows(looped(f))),
    "jacfwd of vmap": Word((2, 3), lambda f: jacfwd(vmap(f)), lambda f: rows(looped(f))),
    "grad of grad": Word(
        (3,),
        lambda f: grad(scalar(grad(scalar(f)))),
        lambda f: slope(scalar(slope(scalar(f)))),
    ),
    "jvp of grad": Word(
        (3,), lambda f: tangent(grad(scalar(f)), T), lambda f: pushed(slope(scalar(f)), T)
    ),
    "grad of jvp": Word(
        (3,), lambda f: grad(scalar(tangent(f, T))), lambda f: slope(scalar(pushed(f, T)))
    ),
    "vmap of hessian": Word(
        (2, 3),
        lambda f: vmap(hessian(scalar(f))),
        lambda f: looped(rows(slope(scalar(f)))),
    ),
    "vmap in chunks": Word((4, 3), lambda f: vmap(f, chunk_size=3), looped),
    "jacrev in chunks": Word((3,), lambda f: jacrev(f, chunk_size=2), rows),
    "jacfwd in chunks": Word((3,), lambda f: jacfwd(f, chunk_size=2), rows),
    "hessian in chunks": Word(
        (3,), lambda f: hessian(scalar(f), chunk_size=2), lambda f: rows(slope(scalar(f)))
    ),
    "vmap of jacfwd in chunks": Word(
        (2, 3), lambda f: vmap(jacfwd(f, chunk_size=1)), lambda f: looped(rows(f))
    ),
    "linearize": Word((3,), lambda f: played(f, T), lambda f: pushed(f, T)),
    "vmap of linearize": Word((4, 3), lambda f: vmap(played(f, T)), lambda f: looped(pushed(f, T))),
    "linearize of vmap": Word((4, 3), lambda f: played(vmap(f), T), lambda f: pushed(looped(f), T)),
    "linearize of grad": Word(
        (3,), lambda f: played(grad(scalar(f)), T), lambda f: pushed(slope(scalar(f)), T)
    ),
    "grad of linearize": Word(
        (3,), lambda f: grad(scalar(played(f, T))), lambda f: slope(scalar(pushed(f, T)))
    ),
    "hvp": Word(
        (3,),
        lambda f: lambda x: hvp(scalar(f))(x, T),
        lambda f: pushed(slope(scalar(f)), T),
    ),
    "vmap of hessian_diag": Word(
        (2, 3),
        lambda f: vmap(hessian_diag(scalar(f))),
        lambda f: looped(lambda x: rows(slope(scalar(f)))(x).diagonal()),
    ),
    "laplacian": Word(
        (3,),
        lambda f: laplacian(scalar(f)),
        lambda f: lambda x: rows(slope(scalar(f)))(x).trace(),
    ),
}

# Transforms that push tangents forward.
FORWARD = {"jvp", "jacfwd", "hessian", "linearize", "hvp", "hessian_diag", "laplacian"}

# What requires grad outside the call: nothing, a leaf that f captures, a tensor computed from such
# a leaf, the argument.
OUTSIDE = ("nothing", "a leaf", "a non-leaf", "the argument")


def outcome(transform: Callable, f: Callable, shape: tuple[int, ...], outside: str) -> list[Any]:
    """The values, what f itself left on tensors from outside, and the gradients taken outside.

    No gradient and one of zeros are the same here: which it is depends on how the truth is put.
    """
    x = numbers(*shape).requires_grad_(outside == "the argument")
    leaf = numbers(3, seed=1).requires_grad_(outside in ("a leaf", "a non-leaf"))
    w = leaf * 1 if outside == "a non-leaf" else leaf
    y = transform(lambda a: f(a, w))(x)
    left = [torch.zeros_like(t) if t.grad is None else t.grad.clone() for t in (x, leaf)]
    if y.requires_grad:
        total(y).backward()
    after = [torch.zeros_like(t) if t.grad is None else t.grad for t in (x, leaf)]
    return [y.detach(), *left, *after]
