"""Random programs in random histories of calls: replayed or not, each call is the function's.

Between two calls anything may change: shapes, dtypes, layouts, who requires grad, which arguments
are one tensor, what is captured, the modes of torch. `FORALL_PROGRAMS` and `FORALL_SEED` as for the
other random programs.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import forall
from forall import PerformanceWarning, grad, jit, vmap
from forall._transforms.replaying import replaying
from limits.programs import SHAPES, D, Program
from limits.test_random_programs import many, outcome, programs
from oracle import difference

pick = st.integers(0, 31)


@dataclass(frozen=True)
class Call:
    """One call: what changes before it, of what it is made, and under which mode."""

    change: int
    shape: int
    layout: int
    requires: int
    alias: int
    mode: int


calls = st.lists(st.builds(Call, pick, pick, pick, pick, pick, pick), min_size=1, max_size=5)


class Home:
    """What a function captures."""

    def __init__(self) -> None:
        self.w = torch.tensor([0.3, -0.7], dtype=D)
        self.scale: Any = 2.0
        self.rows = [1.0]
        self.draws = False


def change(home: Home, n: int, i: int) -> None:
    """Nothing, or one of the things that may change between two calls."""
    new = numbers(i, 2)
    changes: list[Callable[[], Any]] = [
        lambda: home.w.detach().copy_(new),
        lambda: setattr(home, "w", new),
        lambda: setattr(home, "w", torch.nn.Parameter(new)),
        lambda: setattr(home, "w", numbers(i, 4)[::2]),
        lambda: setattr(home, "w", new.float()),
        lambda: setattr(home, "scale", [2.0, 2, -0.0, 0.0, True, 3.0][i % 6]),
        lambda: home.rows.__setitem__(0, float(i)),
        lambda: setattr(home, "rows", [float(i)]),
        lambda: setattr(home, "draws", not home.draws),
        lambda: home.w.requires_grad_() if home.w.is_leaf else None,
    ]
    if n < len(changes):
        changes[n]()


def numbers(i: int, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=D, generator=torch.Generator().manual_seed(7 * i + len(shape)))


def laid_out(t: Tensor, layout: int) -> Tensor:
    """The same numbers in another dtype, or elsewhere in memory."""
    layouts: list[Callable[[], Tensor]] = [
        lambda: t.float(),
        lambda: t.mT.contiguous().mT if t.dim() == 2 else t,
        lambda: torch.stack([t, t, t])[1],
        lambda: torch.stack([t, t], -1)[..., 0],
        lambda: t.half(),
    ]
    return layouts[layout]() if layout < len(layouts) else t


def arguments(program: Program, call: Call, home: Home, i: int) -> tuple[Tensor, Tensor]:
    shape = SHAPES[call.shape % len(SHAPES)] if call.shape < 12 else program.example
    x, v = laid_out(numbers(i, *shape), call.layout), numbers(i + 5, 2)
    if call.alias == 0 and shape == (2,):
        v = x
    elif call.alias == 1 and shape == (2,):
        x = home.w
    elif call.alias == 2:
        v = home.w
    elif call.alias == 3 and shape == (3, 2):
        v = x[1]
    for bit, t in ((1, x), (2, v)):
        if call.requires & bit and t.is_leaf and t.is_floating_point() and t is not home.w:
            t.requires_grad_()
    return x, v


@contextmanager
def default_dtype(dtype: torch.dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def mode(n: int) -> AbstractContextManager[Any]:
    modes: list[Callable[[], AbstractContextManager[Any]]] = [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: default_dtype(D),
        lambda: torch.autocast("cpu", torch.bfloat16, enabled=False),
        torch.enable_grad,
    ]
    return modes[n]() if n < len(modes) else nullcontext()


class Side:
    """The function, or its replayed form, in a home of its own."""

    def __init__(self, program: Program, wrap: Callable, jit: Callable) -> None:
        self.program = program
        self.home = home = Home()

        def f(x: Tensor, v: Tensor) -> list[Tensor]:
            w = home.w * home.scale + home.rows[0]
            if home.draws:
                w = w + torch.rand(2, dtype=D)
            return program(x, v, w)

        self.f = jit(wrap(f))

    def call(self, call: Call, i: int) -> list[Any]:
        change(self.home, call.change, i)
        x, v = arguments(self.program, call, self.home, i)
        torch.manual_seed(i)
        with mode(call.mode):
            found = self.f(x, v)
        left = [*found, x, v, self.home.w]
        told = [t.detach().clone() for t in left]
        facts = [(t.requires_grad, t.is_inference(), tuple(t.stride())) for t in left]
        moved = [t for t in found if t.requires_grad and t.is_floating_point()]
        leaves = [t for t in (x, v, self.home.w) if t.requires_grad and t.is_leaf]
        pulled: list[Any] = []
        if moved and leaves:
            moved = [*{id(t): t for t in moved}.values()]
            pulled = [
                *torch.autograd.grad(
                    moved, leaves, [t.detach().sin() for t in moved], allow_unused=True
                )
            ]
        return [*told, str(facts), torch.get_rng_state(), *pulled]


def plainly(f: Callable) -> Callable:
    return f


def replayed(f: Callable) -> Callable:
    """A function of which nobody has said that it is pure, recorded as soon as it can be."""
    g = replaying(f)(f)

    def called(x: Tensor, v: Tensor) -> list[Tensor]:
        before = forall.config.replay, forall.config.patience
        forall.config.replay, forall.config.patience = True, 0
        try:
            return g(x, v)
        finally:
            forall.config.replay, forall.config.patience = before

    return called


def twice(history: list[Call]) -> list[Call]:
    """Each call, and three like it with other numbers: looked at, recorded, and run so."""
    return [c for call in history for c in (call, *[replace(call, change=0)] * 3)]


def compare(program: Program, history: list[Call], wrap: Callable, jit: Callable) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PerformanceWarning)
        ours, theirs = Side(program, wrap, jit), Side(program, wrap, plainly)
        for i, call in enumerate(twice(history)):
            truth = outcome(functools.partial(theirs.call, call, i))
            found = outcome(functools.partial(ours.call, call, i))
            where = f"{program}, call {i} of {twice(history)}"
            if isinstance(truth, Exception):
                assert isinstance(found, Exception), f"{where}: raises {truth!r}, we do not"
                return  # what was half done may differ
            if isinstance(found, Exception):
                raise AssertionError(f"{where}: has an answer") from found
            told = difference(found, truth)
            assert told is None, f"{where}: {told}"


def number(f: Callable) -> Callable:
    """One number that depends on every result."""
    return lambda x, v: torch.stack([r.sum().sin().to(D) for r in f(x, v)]).sum()


@many
@given(programs, calls)
def test_a_history(program, history):
    compare(program, history, plainly, jit)


@many
@given(programs, calls)
def test_a_history_of_replayed_calls(program, history):
    compare(program, history, plainly, replayed)


@many
@given(programs, calls)
def test_a_history_of_gradients(program, history):
    def wrap(f: Callable) -> Callable:
        return lambda x, v: [*grad(number(f), (0, 1))(x, v)]

    compare(program, history, wrap, jit)


@many
@given(programs, calls)
def test_a_history_of_mapped_calls(program, history):
    def wrap(f: Callable) -> Callable:
        def mapped(x: Tensor, v: Tensor) -> list[Tensor]:
            xs, vs = torch.stack([x, 2 * x]), torch.stack([v, 3 * v])
            return vmap(f, randomness="different")(xs, vs)

        return mapped

    compare(program, history, wrap, jit)


@many
@given(programs, calls)
def test_a_history_of_compiled_calls(stand_in, program, history):
    compare(program, history, plainly, functools.partial(jit, backend="inductor"))
