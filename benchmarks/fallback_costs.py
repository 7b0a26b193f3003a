"""Where the time of the rows `fallback-*` goes, in microseconds of one thread's processor.

    python benchmarks/fallback_costs.py [row ...]

Beside forall and torch.func: the same transform of `x * 2`, which is the price of a call, and the
operators on plain tensors that the call comes to, made again without a transform. What is left is
the price of mapping each of them. The reasons in `workloads.fallbacks` are read off here.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import forall
from measure import keep_memory
from workloads.fallbacks import ROWS, build, taken


class Recorded(TorchDispatchMode):
    """The operators that reach plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    @torch.no_grad()
    def again(self) -> None:
        for func, args, kwargs in self.calls:
            func(*args, **kwargs)


def least(programs: list[Callable[[], Any]], seconds: float = 1.5, sample: float = 0.0015):
    """Microseconds of each, the least of samples taken in turns."""
    repetitions = []
    for program in programs:
        program()
        started = time.thread_time()
        program()
        repetitions.append(max(1, int(sample / max(time.thread_time() - started, 1e-6))))
    best = [float("inf")] * len(programs)
    stop = time.monotonic() + seconds
    while time.monotonic() < stop:
        for i, program in enumerate(programs):
            started = time.thread_time()
            for _ in range(repetitions[i]):
                program()
            best[i] = min(best[i], (time.thread_time() - started) / repetitions[i])
    return [1e6 * t for t in best]


def programs(name: str) -> tuple[list[Callable[[], Any]], int]:
    """Forall, torch.func, the price of a call, the operators; and how many these are."""
    torch.manual_seed(0)
    row = ROWS[name]
    stacks = tuple(make() for make in row.stacks)
    twice = forall.vmap(taken(forall, row._replace(f=lambda x, *_: x * 2)))
    ours, theirs, _ = build(row, torch.device("cpu")).programs
    ours()
    with torch.no_grad(), Recorded() as recorded:
        ours()
    return [ours, theirs, lambda: twice(*stacks), recorded.again], len(recorded.calls)


def main(names: list[str]) -> None:
    keep_memory()
    torch.set_num_threads(1)
    print("ratio  forall  torch.func  one call  operators  mapping  row (operators)")
    for name in names or ROWS:
        contestants, count = programs(name)
        mine, theirs, call, operators = least(contestants)
        left = mine - call - operators
        print(
            f"{mine / theirs:5.2f} {mine:7.0f} {theirs:11.0f} {call:9.0f} {operators:10.0f} "
            f"{left:8.0f}  {name} ({count})",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
