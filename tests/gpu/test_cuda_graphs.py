"""``jit(f, backend="cudagraphs")`` on a CUDA device: devices, streams, threads, nested graphs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from forall import jit

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def f(x):
    return (x.sin() * 2).exp().cumsum(0)


def made(device="cuda"):
    g, x = jit(f, backend="cudagraphs"), torch.linspace(0, 1, 1000, device=device)
    for _ in range(3):
        torch.testing.assert_close(g(x), f(x))
    return g, x


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_graph_is_of_the_device_of_its_tensors():
    with torch.cuda.device(0):
        g, x = made("cuda:1")
        assert g(x).device == torch.device("cuda", 1)
        made("cuda:0")


def test_calls_on_two_streams_do_not_meet():
    g, x = made()
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    found = []
    for i in range(200):
        with torch.cuda.stream(streams[i % 2]):
            found.append((x + i, g(x + i)))
    torch.cuda.synchronize()
    for given, result in found:
        torch.testing.assert_close(result, f(given))


def test_calls_of_several_threads_do_not_meet():
    g, x = made()

    def calls(n):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            stream.wait_stream(torch.cuda.default_stream())
            found = [(x + n * i, g(x + n * i)) for i in range(50)]
        stream.synchronize()
        return found

    with ThreadPoolExecutor(4) as threads:
        for found in threads.map(calls, range(4)):
            for given, result in found:
                torch.testing.assert_close(result, f(given))


def test_a_graph_is_captured_while_another_thread_calls_cuda():
    stop = False

    def others():
        while not stop:
            torch.ones(10, device="cuda").sum().item()

    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(others)
        try:
            for _ in range(5):
                made()
        finally:
            stop = True
        running.result()


@pytest.mark.parametrize("is_warm", [True, False])
def test_within_a_graph_of_the_users_there_is_no_other(is_warm):
    g = jit(f, backend="cudagraphs")
    x = torch.linspace(0, 1, 1000, device="cuda")
    for _ in range(3 if is_warm else 1):
        g(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = g(x)
    for i in range(3):
        x.fill_(i)
        graph.replay()
        torch.testing.assert_close(y, f(x))


def test_precision_of_products_is_that_of_each_call():
    a = torch.randn(512, 512, device="cuda")
    g = jit(lambda a: (a @ a).neg(), backend="cudagraphs")
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("highest", "high", "highest", "high"):
            torch.set_float32_matmul_precision(precision)
            for _ in range(3):
                assert torch.equal(g(a), (a @ a).neg())
    finally:
        torch.set_float32_matmul_precision(before)
    assert g.cache_info().currsize == 1


def test_constants_of_a_program_are_there_on_every_stream():
    wide = torch.arange(2_000_000).tolist()

    def shifted(x):
        return x + torch.tensor(wide, device="cuda", dtype=torch.float32)

    for _ in range(5):
        g = jit(shifted)
        x = torch.zeros(len(wide), device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            g(x)
        other = torch.cuda.Stream()
        with torch.cuda.stream(other):
            y = g(x)
        other.synchronize()
        assert torch.equal(y, torch.arange(float(len(wide)), device="cuda"))
