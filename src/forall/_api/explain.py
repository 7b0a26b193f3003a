"""`explain`: a report of where the examples of a call diverged, and how the call ran."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forall._api import explain_plot
from forall._api.execution import loop_or_batch
from forall._api.execution.auto_replay import replay_transform
from forall._core import config
from forall._core.code_table import find_code
from forall._core.errors import format_columns, format_short, name_of, type_name_of
from forall._divergence.converted_call import collect_report
from forall._divergence.report import Report, format_range
from forall._divergence.report_records import Function, Parting, Step

if TYPE_CHECKING:
    from collections.abc import Callable

    from forall._core.call_site import SourceLine


def explain(mapped: Callable[..., Any]) -> Callable[..., Explanation]:
    """A report of how a call of ``vmap(f)`` ran, where its examples diverged, and its result.

    The law: ``explain(vmap(f))(*xs).result`` is ``vmap(f)(*xs)``. The call is made once, with all
    its side effects.

    Cost: that of the call, and some microseconds for each test on values. Calls that nobody asks
    about pay nothing.

    Args:
        mapped: what `vmap` returned, itself: not a function around it.

    Raises:
        TypeError: for anything else.

    Source: ours.

    Example:
        >>> def root(a):                                 # Newton's method
        ...     x = a
        ...     while (x * x - a).abs() > 1e-4:
        ...         x = (x + a / x) / 2
        ...     return x
        >>> forall.explain(forall.vmap(root))(torch.tensor([1.0, 4.0, 100.0])).result
        tensor([ 1.,  2., 10.])
    """
    given = getattr(mapped, "__forall_run__", None)
    if given is None or getattr(mapped, "__globals__", None) is not replay_transform.__globals__:
        raise TypeError(
            "explain(mapped): it explains what vmap returned.\n"
            f"{format_columns([('mapped', format_short(mapped), type_name_of(mapped))])}\n"
            "Pass the mapped function, then its arguments: explain(vmap(f))(x)."
        )

    run, options = given

    def run_and_explain(*args: Any, **kwargs: Any) -> Explanation:
        report = Report()
        with collect_report(report):
            result = run(options._replace(report=report), args, kwargs)
        return _make_explanation(mapped, report, result)

    return run_and_explain


@dataclass(frozen=True)
class Explanation:
    """The report on one call of ``vmap(f)``: ``str`` gives the text, ``plot`` the picture.

    Attributes:
        examples: how many there were.
        ways: how the call ran, in words, one try after another.
        groups: how many examples each group had, if it ran in groups.
        partings: each time that examples diverged.
        steps: each test on values, with the examples that took it.
        converted: the functions whose source was converted.
        refused: the functions whose source was not converted, with the reason.
        again: the calls in which examples diverged, and how often each ran again for a group.
        replay: how many calls of the function were replayed, or why they are not, while
            `forall.config.replay` is on.
        measured: how other calls with so many examples run, and how long that takes, if
            `forall.config.parting` finds it out. An explained call runs together.
        scalar: the lines where code begins that computes with Python's own values alone. It runs
            together in an explained call, to show its steps, and in others one after another.

    Cost: nothing more; all is kept as it was found.

    Source: see `explain`.

    Example:
        >>> f = forall.vmap(lambda x: x.exp() if x > 0 else 0 * x)
        >>> e = forall.explain(f)(torch.arange(-1.0, 2.0))
        >>> [(p.construct, p.sizes) for p in e.partings]
        [('if else', (1, 2))]
    """

    call: str
    examples: int
    result: Any
    ways: tuple[str, ...]
    groups: tuple[int, ...]
    partings: tuple[Parting, ...]
    steps: tuple[Step, ...]
    converted: tuple[Function, ...]
    refused: tuple[Function, ...]
    again: tuple[tuple[str, int], ...]
    replay: str
    measured: str
    scalar: tuple[SourceLine, ...]

    def _list_reruns(self) -> list[tuple[str, str]]:
        return [(name, explain_plot.format_count(n, "time")) for name, n in self.again]

    def _list_scalar_lines(self) -> list[tuple[str, str, str]]:
        how = "otherwise for one example after another"
        return [(place.near(), place.text(), how) for place in self.scalar]

    def __str__(self) -> str:
        parts = [f"{self.call}: {explain_plot.format_count(self.examples, 'example')}"]
        for title, rows in (
            ("how it ran", [(way,) for way in _count_repeats(self.ways)]),
            ("where examples parted", _list_divergences(self.partings)),
            ("how many took each step", _list_steps(self.steps)),
            ("converted", [(f.name, f.place) for f in self.converted]),
            ("not converted, so run once for each group", [tuple(f) for f in self.refused]),
            ("parted inside, as it is, and ran again for each group", self._list_reruns()),
            ("of Python's own values alone", self._list_scalar_lines()),
            ("replayed", [(self.replay,)] if self.replay else []),
            ("how such calls run", [(self.measured,)] if self.measured else []),
        ):
            if rows:
                parts.append(f"{title}\n{format_columns(rows)}")
        return "\n\n".join(parts)

    def plot(self, path: Any = None) -> Any:
        """Plot examples over steps, one colour per line of code, as a figure or into a file."""
        size = explain_plot.format_count(self.examples, "example")
        title = f"{self.call}: {size}\n{self.ways[-1]}"
        return explain_plot.draw_explanation(title, self.examples, self.steps, path)


def _make_explanation(mapped: Callable, report: Report, result: Any) -> Explanation:
    func, size = report.call or (mapped, 0)
    return Explanation(
        f"vmap({name_of(func)})",
        size,
        result,
        tuple(report.ways) or ("by torch's own vmap, which tells nothing",),
        tuple(report.groups),
        tuple(report.partings),
        tuple(report.steps),
        tuple(report.converted.values()),
        tuple(report.refused.values()),
        tuple(report.again.items()),
        vars(mapped)["__forall_told__"]() if config.now.replay else "",
        loop_or_batch.describe_choice(find_code(func), size),
        tuple(sorted(report.scalar)),
    )


def _count_repeats(ways: tuple[str, ...]) -> list[str]:
    """Return each way that a call ran once, with how many chunks ran so."""
    return [way if n == 1 else f"{way} ({n} times)" for way, n in Counter(ways).items()]


def _list_divergences(partings: tuple[Parting, ...]) -> list[tuple[str, ...]]:
    found: dict[tuple[SourceLine, str], list[tuple[int, ...]]] = {}
    for p in partings:
        found.setdefault((p.place, p.construct), []).append(p.sizes)
    return [
        (
            place.near(),
            place.text(),
            construct,
            explain_plot.format_count(len(times), "time"),
            f"groups of {format_range([n for sizes in times for n in sizes])}",
        )
        for (place, construct), times in sorted(found.items())
    ]


def _list_steps(steps: tuple[Step, ...]) -> list[tuple[str, ...]]:
    found: dict[SourceLine, list[int]] = {}
    for step in steps:
        found.setdefault(step.place, []).append(len(step.examples))
    return [(place.near(), _format_run_lengths(sizes)) for place, sizes in sorted(found.items())]


def _format_run_lengths(sizes: list[int]) -> str:
    """Return numbers in a row; of repeated ones, how often they repeat."""
    runs: list[list[int]] = []
    for n in sizes:
        if runs and runs[-1][0] == n:
            runs[-1][1] += 1
        else:
            runs.append([n, 1])
    shown = [f"{n}" if times == 1 else f"{n} (x{times})" for n, times in runs]
    if len(shown) > 16:
        shown = [*shown[:8], "..", *shown[-7:]]
    return f"{', '.join(shown)}: {explain_plot.format_count(len(sizes), 'step')}"
