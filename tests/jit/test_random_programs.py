"""Random programs, recorded and replayed: equal to the program itself, call after call.

`FORALL_PROGRAMS` and `FORALL_SEED` as for the other random programs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given
from torch import Tensor

from forall import PerformanceWarning, grad, jit, vmap
from limits.programs import D
from limits.test_random_programs import B, agree, detached, many, programs


def calls(make: Callable[[Callable], Callable[[int], list[Tensor]]], program: Any) -> None:
    """Three calls with other numbers each: values, and what is left in the arguments."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PerformanceWarning)
        replayed, plain = make(jit), make(lambda f: f)
        for i in range(3):
            agree(lambda i=i: replayed(i), lambda i=i: plain(i), program)


def numbers(i: int, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=D, generator=torch.Generator().manual_seed(7 * i + len(shape)))


@many
@given(programs)
def test_a_program(program):
    def make(jit: Callable) -> Callable[[int], list[Tensor]]:
        w = torch.zeros(2, dtype=D)
        f = jit(lambda x, v: program(x, v, w))

        def call(i: int) -> list[Tensor]:
            w.copy_(numbers(i + 9, 2))
            x, v = numbers(i, *program.example), numbers(i + 5, 2)
            return [*detached(f(x, v)), x, v, w.clone()]

        return call

    calls(make, program)


@many
@given(programs)
def test_a_program_under_transforms(program):
    def make(jit: Callable) -> Callable[[int], list[Tensor]]:
        w = torch.zeros(2, dtype=D)
        f = jit(vmap(grad(lambda x, v: program.number(x, v, w), (0, 1))))

        def call(i: int) -> list[Tensor]:
            w.copy_(numbers(i + 9, 2))
            xs, vs = numbers(i, B, *program.example), numbers(i + 5, B, 2)
            return [*detached(f(xs, vs)), xs, vs]

        return call

    calls(make, program)


@many
@given(programs)
def test_a_program_with_a_derivative_outside(program):
    def make(jit: Callable) -> Callable[[int], list[Tensor]]:
        w = torch.zeros(2, dtype=D)
        f = jit(lambda x, v, w: program.number(1 * x, 1 * v, w))

        def call(i: int) -> list[Tensor]:
            leaves = [
                t.requires_grad_()
                for t in (numbers(i, *program.example), numbers(i + 5, 2), numbers(i + 9, 2))
            ]
            y = f(*leaves)
            if not y.requires_grad:
                return [y]
            found = torch.autograd.grad(y, leaves, allow_unused=True, create_graph=i == 2)
            return [y.detach(), *(g.detach() for g in found if g is not None), w]

        return call

    calls(make, program)
