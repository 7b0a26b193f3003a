"""torch's own compilers, which are imported when a caller needs one of them."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import TYPE_CHECKING, Any, cast

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


# By process id: a forked process has no threads.
_THREADS: dict[int, ThreadPoolExecutor] = {}


def find_inductor_obstacle() -> str | None:
    """Return what this machine lacks to run code of inductor's; None if it lacks nothing."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except (InvalidCxxCompiler, RuntimeError):
        return "a C++ compiler that works"
    return None


def find_cudagraph_obstacle() -> str | None:
    """Return what this machine lacks to run CUDA graphs; None if it lacks nothing."""
    return None if torch.cuda.is_available() else "a CUDA device"


def compile_by_inductor(
    program: torch.fx.GraphModule, examples: Sequence[torch.Tensor], *, writes: bool
) -> Callable:
    """Compile a program to a function of tensors like ``examples``, by inductor.

    The function writes into its arguments if the program does. The compiler runs in a thread of its
    own. It needs the initial values of grad mode, autocast and excluded dispatch keys, which belong
    to a thread.

    One thread serves all programs and does not end. In torch 2.10 and 2.11, built for CUDA but
    without a device, the compiler crashes in a second thread once the first has ended.
    """
    inside: list[Any] = []

    def compile_program() -> Callable:
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

        def record_inner(*args: Any, **kwargs: Any) -> Any:
            inside.append(compile_fx_inner(*args, **kwargs))
            return inside[-1]

        with torch.no_grad():
            return cast("Callable", compile_fx(program, [*examples], inner_compile=record_inner))

    process = os.getpid()
    if process not in _THREADS:
        _THREADS[process] = ThreadPoolExecutor(1)
    whole = _THREADS[process].submit(compile_program).result()
    # torch's wrapper around the generated code takes three quarters of a call of a few small
    # operators, and mostly does nothing. With writes, equal results would not prove that.
    lines = getattr(inside[0], "current_callable", None) if len(inside) == 1 else None
    if writes or lines is None:
        return whole

    def call_lines(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        return lines([*tensors])

    return call_lines if _have_same_results(call_lines, whole, examples) else whole


def _have_same_results(one: Callable, other: Callable, tensors: Sequence[torch.Tensor]) -> bool:
    """Return True if two functions return the same values with the same strides."""
    wanted = [*other(*tensors)]
    try:
        found = [*one(*tensors)]
    except Exception:  # noqa: BLE001 - it is asked for more, or for less
        return False
    return [*map(torch.Tensor.stride, found)] == [*map(torch.Tensor.stride, wanted)] and all(
        x.dtype == y.dtype and torch.allclose(x, y, 0, 0, equal_nan=True)
        for x, y in zip(found, wanted, strict=True)
    )


def is_capturing() -> bool:
    """Return True if a graph of the user's is being captured, which may hold no other."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def compile_by_cudagraph(
    program: Callable, examples: Sequence[torch.Tensor], written: Sequence[int]
) -> Callable:
    """Record a program as a CUDA graph. A call copies its tensors there, and the results back.

    The graph is of the tensors' device, and is captured while other threads may call CUDA. All
    calls share the memory that the graph reads: threads wait for each other's calls, streams for
    their work.
    """
    with torch.cuda.device(find_gpu(examples)):
        return _capture_graph(program, examples, written)


def find_gpu(tensors: Sequence[torch.Tensor]) -> torch.device:
    """Return the GPU that tensors are on; numbers that are constants may be on the CPU."""
    return next(t.device for t in tensors if t.is_cuda)


def _capture_graph(
    program: Callable, examples: Sequence[torch.Tensor], written: Sequence[int]
) -> Callable:
    places = [_copy(t) for t in examples]

    def copy_inputs(tensors: Sequence[torch.Tensor]) -> None:
        for place, t in zip(places, tensors, strict=True):
            place.copy_(t)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # so that the graph does not capture what libraries set up once
            copy_inputs(examples)
            program(*places)
        copy_inputs(examples)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        made = program(*places)
    torch.cuda.current_stream().wait_stream(stream)
    device, calls = torch.cuda.current_device(), Lock()
    last, done = torch.cuda.current_stream(), torch.cuda.Event()
    done.record()

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        nonlocal last
        with torch.cuda.device(device), calls:
            now = torch.cuda.current_stream()
            if now != last:
                now.wait_event(done)
                last = now
            copy_inputs(tensors)
            graph.replay()
            for i in written:
                tensors[i].copy_(places[i])
            results = tuple(y.clone() for y in made)
            done.record()
        return results

    return run


def _copy(t: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t)
