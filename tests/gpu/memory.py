"""Memory: budgets, recovery where it does not suffice, and what a call leaves behind."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch import Tensor

import forall
from forall import grad, jacfwd, jacrev, vmap
from gpu.checks import (
    Check,
    Skipped,
    assert_same,
    cross_entropy,
    numbers,
    only_cuda,
    parameters,
    perceptron,
)

EXAMPLES, WIDTH = 1024, 64


def checks(device: torch.device) -> list[Check]:
    cases: dict[str, Callable[[torch.device], str | None]] = {
        "a budget of bytes": a_budget,
        "out of memory: halved until it fits": halved,
        "out of memory: rows and columns": rows_and_columns,
        "out of memory is raised where nobody asked for chunks": raised,
        "nothing is left after a call": nothing_is_left,
        "nothing is left after an error": nothing_is_left_after_an_error,
        "peak of per-example gradients": peak,
    }
    return [Check(name, lambda f=f: f(device)) for name, f in cases.items()]


def large(v: Tensor) -> Tensor:
    return (v[:, None] * v[None, :]).sin().cumsum(0).sum()


def inputs(device: torch.device, times: int = 1) -> Tensor:
    return numbers(device, EXAMPLES, WIDTH, dtype=torch.float32).repeat(times, 1)


def a_budget(device: torch.device) -> str | None:
    x, budget = inputs(device), 16 << 20
    truth = vmap(large, chunk_size=16)(x)
    limited = vmap(large, chunk_size=forall.Chunks(memory_budget=budget))
    if device.type != "cuda":
        assert_same(limited(x), truth)
        return None
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    assert_same(limited(x), truth)
    taken = torch.cuda.max_memory_allocated(device) - before
    assert taken < 2.5 * budget, f"{taken >> 20} MB of {budget >> 20}"
    return f"{taken / 2**20:.1f} MB of {budget >> 20}"


class Room:
    """Limits what this process may take of the device's memory to so much more than it has."""

    def __init__(self, device: torch.device, more: int) -> None:
        self.device, self.more = device, more

    def __enter__(self) -> None:
        gc.collect()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        whole = torch.cuda.get_device_properties(self.device).total_memory
        room = torch.cuda.memory_reserved(self.device) + self.more
        torch.cuda.set_per_process_memory_fraction(min(1.0, room / whole), self.device)

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_per_process_memory_fraction(1.0, self.device)
        torch.cuda.empty_cache()


def must_not_fit(run: Callable[[], object]) -> None:
    try:
        run()
    except torch.OutOfMemoryError:
        return
    raise Skipped("it fits into the memory")


def halved(device: torch.device) -> str:
    only_cuda(device)
    x = inputs(device, 8)
    truth = vmap(large, chunk_size=64)(x)
    seen = torch.zeros((), device=device)

    def counted(v: Tensor) -> Tensor:
        seen.add_(1)
        return large(v)

    with Room(device, 24 << 20):
        must_not_fit(lambda: vmap(large)(x))
        found = vmap(counted, chunk_size="auto")(x)
        slopes = vmap(grad(large), chunk_size="auto")(x[:2048])
    assert_same(found, truth)
    assert_same(slopes, vmap(grad(large), chunk_size=64)(x[:2048]))
    assert seen.item() == len(x), f"{seen.item():.0f} examples counted instead of {len(x)}"
    return f"{len(x)} examples, each counted once"


def rows_and_columns(device: torch.device) -> None:
    only_cuda(device)
    x = numbers(device, 2048, dtype=torch.float32)
    f = lambda x: (x.outer(x[:512]).sin() @ x[:512]).cumsum(0)  # noqa: E731
    for jacobian in (jacrev, jacfwd):
        truth = jacobian(f, chunk_size=16)(x)
        with Room(device, 200 << 20):
            must_not_fit(lambda jacobian=jacobian: jacobian(f)(x))
            found = jacobian(f, chunk_size="auto")(x)
        assert_same(found, truth, jacobian.__name__)


def raised(device: torch.device) -> None:
    only_cuda(device)
    x = inputs(device, 8)
    with Room(device, 24 << 20):
        must_not_fit(lambda: [large(v) for v in [x[:, :, None] * x[:, None, :]]])
        try:
            vmap(large)(x)
        except torch.OutOfMemoryError:
            pass
        else:
            raise AssertionError("nothing was raised")
    assert_same(vmap(large)(x[:64]), vmap(large, chunk_size=8)(x[:64]), "a call after it")


def growth(device: torch.device, call: Callable[[], object]) -> int:
    """Bytes that five calls leave, without the garbage collector."""
    call()
    gc.collect()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    gc.disable()
    try:
        for _ in range(5):
            call()
        return torch.cuda.memory_allocated(device) - before
    finally:
        gc.enable()


def nothing_is_left(device: torch.device) -> None:
    only_cuda(device)
    x = inputs(device)
    for name, f in {
        "vmap of grad": vmap(grad(large)),
        "vmap of jacrev": lambda x: vmap(jacrev(lambda v: v.sin() * v.sum()))(x),
        "diverging": vmap(lambda v: v.sin() if v.sum() > 0 else v.cos()),
    }.items():
        grown = growth(device, lambda f=f: f(x))
        assert grown < 1 << 20, f"{name}: {grown} bytes after 5 calls"


def nothing_is_left_after_an_error(device: torch.device) -> None:
    only_cuda(device)
    x = inputs(device)

    def fails(v: Tensor) -> Tensor:
        raise ValueError(str(large(v).shape))

    def call() -> None:
        try:
            vmap(grad(fails))(x)
        except ValueError:
            return

    grown = growth(device, call)
    assert grown < 1 << 20, f"{grown} bytes after 5 calls"


def peak(device: torch.device) -> str:
    only_cuda(device)
    net = perceptron(device, width=256, dtype=torch.float32)
    xs = numbers(device, 512, 16, dtype=torch.float32)
    labels, params = torch.arange(512, device=device) % 10, parameters(net)
    peaks = []
    for api in (torch.func, forall):
        f = api.vmap(api.grad(cross_entropy(net)), in_dims=(None, 0, 0))
        f(params, xs, labels)
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        f(params, xs, labels)
        peaks.append(torch.cuda.max_memory_allocated(device) - before)
    ratio = peaks[1] / peaks[0]
    return f"{ratio:.2f} of torch.func's"
