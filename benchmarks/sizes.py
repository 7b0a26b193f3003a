"""How the ratios go with the number of examples, and with the width of what is mapped."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from measure import make, memory_rounds, time_rounds
from memory import peak_bytes
from registry import JIT, REPLAYED, Contestants, Workload
from report import lined, number, ratios
from workloads import hessians, per_example, pointwise

BATCHES, BATCH = (1, 4, 16, 64, 256, 1024, 4096), 64
WIDTHS = (8, 32, 128, 512, 1024)
ROUNDS = 15
MOST_BYTES, MOST_SECONDS = 2**30, 2.0

# Places of programs: what is divided by what.
TIMES = ((0, 1), (JIT, 2), (REPLAYED, 2))
MEMORIES = ((0, 2), (JIT, 2))
RECORDED = ("jit", "replayed")  # as in TIMES


class Series(NamedTuple):
    """One workload at each of some sizes."""

    what: str
    sizes: tuple[int, ...]
    build: Callable[[torch.device, int], Contestants]


SERIES = (
    Series(
        "`vmap` over 50 pointwise operations, N examples of shape (8,)",
        BATCHES,
        lambda device, n: pointwise.of_size(device, n, 8),
    ),
    Series(
        "per-example gradients of a 64-64-10 perceptron, N examples",
        BATCHES,
        lambda device, n: per_example.perceptron(device, n, 64, 64),
    ),
    Series(
        "`vmap(hessian)` of a 16-32-1 perceptron at N points",
        BATCHES,
        hessians.at_points,
    ),
    Series(
        "the same; by hand `torch.einsum` sums the rank-one matrices of the hidden units",
        BATCHES,
        partial(hessians.at_points, by_einsum=True),
    ),
    Series(
        "the same with `jit(fastmath=True)`, against the first program by hand",
        BATCHES,
        partial(hessians.at_points, fastmath=True),
    ),
    Series(
        f"`vmap` over 50 pointwise operations, {BATCH} examples of shape (N,)",
        WIDTHS,
        lambda device, n: pointwise.of_size(device, BATCH, n),
    ),
    Series(
        f"per-example gradients of an N-N-10 perceptron, {BATCH} examples",
        WIDTHS,
        lambda device, n: per_example.perceptron(device, BATCH, n, n),
    ),
)


class Point(NamedTuple):
    """The ratios at one size; nan for what is not recorded."""

    size: int
    times: tuple[float, ...]
    memories: tuple[float, ...]


def too_much(contestants: Contestants, device: torch.device) -> bool:
    """Whether a call takes too long, or too much memory."""
    for program, _ in contestants.all:
        if program is None:
            continue
        started = time.perf_counter()
        program()
        if time.perf_counter() - started > MOST_SECONDS:
            return True
    return peak_bytes(contestants.programs[-1], device) > MOST_BYTES


def point(series: Series, size: int, rounds: int, device: torch.device) -> Point | None:
    """The ratios at one size, None where that is too large."""
    workload = Workload(series.what, series.what, "time", lambda device: series.build(device, size))
    contestants = make(workload, device)
    if too_much(contestants, device):
        return None
    timed = time_rounds(contestants, rounds, 0.01, device)
    held = memory_rounds(contestants, 1, device)
    return Point(
        size,
        tuple(statistics.median(ratios(timed, *pair)) for pair in TIMES),
        tuple(statistics.median(ratios(held, *pair)) for pair in MEMORIES),
    )


def measured(series: Series, rounds: int, device: torch.device) -> list[Point]:
    points = []
    for size in series.sizes:
        found = point(series, size, rounds, device)
        if found is None:
            break
        points.append(found)
        print(lined(cells(found), [])[0], flush=True)
    return points


def cells(point: Point) -> list[str]:
    return [f"{point.size}", *map(number, (*point.times, *point.memories))]


def answer(yes: bool) -> str:
    return "yes" if yes else "**no**"


def growth(points: Sequence[Point]) -> str:
    """Whether the ratio of time is no larger at the largest size than at 64, or the first above."""
    first = next((p for p in points if p.size >= BATCH), points[-1])
    last = points[-1]
    said = []
    for name, before, after in zip(RECORDED, first.times[1:], last.times[1:], strict=True):
        if math.isnan(before):
            continue
        verdict = answer(after <= before)
        if before < after <= 1:
            verdict += ", but it stays below 1"
        said.append(
            f"{name} {verdict} ({number(before)} at {first.size}, {number(after)} at {last.size})"
        )
    return f"- The time grows no faster than that of the program by hand: {'; '.join(said)}."


def room(points: Sequence[Point]) -> str:
    """Whether memory is within 10 % of the hand-written program's at every size."""
    said = []
    for i, name in enumerate(("forall", "jit")):
        most = max(points, key=lambda p: p.memories[i])
        if not math.isnan(most.memories[i]):
            within = answer(most.memories[i] <= 1.1)
            said.append(f"{name} {within} (at most {number(most.memories[i])}, at {most.size})")
    return f"- Peak memory is within 10 % of it at every size: {'; '.join(said)}."


def section(rounds: int, device: torch.device) -> list[str]:
    titles = [
        "N",
        "time: forall / torch.func",
        "jit / hand-written",
        "replayed / hand-written",
        "memory: forall / hand-written",
        "jit / hand-written",
    ]
    lines = ["", "## Sizes"]
    for series in SERIES:
        print(series.what, flush=True)
        points = measured(series, min(rounds, ROUNDS), device)
        lines += ["", f"### {series.what[0].upper()}{series.what[1:]}", ""]
        lines += lined(titles, [*map(cells, points)])
        left = [f"{size}" for size in series.sizes[len(points) :]]
        if left:
            lines += ["", f"Left out, as a call takes over 1 GB or 2 s: {', '.join(left)}."]
        if points:
            lines += ["", growth(points), room(points)]
    return lines
