"""Turning measurements into a table of ratios."""

import os
import platform
import statistics
from collections.abc import Sequence

import torch

from measure import MEMORY_ROUNDS
from registry import Quantity, Workload

Row = tuple[Workload, list[tuple[float, ...]]]

# Positions in registry.NAMES: what is divided by what.
RATIOS = {
    "forall / torch.func": (0, 1),
    "forall / hand-written": (0, 2),
    "torch.func / hand-written": (1, 2),
}


def ratios(measured: Sequence[tuple[float, ...]], above: int, below: int) -> list[float]:
    """One ratio per round: what disturbs a whole round cancels before the median is taken."""
    return [sample[above] / sample[below] for sample in measured]


def quartiles(values: list[float]) -> str:
    """The middle half of the rounds, telling noise from a difference."""
    if len(values) < 2:
        return "-"
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{low:.2f} to {high:.2f}"


def header(device: torch.device, rounds: int) -> list[str]:
    lines = [
        f"- torch {torch.__version__}, Python {platform.python_version()}",
        f"- {os.cpu_count()} CPUs, {torch.get_num_threads()} threads used by torch",
        f"- device: {device.type}",
        f"- {rounds} rounds (peak memory: {min(rounds, MEMORY_ROUNDS)}), all contestants in each",
    ]
    if device.type == "cuda":
        lines[2] += f" ({torch.cuda.get_device_name(device)})"
    return lines


def table(rows: Sequence[Row]) -> list[str]:
    columns = ["workload", *RATIOS, "quartiles of forall / torch.func", "what it does"]
    lines = [
        "| " + " | ".join(columns) + " |",
        "| --- |" + " ---: |" * (len(columns) - 2) + " --- |",
    ]
    for workload, measured in rows:
        medians = [statistics.median(ratios(measured, *pair)) for pair in RATIOS.values()]
        cells = [workload.name, *(f"{value:.2f}" for value in medians)]
        cells += [quartiles(ratios(measured, 0, 1)), workload.summary]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def section(title: str, quantity: Quantity, rows: Sequence[Row]) -> list[str]:
    chosen = [row for row in rows if row[0].quantity == quantity]
    return ["", f"## {title}", "", *table(chosen)] if chosen else []


def render(rows: Sequence[Row], device: torch.device, rounds: int) -> str:
    lines = [
        "# Benchmark results",
        "",
        "Written by `make bench`. Every figure is a ratio: the median over rounds of one",
        "contestant's measurement divided by another's in the same round. Below 1 the first-named",
        "contestant is the faster, or the more economical. Before anything is measured, all three",
        "have to agree in values.",
        "",
        *header(device, rounds),
        *section("Time", "time", rows),
        *section("Peak memory", "peak memory", rows),
    ]
    return "\n".join(lines) + "\n"
