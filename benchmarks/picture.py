"""The ratios to torch.func of every row, drawn on a logarithmic axis."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from registry import FALLBACKS, JIT, REPLAYED
from report import Row, ratios

SHOWN = (("as it is", 0, "#9aa5b1"), ("replayed", REPLAYED, "#2f7fb8"), ("jit", JIT, "#e08214"))
BAR = 0.27  # of the height of a row

Bars = tuple[str, list[float]]


def bars(rows: Sequence[Row]) -> list[Bars]:
    """A name and the medians of each workload; of the many like each other, geometric means."""
    alone, together = [], []
    for workload, measured in rows:
        if workload.quantity == "time" and workload.names[:2] == ("forall", "torch.func"):
            found = [statistics.median(ratios(measured, place, 1)) for _, place, _ in SHOWN]
            many = workload.name.startswith(FALLBACKS)
            (together if many else alone).append((workload.name, found))
    if together:
        columns = zip(*(found for _, found in together), strict=True)
        known = [[v for v in column if not math.isnan(v)] for column in columns]
        means = [statistics.geometric_mean(column) if column else math.nan for column in known]
        alone.append((f"{FALLBACKS}* ({len(together)} rows, mean)", means))
    return sorted(alone, key=lambda bar: min(v for v in bar[1] if not math.isnan(v)))


def draw(rows: Sequence[Row], path: Path) -> str:
    """Write the picture, and say how it is shown; or why there is none."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator, NullLocator
    except ImportError:
        return "\nNo picture: matplotlib is not installed."
    named = bars(rows)
    if not named:
        return ""
    figure = Figure(figsize=(9, 1.4 + 0.36 * len(named)), layout="constrained")
    axes = figure.subplots()
    for i, (label, _, color) in enumerate(SHOWN):
        for y, (_, found) in enumerate(named):
            value = found[i]
            if not math.isnan(value):
                # From 1, so that what is longer is further from torch.func, to either side.
                place = y + (i - 1) * BAR
                name = label if label not in axes.get_legend_handles_labels()[1] else None
                axes.barh(place, value - 1, BAR, left=1, color=color, label=name)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.set_yticks(range(len(named)), [name for name, _ in named])
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 3), numticks=30))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(axis="x", linewidth=0.5, alpha=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel(
        "time of forall / time of torch.func (left of 1: forall is faster; "
        "no bar: not recorded, or not replayed)"
    )
    figure.legend(loc="outside upper right", ncols=len(SHOWN))
    figure.savefig(path, dpi=120)
    return f"\n![The ratios to torch.func of every row]({path.name})"
