"""The plot of an explanation: which examples took each step, by matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._compat.documented_error import documented_error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forall._compat.call_site import SourceLine
    from forall._divergence.report_records import Step

# Colours for the colour-blind (Okabe and Ito, 2008); they repeat from the first.
COLOURS = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#555555",
)  # fmt: skip
NOBODY = "#F2F2F2"


def draw_explanation(title: str, examples: int, steps: Sequence[Step], path: Any) -> Any:
    """Return a figure; with a ``path``, write it there and return the path."""
    try:
        from matplotlib import colors, figure
    except ImportError:
        raise documented_error(ImportError, "missing-package")(
            "Explanation.plot(): it draws with matplotlib, which is not installed.\n"
            "Install it (pip install matplotlib), or print the explanation."
        ) from None
    places = sorted({step.place for step in steps})
    made = figure.Figure(figsize=(9, 5 + 0.25 * len(places)), layout="constrained", dpi=130)
    axes = made.subplots()
    axes.set_title(title)
    axes.set_xlabel("step: one test on values, in the order of execution")
    axes.set_ylabel("example")
    if not steps:
        axes.text(0.5, 0.5, "no test on values", ha="center", transform=axes.transAxes)
    else:
        shades = [NOBODY, *(COLOURS[n % len(COLOURS)] for n in range(len(places)))]
        norm = colors.BoundaryNorm([n - 0.5 for n in range(len(shades) + 1)], len(shades))
        axes.imshow(
            _make_step_table(examples, steps, places),
            cmap=colors.ListedColormap(shades),
            norm=norm,
            aspect="auto",
            interpolation="nearest",
            extent=(0.5, len(steps) + 0.5, examples - 0.5, -0.5),
        )
        for axis in (axes.xaxis, axes.yaxis):
            axis.get_major_locator().set_params(integer=True)
        _add_legend(made, places, shades, steps)
    if path is None:
        return made
    made.savefig(path)
    return path


def _make_step_table(examples: int, steps: Sequence[Step], places: list[SourceLine]) -> Any:
    """Return a table (examples, steps) of the number of the line, from 1, that examples take."""
    number = {place: n for n, place in enumerate(places, 1)}
    table = torch.zeros((examples, len(steps)), dtype=torch.uint8, device="cpu")
    for column, step in enumerate(steps):
        table[[*step.examples], column] = number[step.place]
    return table.numpy()


def _add_legend(
    made: Any, places: list[SourceLine], shades: list[str], steps: Sequence[Any]
) -> None:
    from matplotlib.patches import Patch

    times = [sum(step.place == place for step in steps) for place in places]
    handles = [
        Patch(
            color=shade,
            label=f"{place.near()}   {clip_text(place.text())}   {format_count(n, 'step')}",
        )
        for place, shade, n in zip(places, shades[1:], times, strict=True)
    ]
    handles.append(Patch(facecolor=shades[0], edgecolor="#AAAAAA", label="does not run"))
    made.legend(
        handles=handles,
        loc="outside lower center",
        frameon=False,
        prop={"family": "monospace", "size": 8},
    )


def format_count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def clip_text(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
