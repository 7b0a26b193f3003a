"""Streams that the caller chose, and CUDA graphs of the caller's own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import forall
from forall import grad, jit, vmap
from gpu.checks import Check, assert_same, numbers, only_cuda
from gpu.threads import Cubed, rows
from oracle import loop


def checks(device: torch.device) -> list[Check]:
    cases: dict[str, Callable[[torch.device], None]] = {
        "a side stream while the main one is busy": a_side_stream,
        "derivatives on a side stream": derivatives,
        "recorded on one stream, called on another": another_stream,
        "cudagraphs: two streams call one program": lambda d: two_streams(d, "cudagraphs"),
        "python: two streams call one program": lambda d: two_streams(d, "python"),
        "cudagraphs: two threads call one program": two_threads,
        "a call within the caller's own CUDA graph": within_a_graph,
        "jit within the caller's own CUDA graph": jit_within_a_graph,
    }

    def of(f: Callable[[torch.device], None]) -> Callable[[], None]:
        def run() -> None:
            only_cuda(device)
            f(device)

        return run

    return [Check(name, of(f)) for name, f in cases.items()]


def busy(device: torch.device) -> Callable[[], None]:
    """What keeps the current stream at work for some milliseconds."""
    large = numbers(device, 2048, 2048, dtype=torch.float32)

    def work() -> None:
        for _ in range(4):
            large @ large

    return work


def chain(x: Tensor) -> Tensor:
    return ((x * 2).sin() + (x * 3).cos()).exp().tanh().sum(-1)


def a_side_stream(device: torch.device) -> None:
    """Memory that a program uses again must not be written to while another stream reads it."""
    mapped = vmap(chain)
    recorded = jit(mapped)
    x = numbers(device, 64, 4096, dtype=torch.float32)
    truth, work = mapped(x), busy(device)
    recorded(x), recorded(x)
    side = torch.cuda.Stream(device)
    found = []
    for _ in range(10):
        work()
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            found += [recorded(x), mapped(x)]
    torch.cuda.current_stream(device).wait_stream(side)
    for y in found:
        assert_same(y, truth)


def derivatives(device: torch.device) -> None:
    xs = numbers(device, 4, 3)
    w = numbers(device, 3, seed=1)
    f = lambda x: Cubed.apply(x * w)  # noqa: E731
    truth = loop(rows(f))(xs)
    torch.cuda.synchronize(device)
    side = torch.cuda.Stream(device)
    with torch.cuda.stream(side):
        found = [vmap(forall.jacrev(f))(xs) for _ in range(3)]
    side.synchronize()
    for y in found:
        assert_same(y, truth)


def another_stream(device: torch.device) -> None:
    """Constants of a program are made on the stream on which it was recorded."""
    f = jit(vmap(lambda x: x * torch.arange(512, device=device) + torch.ones(512, device=device)))
    x = numbers(device, 8, 512)
    truth, work = x * torch.arange(512, device=device) + 1, busy(device)
    torch.cuda.synchronize(device)
    first, second = torch.cuda.Stream(device), torch.cuda.Stream(device)
    found = []
    with torch.cuda.stream(first):
        work()
        found += [f(x), f(x)]
    with torch.cuda.stream(second):
        found += [f(x), f(x)]
    torch.cuda.synchronize(device)
    for y in found:
        assert_same(y, truth)


def two_streams(device: torch.device, backend: str) -> None:
    of_all: Any = vmap(grad(lambda x: x.sin().square().sum()))
    recorded = jit(of_all, backend=backend)  # pyright: ignore[reportArgumentType]
    given = [numbers(device, 64, 1024, seed=i) for i in range(6)] * 5
    recorded(given[0]), recorded(given[0])
    lanes = [torch.cuda.Stream(device) for _ in range(2)]
    work = busy(device)
    torch.cuda.synchronize(device)
    found = []
    for i, x in enumerate(given):
        with torch.cuda.stream(lanes[i % 2]):
            if i % 3 == 0:
                work()
            found.append(recorded(x))
    torch.cuda.synchronize(device)
    for x, y in zip(given, found, strict=True):
        assert_same(y, 2 * x.sin() * x.cos())


def two_threads(device: torch.device) -> None:
    """The first calls, which capture, in one thread while another one calls too."""
    recorded = jit(vmap(grad(lambda x: x.sin().square().sum())), backend="cudagraphs")
    given = [[numbers(device, 8 + i, 64, seed=i + 7 * t) for i in range(6)] for t in range(2)]
    found: list[list[Tensor]] = [[], []]
    raised: list[BaseException] = []

    def run(t: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream(device)):
                for x in given[t] * 4:
                    found[t].append(recorded(x))
                torch.cuda.current_stream(device).synchronize()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(t,)) for t in range(2)]
    torch.cuda.synchronize(device)
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if raised:
        raise raised[0]
    for t in range(2):
        for x, y in zip(given[t] * 4, found[t], strict=True):
            assert_same(y, 2 * x.sin() * x.cos())


def captured(device: torch.device, f: Callable[[Tensor], Tensor]) -> None:
    """Capture a call in a graph, and play that on other numbers."""
    x = numbers(device, 16, 64)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):
            f(x)
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = f(x)
    x.copy_(numbers(device, 16, 64, seed=9))
    graph.replay()
    assert_same(y, x.cos())


def within_a_graph(device: torch.device) -> None:
    captured(device, vmap(grad(lambda x: x.sin().sum())))


def jit_within_a_graph(device: torch.device) -> None:
    captured(device, jit(vmap(grad(lambda x: x.sin().sum()))))
    captured(device, jit(vmap(grad(lambda x: x.sin().sum())), backend="cudagraphs"))
