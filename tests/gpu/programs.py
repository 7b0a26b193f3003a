"""Random programs of writes, views, reductions and autograd calls: each transform is the loop."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from forall import grad, jit, jvp, vmap
from gpu.checks import Check, D, Skipped, assert_same, default_device, numbers
from limits.programs import NOT_FORWARD, Program
from oracle import loop

EXAMPLES, PROGRAMS = 3, 250
QUICK = 4  # one in so many of the checks is made with --quick


def drawn(seed: int) -> Program:
    draw = random.Random(seed)
    small = lambda: tuple(draw.randrange(32) for _ in range(4))  # noqa: E731
    instructions = tuple(small() for _ in range(draw.randint(2, 12)))
    return Program(draw.randrange(5), draw.random() < 0.5, instructions)


def checks(device: torch.device) -> list[Check]:
    words: dict[str, Callable] = {
        "vmap": values,
        "vmap of grad": slopes,
        "vmap of jvp": directions,
        "jit of vmap": recorded,
    }

    def of(seed: int, word: str) -> Callable[[], None]:
        def run() -> None:
            with default_device(device):
                words[word](drawn(seed), arguments(drawn(seed), device))

        return run

    return [Check(f"{word} of program {n}", of(n, word)) for n in range(PROGRAMS) for word in words]


def arguments(program: Program, device: torch.device) -> Callable[[], tuple[Tensor, ...]]:
    """Fresh ones at each call, since programs write into them."""
    return lambda: (
        numbers(device, EXAMPLES, *program.example),
        numbers(device, EXAMPLES, 3, seed=1),
        numbers(device, 2, seed=2),
    )


def plain(run: Callable[[], Any]) -> Any:
    """What the loop gives; where it raises, the program says nothing."""
    try:
        return run()
    except Exception as error:
        raise Skipped(f"the loop raises {type(error).__name__}") from error


IN_DIMS = (0, 0, None)


def values(program: Program, given: Callable) -> None:
    mine, theirs = given(), given()
    truth = plain(lambda: loop(program, IN_DIMS)(*theirs))
    assert_same(vmap(program, in_dims=IN_DIMS)(*mine), truth)
    assert_same(mine, theirs, "arguments after the call")


def slopes(program: Program, given: Callable) -> None:
    def slope(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        leaf = x.clone().requires_grad_()
        y = program.number(leaf * 1, v, w)
        if not y.requires_grad:
            return torch.zeros_like(x)
        return torch.autograd.grad(y, leaf, materialize_grads=True)[0]

    truth = plain(lambda: loop(slope, IN_DIMS)(*given()))
    f = lambda x, v, w: program.number(x * 1, v, w)  # noqa: E731
    assert_same(vmap(grad(f), in_dims=IN_DIMS)(*given()), truth)


def directions(program: Program, given: Callable) -> None:
    program = program.without(*NOT_FORWARD)

    def pushed(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        leaf = x.clone().requires_grad_()
        y = program.number(leaf * 1, v, w)
        if not y.requires_grad:
            return torch.zeros((), dtype=D, device=x.device)
        (slope,) = torch.autograd.grad(y, leaf, materialize_grads=True)
        return (slope * x.cos()).sum()

    truth = plain(lambda: loop(pushed, IN_DIMS)(*given()))
    f = lambda x, v, w: jvp(lambda x: program.number(x * 1, v, w), (x,), (x.cos(),))[1]  # noqa: E731
    assert_same(vmap(f, in_dims=IN_DIMS)(*given()), truth)


def recorded(program: Program, given: Callable) -> None:
    mapped = vmap(lambda *xs: program(*(x.clone() for x in xs)), in_dims=IN_DIMS)
    truth = plain(lambda: loop(lambda *xs: program(*(x.clone() for x in xs)), IN_DIMS)(*given()))
    f = jit(mapped)
    for call in range(3):
        assert_same(f(*given()), truth, f"call {call}")
