"""Many replayed calls leave Python's live objects, and the process's memory, as they are.

FORALL_CALLS says how many calls (1000); 100 000 take about a quarter of an hour.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from forall import config, grad, jit, vmap

CALLS = int(os.environ.get("FORALL_CALLS", "1000"))
X = torch.linspace(0.1, 0.7, 6).reshape(2, 3)
WAYS: dict[str, tuple[Callable[[], Callable[[int], object]], int]] = {}


def way(every: int = 1) -> Callable:
    """A way to call a recorded function, whose i-th call is made ``CALLS / every`` times."""

    def note(make: Callable[[], Callable[[int], object]]) -> None:
        WAYS[make.__name__] = make, every

    return note


@way()
def plain():
    w = torch.ones(3)
    f = jit(vmap(lambda x: {"y": (x * w).sin(), "n": 1}))
    return lambda i: f(X)


@way()
def with_a_derivative_outside():
    f = jit(lambda x, w: (x * w).sin().exp())
    w = torch.ones(3, requires_grad=True)

    def call(i):
        f(X, w).sum().backward()
        assert w.grad is not None
        w.grad = None

    return call


@way()
def with_a_derivative_that_nobody_asks_for():
    f = jit(lambda x, w: (x * w).sin().exp())
    w = torch.ones(3, requires_grad=True)
    return lambda i: f(X, w)


@way(4)
def with_a_second_derivative():
    f = jit(lambda w: (w.sin() * w).sum())
    w = torch.ones(3, requires_grad=True)

    def call(i):
        (g,) = torch.autograd.grad(f(w), w, create_graph=True)
        torch.autograd.grad(g.sum(), w)

    return call


@way()
def with_draws():
    f = jit(vmap(lambda x: torch.dropout(x, 0.5, True), randomness="different"))
    w = torch.ones(3, requires_grad=True)

    def call(i):
        f(X)
        f(X * w).sum().backward()
        w.grad = None

    return call


@way()
def written_arguments():
    f = jit(lambda x, out: out.copy_(x.sin()))
    out = torch.zeros(2, 3)
    return lambda i: f(X, out)


@way()
def a_capture_with_other_numbers():
    w = torch.ones(3)
    f = jit(grad(lambda x: (x * w).sum()))

    def call(i):
        w.fill_(i)
        f(X)

    return call


@way(40)
def a_capture_replaced():
    home = SimpleNamespace(w=torch.ones(3))
    f = jit(lambda x: (x * home.w).sin())

    def call(i):
        home.w = torch.full((3,), float(i), requires_grad=i % 2 == 0)
        f(X)

    return call


@way(40)
def more_kinds_than_are_kept():
    f = jit(lambda x, n: (x * n).sin())
    w = torch.ones((), requires_grad=True)
    return lambda i: (f(torch.ones(1 + i % 100), 2.0), f(w * torch.ones(3), i % 100))


@way(40)
def numbers_that_never_come_again():
    f = jit(lambda x, n: x * n, static_argnums=1)
    return lambda i: f(X, float(i))


@way(40)
def a_function_recorded_and_dropped():
    def call(i):
        w = torch.ones(3, requires_grad=True)
        f = jit(lambda x: (x * w).sin())
        for _ in range(2):
            f(X).sum().backward()

    return call


@way(10)
def what_is_not_recorded():
    f = jit(lambda x: x * x.sum().item())
    return lambda i: f(X)


@way(40)
def state_that_always_changes():
    home = SimpleNamespace(count=0)

    def counting(x):
        home.count += 1
        return x * home.count

    f = jit(counting)
    return lambda i: f(torch.ones(1 + i % 50))


@way(10)
def inside_another_transform():
    f = jit(lambda x: (x * x).sum())
    return lambda i: vmap(grad(f))(X)


@way(40)
def an_error_while_recording():
    f = jit(lambda x: x @ torch.ones(7))

    def call(i):
        with pytest.raises(RuntimeError):
            f(X)

    return call


@way()
def an_error_in_a_replayed_call():
    f = jit(lambda x, n: x[n])
    f(X, torch.tensor(0))

    def call(i):
        with pytest.raises(IndexError):
            f(X, torch.tensor(9))

    return call


def resident() -> int:
    """Bytes of memory that the process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def living() -> int:
    """How many objects the collector knows. A pass of it forgets one layer of nested tuples."""
    for _ in range(4):
        gc.collect()
    return len(gc.get_objects())


@pytest.mark.sweep(3)
@pytest.mark.filterwarnings("ignore:jit:forall.PerformanceWarning")
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("name", WAYS)
def test_nothing_is_kept(name, monkeypatch):
    monkeypatch.setattr(config, "patience", 0)  # what is replayed is recorded at once
    make, every = WAYS[name]
    call, calls = make(), max(CALLS // every, 200)
    for i in range(calls):  # what these calls make once is made
        call(i)
    objects, memory = living(), resident()
    for i in range(calls):
        call(calls + i)
    assert living() - objects < calls / 10
    assert resident() - memory < 8e6
