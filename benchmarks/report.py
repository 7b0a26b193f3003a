"""Turning measurements into a table of ratios."""

import contextlib
import math
import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from measure import MEMORY_ROUNDS
from registry import JIT, MORE, NAMES, REPLAYED, Quantity, Workload

Row = tuple[Workload, list[tuple[float, ...]]]

# Places in a workload's names: what is divided by what.
RATIOS = ((0, 1), (REPLAYED, 1), (JIT, 1), (0, 2), (REPLAYED, 2), (JIT, 2), (1, 2))


def ratios(measured: Sequence[tuple[float, ...]], above: int, below: int) -> list[float]:
    """One ratio per round: what disturbs a whole round cancels before the median is taken."""
    return [sample[above] / sample[below] for sample in measured]


def quartiles(values: list[float]) -> str:
    """The middle half of the rounds, telling noise from a difference."""
    if len(values) < 2:
        return "-"
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{number(low)} to {number(high)}"


def _make() -> str:
    """Whose CPUs these are, where the system tells: kernels differ by that."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return f" ({value.strip()})"
    return ""


def header(device: torch.device, rounds: int) -> list[str]:
    lines = [
        f"- torch {torch.__version__}, Python {platform.python_version()}",
        f"- {os.cpu_count()} CPUs{_make()}, {torch.get_num_threads()} threads used by torch",
        f"- device: {device.type}",
        f"- {rounds} rounds (peak memory: {min(rounds, MEMORY_ROUNDS)}), all contestants in each",
    ]
    if device.type == "cuda":
        lines[2] += f" ({torch.cuda.get_device_name(device)})"
    return lines


def ratio(workload: Workload, measured: Sequence[tuple[float, ...]], pair: tuple[int, int]) -> str:
    """The median, and behind it the limit where one is set; a dash without a recorded program."""
    median = statistics.median(ratios(measured, *pair))
    if math.isnan(median):
        return "-"
    above, below = pair
    if above == 0 and math.isnan(ratios(measured, REPLAYED, below)[0]):
        pair = REPLAYED, below  # what is not replayed is to be as fast as it is
    limit = f" (<= {workload.limits[pair]:g})" if pair in workload.limits else ""
    return number(median) + limit


def number(value: float) -> str:
    """Two decimals, more where they would be zeros, and a dash for what is not known."""
    if math.isnan(value):
        return "-"
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def table(rows: Sequence[Row]) -> list[str]:
    names = (*rows[0][0].names, *MORE)
    pairs = [
        pair
        for pair in RATIOS
        if not all(math.isnan(ratios(measured, *pair)[0]) for _, measured in rows)
    ]
    titles = [f"{names[above]} / {names[below]}" for above, below in pairs]
    cells = [
        [
            workload.name,
            *(ratio(workload, measured, pair) for pair in pairs),
            quartiles(ratios(measured, 0, 1)),
            workload.summary,
        ]
        for workload, measured in rows
    ]
    columns = ["workload", *titles, f"quartiles of {titles[0]}", "what it does"]
    return lined(columns, cells, said=1)


def lined(columns: Sequence[str], rows: Sequence[Sequence[str]], said: int = 0) -> list[str]:
    """A table: numbers to the right of the first column, and the `said` last ones are words."""
    rule = ["---", *["---:"] * (len(columns) - 1 - said), *["---"] * said]
    return ["| " + " | ".join(cells) + " |" for cells in (columns, rule, *rows)]


def mean(values: Iterable[float]) -> str:
    """The geometric mean of those that are known, a dash without any."""
    known = [v for v in values if not math.isnan(v)]
    return number(statistics.geometric_mean(known)) if known else "-"


def means(rows: Sequence[Row]) -> list[str]:
    """Geometric means over all rows that are timed against torch.func."""
    chosen = [measured for workload, measured in rows if is_row(workload, "time", NAMES)]
    titles, found = (*NAMES, *MORE), []
    for above, below in RATIOS:
        medians = [statistics.median(ratios(measured, above, below)) for measured in chosen]
        known = [m for m in medians if not math.isnan(m)]
        if known:
            found.append([f"{titles[above]} / {titles[below]}", mean(known), f"{len(known)}"])
    if not found:
        return []
    return [
        "",
        "## Time, all rows with a hand-written program together",
        "",
        *lined(["ratio", "geometric mean", "rows"], found),
    ]


def is_row(workload: Workload, quantity: Quantity, names: tuple[str, ...]) -> bool:
    return workload.quantity == quantity and workload.names == names


def opening(device: torch.device, rounds: int) -> list[str]:
    return [
        "# Benchmark results",
        "",
        "Written by `make bench`. Every figure is a ratio: the median over rounds of one",
        "contestant's measurement divided by another's in the same round. Below 1 the first-named",
        "contestant is the faster, or the more economical. Before anything is measured, all have",
        "to agree in values. A number in parentheses is the limit for a ratio. jit is the program",
        "of forall under `forall.jit`, where that can record it; replayed is the program as it is,",
        "with `forall.config.replay` on, where that replays anything. forall alone has it off.",
        "",
        *header(device, rounds),
    ]


def times(rows: Sequence[Row]) -> list[str]:
    """A table for each quantity and triple of contestants, in the order in which they come."""
    groups: dict[tuple[Quantity, tuple[str, ...]], list[Row]] = {}
    for row in rows:
        groups.setdefault((row[0].quantity, row[0].names), []).append(row)
    lines = []
    for (quantity, names), group in groups.items():
        title = f"{quantity.capitalize()}: {', '.join(names)}"
        lines += ["", f"## {title}", "", *table(group)]
    return [*lines, *means(rows)]
