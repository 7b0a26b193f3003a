"""`if` and `while` written by hand in the words of `active_mask`, and the laws they keep.

Outside of vmap the same functions run as plain Python, so a function is its own truth in a loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.functional import hessian as torchs_hessian
from torch.autograd.functional import jacobian as torchs_jacobian
from torch.utils._pytree import tree_flatten, tree_unflatten

from forall import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from forall._vmap.active_set.active_mask import (
    evaluate_test,
    get_active_set,
    join_tensors,
    run_active_set,
)
from oracle import loop


def together(parts: list) -> Any:
    flat = [(world, *tree_flatten(tree)) for world, tree in parts]
    out = [join_tensors([(w, leaves[i]) for w, leaves, _ in flat]) for i in range(len(flat[0][1]))]
    return tree_unflatten(out, flat[0][2])


def choose(test: Any, yes: Callable, no: Callable) -> Any:
    answer = evaluate_test(test)
    if isinstance(answer, bool):
        return yes() if answer else no()
    parts = []
    for world, side in zip(answer, (yes, no), strict=True):
        with run_active_set(world):
            parts.append((world, side()))
    return together(parts)


def repeat(test: Callable, body: Callable, *state: Any) -> Any:
    left, world = [], get_active_set()
    while True:
        with run_active_set(world):
            answer = evaluate_test(test(*state))
            if answer is True:
                state = body(*state)
                continue
        if answer is False:
            left.append((world, state))
            return together(left)
        world, done = answer  # pyright: ignore[reportGeneralTypeIssues]
        left.append((done, state))
        with run_active_set(world):
            state = body(*state)


# --- laws: of a function of one tensor (3,) to a number ------------------------------------------

D = torch.float64


def inside(f: Callable, x: Tensor) -> Tensor:
    x = x.detach().clone().requires_grad_()
    return torch.autograd.grad(f(x), x)[0]


def backward(f: Callable, x: Tensor) -> Tensor:
    x = x.detach().clone().requires_grad_()
    f(x).backward()
    assert x.grad is not None
    return x.grad


def twice(f: Callable, x: Tensor) -> Tensor:
    x = x.detach().clone().requires_grad_()
    (g,) = torch.autograd.grad(f(x), x, create_graph=True)
    return torch.autograd.grad((g * g).sum(), x)[0]


def outside(mapped: Callable, xs: Tensor) -> tuple:
    xs = xs.clone().requires_grad_()
    weights = torch.linspace(0.5, 1.5, len(xs), dtype=D)
    (g,) = torch.autograd.grad((mapped(xs) * weights).sum(), xs, create_graph=True)
    return g.detach(), torch.autograd.grad((g * g.detach().cos()).sum(), xs)[0]


def _first(f: Callable, xs: Tensor) -> list:
    truth = loop(lambda x: inside(f, x))(xs)
    push = xs.cos()
    pushed = (truth * push).sum(1)
    return [
        (vmap(f)(xs), loop(f)(xs)),
        (vmap(grad(f))(xs), truth),
        (vmap(jacrev(f))(xs), truth),
        (vmap(lambda x: vjp(f, x)[1](torch.tensor(2.0, dtype=D))[0])(xs), 2 * truth),
        (vmap(jacfwd(f))(xs), truth),
        (vmap(lambda x, t: linearize(f, x)[1](t))(xs, push), pushed),
        (jvp(vmap(f), (xs,), (push,)), (loop(f)(xs), pushed)),
        (jacfwd(vmap(f))(xs), torchs_jacobian(loop(f), xs)),
        (vmap(lambda x: inside(f, x))(xs), truth),
        (vmap(lambda x: backward(f, x))(xs), truth),
    ]


def _second(f: Callable, xs: Tensor) -> list:
    truth = loop(lambda x: torchs_hessian(f, x))(xs)
    whole = torchs_hessian(lambda xs: loop(f)(xs).sum(), xs)
    return [
        (vmap(hessian(f))(xs), truth),
        (vmap(jacrev(jacrev(f)))(xs), truth),
        (vmap(jacfwd(jacfwd(f)))(xs), truth),
        (vmap(lambda x: twice(f, x))(xs), loop(lambda x: twice(f, x))(xs)),
        (
            vmap(grad(lambda x: (grad(f)(x) ** 2).sum()))(xs),
            loop(lambda x: twice(f, x))(xs),
        ),
        (hessian(lambda xs: vmap(f)(xs).sum())(xs), whole),
    ]


def check(f: Callable, xs: Tensor, order: int = 2) -> None:
    """vmap of f, and every derivative in it and of it, is the loop's."""
    pairs = [(outside(vmap(f), xs), outside(loop(f), xs)), *_first(f, xs)]
    for ours, theirs in pairs + (_second(f, xs) if order > 1 else []):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)
