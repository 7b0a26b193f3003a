"""Torch's own compilers. Nothing here is imported before somebody asks for one of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, cast

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def no_inductor() -> str | None:
    """What this machine lacks to run what inductor makes."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except (InvalidCxxCompiler, RuntimeError):
        return "a C++ compiler that works"
    return None


def no_graphs() -> str | None:
    """What it lacks to run graphs of CUDA's."""
    return None if torch.cuda.is_available() else "a CUDA device"


def by_inductor(program: torch.fx.GraphModule, examples: Sequence[torch.Tensor]) -> Callable:
    """A function of tensors like these. It writes into them where the program does.

    It is compiled in a thread of its own: grad mode, autocast and what is excluded from dispatch
    belong to a thread, and the compiler wants them as they are at the start.
    """

    def compiled() -> Callable:
        from torch._inductor import compile as compile_

        with torch.no_grad():
            return cast("Callable", compile_(program, [*examples]))

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(compiled).result()


def by_graph(
    program: Callable, examples: Sequence[torch.Tensor], written: Sequence[int]
) -> Callable:
    """The same, recorded on the device once. A call copies its tensors there, and results back."""
    places = [_copy(t) for t in examples]

    def given(tensors: Sequence[torch.Tensor]) -> None:
        for place, t in zip(places, tensors, strict=True):
            place.copy_(t)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # what libraries set up with their first calls is no part of it
            given(examples)
            program(*places)
        given(examples)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = program(*places)

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given(tensors)
        graph.replay()
        for i in written:
            tensors[i].copy_(places[i])
        return tuple(y.clone() for y in made)

    return run


def _copy(t: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t)
