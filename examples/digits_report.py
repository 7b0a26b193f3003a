"""The table of times and the picture that the example ends with."""

import os
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import MultipleLocator, PercentFormatter

from digits_checks import Comparison
from digits_curvature import HessianResult, JacobianResult
from digits_data import CLASSES
from digits_ensemble import MEMBERS, PIXEL_NOISE, EnsembleResult
from digits_privacy import PrivacyResult

LOOP_COLOUR = "#6b7280"
TORCH_COLOUR = "#0072b2"
FORALL_COLOUR = "#d55e00"


def print_table(comparisons: list[Comparison], rounds: int) -> None:
    """Times of the three ways to do the same work, and their quotients."""
    heads = ("loop", "torch.func", "forall")
    quotients = (("loop", "torch.func"), ("loop", "forall"), ("torch.func", "forall"))
    print(f"\nmedians over {rounds} interleaved rounds, warm-up excluded: times and quotients")
    print(f"  {'':<30}" + "".join(f"{head:>13}" for head in heads), end="")
    print("".join(f"{first + '/' + second:>19}" for first, second in quotients))
    for comparison in comparisons:
        times = "".join(f"{1e3 * comparison.median(head):>10.1f} ms" for head in heads)
        ratios = "".join(f"{comparison.ratio(*pair):>18.2f}x" for pair in quotients)
        print(f"  {comparison.work:<30}{times}{ratios}")
    print("  A quotient above 1 says that the second way is the faster one.")
    warn_if_busy()


def warn_if_busy() -> None:
    """Say so when other processes compete for the cores."""
    cores = os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > 1.25 * cores:
        print(
            f"  The machine is busy (load {load:.1f} on {cores} cores): do not rely on the times."
        )


def plot_privacy(figure: SubFigure, result: PrivacyResult) -> None:
    """Accuracy and epsilon over steps, one above the other."""
    settings = result.settings
    upper, lower = figure.subplots(2, 1, sharex=True)
    upper.set_title("Private training (DP-SGD)")
    upper.plot(result.steps, result.accuracies, color=FORALL_COLOUR)
    upper.axhline(settings.least_accuracy, color=LOOP_COLOUR, linestyle="--", linewidth=1)
    upper.set_ylabel("test accuracy")
    upper.set_ylim(0, 1.02)
    upper.yaxis.set_major_formatter(PercentFormatter(1.0))
    upper.annotate(
        f"{result.accuracies[-1]:.1%}",
        (result.steps[-1], result.accuracies[-1]),
        xytext=(0, -28),
        textcoords="offset points",
        ha="right",
        color=FORALL_COLOUR,
    )
    lower.plot(result.steps, result.epsilons, color=TORCH_COLOUR)
    lower.axhline(settings.largest_epsilon, color=LOOP_COLOUR, linestyle="--", linewidth=1)
    lower.set_ylabel(rf"$\varepsilon$ at $\delta$ = {settings.delta:g}")
    lower.set_xlabel("step (dashed: the targets)")
    lower.set_ylim(0, settings.largest_epsilon * 1.1)
    lower.annotate(
        f"{result.epsilons[-1]:.2f}",
        (result.steps[-1], result.epsilons[-1]),
        xytext=(0, -18),
        textcoords="offset points",
        ha="right",
        color=TORCH_COLOUR,
    )


def plot_reliability(axes: Axes, result: EnsembleResult) -> None:
    """Accuracy against confidence on the noisy test images."""
    axes.plot([0, 1], [0, 1], color=LOOP_COLOUR, linestyle="--", linewidth=1, label="calibrated")
    curves = (
        ("single members", TORCH_COLOUR, result.pooled["noisy test"]),
        ("ensemble", FORALL_COLOUR, result.ensemble["noisy test"]),
    )
    for who, colour, curve in curves:
        axes.plot(
            curve.bin_confidence,
            curve.bin_accuracy,
            color=colour,
            label=f"{who}: ECE {curve.error:.3f}, NLL {curve.nll:.2f}",
        )
        sizes = [12 + 300 * weight for weight in curve.bin_weight]
        axes.scatter(curve.bin_confidence, curve.bin_accuracy, color=colour, s=sizes, linewidths=0)
    axes.set_title(f"Calibration under pixel noise ({PIXEL_NOISE:g})")
    axes.set_xlabel("confidence (area of a dot: share of the predictions)")
    axes.set_ylabel("accuracy")
    axes.set_xlim(0, 1.02)
    axes.set_ylim(0, 1.02)
    axes.legend(loc="upper left", fontsize=8, frameon=False)


def plot_members(axes: Axes, result: EnsembleResult) -> None:
    """The accuracy of every member, and of the ensemble, on both kinds of test image."""
    kinds = list(result.members)
    for row, kind in enumerate(kinds):
        members = [member.accuracy for member in result.members[kind]]
        ensemble = result.ensemble[kind].accuracy
        # Spread over a band, in order of training, so that equal accuracies stay apart.
        heights = [row - 0.22 + 0.44 * index / (MEMBERS - 1) for index in range(MEMBERS)]
        axes.scatter(members, heights, color=TORCH_COLOUR, s=22, alpha=0.8, linewidths=0)
        axes.plot([ensemble, ensemble], [row - 0.34, row + 0.34], color=FORALL_COLOUR, linewidth=3)
        axes.annotate(
            f"{ensemble:.1%}",
            (ensemble, row + 0.36),
            ha="center",
            va="bottom",
            color=FORALL_COLOUR,
        )
    axes.set_title(f"{MEMBERS} members (dots), their ensemble (bar)")
    axes.set_yticks(range(len(kinds)), kinds)
    axes.set_ylim(-0.6, len(kinds) - 0.3)
    axes.margins(x=0.12)
    axes.set_xlabel("accuracy")
    axes.xaxis.set_major_locator(MultipleLocator(0.05))
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def plot_spectrum(axes: Axes, result: HessianResult) -> None:
    """All eigenvalues in descending order, on a scale that shows both signs."""
    values = result.eigenvalues.flip(0)
    ranks = range(1, len(values) + 1)
    axes.axhline(0, color=LOOP_COLOUR, linewidth=1)
    axes.scatter(ranks, values, color=TORCH_COLOUR, s=14, linewidths=0, label="eigenvalues")
    axes.scatter(
        [1],
        [result.power_eigenvalue],
        facecolors="none",
        edgecolors=FORALL_COLOUR,
        s=110,
        linewidths=1.8,
        label=f"power iteration: {result.power_eigenvalue:.3f}",
    )
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=1e-4)
    axes.set_ylim(3 * min(values[-1].item(), -1e-4), 3 * values[0].item())
    axes.set_title(f"Hessian spectrum, {len(values)} parameters")
    axes.set_xlabel("rank")
    axes.set_ylabel("eigenvalue")
    axes.legend(loc="lower left", fontsize=8, frameon=False)


def plot_ratios(axes: Axes, comparisons: list[Comparison]) -> None:
    """How many times faster than the loop either library does the same work."""
    contenders = (("torch.func", TORCH_COLOUR, -0.19), ("forall", FORALL_COLOUR, 0.19))
    for contender, colour, offset in contenders:
        ratios = [comparison.ratio("loop", contender) for comparison in comparisons]
        rows = [row + offset for row in range(len(ratios))]
        bars = axes.barh(rows, ratios, height=0.36, color=colour, label=contender)
        axes.bar_label(bars, [f"{ratio:.1f}x" for ratio in ratios], padding=3, fontsize=9)
    axes.axvline(1, color=LOOP_COLOUR, linestyle="--", linewidth=1, label="the loop")
    axes.margins(x=0.12)
    axes.set_yticks(
        range(len(comparisons)),
        [
            comparison.work.replace(" of ", "\nof ").replace(" at ", "\nat ")
            for comparison in comparisons
        ],
    )
    axes.invert_yaxis()
    axes.set_xlabel("time of the loop / time")
    # Above the axes, since any place inside may be covered by a bar.
    axes.set_title("Speed relative to the loop", pad=26)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, fontsize=9, frameon=False)


def plot_sensitivity(figure: SubFigure, result: JacobianResult) -> None:
    """Every digit's mean image and, below it, how strongly its logit depends on each pixel."""
    grid = figure.subplots(4, 5, squeeze=False)
    largest = result.sensitivity.max().item()
    for digit in range(CLASSES):
        row, column = divmod(digit, 5)
        above, below = grid[2 * row, column], grid[2 * row + 1, column]
        above.imshow(result.mean_images[digit], cmap="gray_r", vmin=-1, vmax=1)
        below.imshow(result.sensitivity[digit], cmap="magma", vmin=0, vmax=largest)
        for axes in (above, below):
            axes.set_xticks([])
            axes.set_yticks([])
            axes.spines[:].set_visible(False)
    figure.suptitle("Mean digit, and below it the mean |d its logit / d pixel|")
    colours = ScalarMappable(Normalize(0, largest), "magma")
    figure.colorbar(colours, ax=grid, shrink=0.8, aspect=35, pad=0.03)


def draw_picture(
    path: Path,
    privacy: PrivacyResult,
    ensemble: EnsembleResult,
    hessian: HessianResult,
    jacobian: JacobianResult,
) -> None:
    """Write the six panels to `path`."""
    figure = Figure(figsize=(16, 9.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subfigures(2, 3, squeeze=False, wspace=0.04, hspace=0.05)
    plot_privacy(panels[0, 0], privacy)
    plot_members(panels[0, 1].subplots(), ensemble)
    plot_reliability(panels[0, 2].subplots(), ensemble)
    plot_spectrum(panels[1, 0].subplots(), hessian)
    plot_sensitivity(panels[1, 1], jacobian)
    parts = (privacy, ensemble, hessian, jacobian)
    plot_ratios(panels[1, 2].subplots(), [part.comparison for part in parts])
    for axes in figure.axes:
        # The maps, which have no axis labels, stay bare.
        if axes.get_ylabel() or axes.get_xlabel():
            axes.grid(alpha=0.25, linewidth=0.6)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
