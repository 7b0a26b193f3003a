"""Transforms that the backward of a custom Function calls: around a vmap, as in the loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from forall import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

if TYPE_CHECKING:
    from collections.abc import Callable


def cubes(w: torch.Tensor) -> torch.Tensor:
    return (w**3).sum()


def squares(w: torch.Tensor) -> torch.Tensor:
    return 3 * w**2


ONES, EYE = torch.ones(2), torch.eye(2)
WAYS: dict[str, Callable[[Any], Any]] = {
    "grad": grad(cubes),
    "hessian": lambda w: hessian(cubes)(w) @ ONES,
    "jacrev of grad": lambda w: jacrev(grad(cubes))(w) @ ONES,
    "jacfwd of jacfwd": lambda w: jacfwd(jacfwd(cubes))(w) @ ONES,
    "jacfwd of a number times a tensor": lambda w: jacfwd(squares)(w) @ ONES,
    "jvp": lambda w: jvp(squares, (w,), (ONES,))[1],
    "vjp": lambda w: vjp(squares, w)[1](ONES)[0],
    "linearize": lambda w: linearize(squares, w)[1](ONES),
    "vmap": lambda w: vmap(lambda e: w * e)(EYE).sum(0),
    "a linear solve": lambda w: torch.linalg.solve(hessian(cubes)(w), ONES),
}


@pytest.mark.parametrize("name", WAYS)
def test_what_a_backward_computes_is_that_of_the_loop(name: str) -> None:
    class Rule(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, w: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(w)
            return w.clone()

        @staticmethod
        def backward(ctx: Any, v: torch.Tensor) -> torch.Tensor:
            (w,) = ctx.saved_tensors
            return WAYS[name](w) * v

    def judge(w: torch.Tensor) -> torch.Tensor:
        return Rule.apply(w).sum()

    xs = torch.tensor([[1.0, 2.0], [3.0, 4.0], [0.5, 5.0]])
    loop = torch.stack([grad(judge)(x) for x in xs])

    def total(xs: torch.Tensor) -> torch.Tensor:
        return vmap(judge)(xs).sum()

    torch.testing.assert_close(vmap(grad(judge))(xs), loop)
    torch.testing.assert_close(grad(total)(xs), loop)
    leaf = xs.clone().requires_grad_()
    total(leaf).backward()
    torch.testing.assert_close(leaf.grad, loop)
    several = jacrev(lambda xs: vmap(judge)(xs))(xs)
    torch.testing.assert_close(several, torch.diag_embed(loop.T).permute(1, 2, 0))
