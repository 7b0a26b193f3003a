"""`explain`: a report of where the examples of a call diverged, and how the call ran."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

from forall._api import explain_plot
from forall._api.define_transform import find_calls_at_point, is_transform_at_point
from forall._api.execution import loop_or_batch
from forall._api.execution.transform_decorator import describe_replay, find_transform
from forall._api.explained_call import ExplainedCall
from forall._api.operator_costs import (
    OTHER_TIME,
    MeasuredCall,
    find_other_time,
    format_seconds,
    format_share,
    measure_call,
)
from forall._api.vmap import run_and_report
from forall._compat.documented_error import documented_error
from forall._core import config
from forall._core.code_table import find_code
from forall._core.errors import format_bytes, format_columns, format_short, name_of, type_name_of
from forall._core.python_state import is_ours
from forall._divergence.converted_call import collect_inner_reports, collect_report
from forall._divergence.report import Report, format_range
from forall._divergence.report_records import Divergence, Step

if TYPE_CHECKING:
    from collections.abc import Callable

    from forall._api.execution.transform_decorator import ReplayableCalls, Transform
    from forall._compat.call_site import SourceLine

    Measure = Callable[[Callable[[], Any]], MeasuredCall]


def explain(
    transformed: Callable[..., Any], *, operators: bool = True
) -> Callable[..., Explanation]:
    """A report of how a call of a transformed function ran, and its result.

    The law: ``explain(vmap(f))(*xs).result`` is ``vmap(f)(*xs)``, and so for every transform. The
    call is made once, with all its side effects. The report tells whether the call was replayed
    from a recorded program, which one, or why not. For `vmap` it also tells where examples
    diverged; such a call is explained as it is, and not replayed.

    The result prints as text. In a notebook it shows as a page, which `Explanation.to_html` writes.

    Cost: that of the call, and some microseconds for each test on values. torch's profiler records
    the operators: some milliseconds to start and stop it, about 2 microseconds and 1 KB for each
    operator. Calls that nobody asks about pay nothing.

    Args:
        transformed: what a transform or `jit` returned, itself: not a function around it. For
            `vjp`, `jvp` and `linearize`, which run at once, it is the transform:
            ``explain(vjp)(f, x)``.
        operators: measure time and memory by operator. False saves the profiler's time and memory
            in a call that runs millions of operators.

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
        >>> def loss(w):
        ...     return w.square().sum()
        >>> print(forall.explain(forall.grad(loss))(torch.ones(2)))
        grad(loss)
        <BLANKLINE>
        how it ran
            as it is
    """
    measure = functools.partial(measure_call, operators=operators)
    if is_transform_at_point(transformed):
        return functools.partial(_explain_at_point, measure, transformed)
    if (how := find_transform(transformed)) is not None:
        explain_call = _explain_mapped if how.how[0] == "vmap" else _explain_transformed
        return functools.partial(explain_call, measure, transformed, how)
    if _is_jitted(transformed):
        return functools.partial(_explain_jitted, measure, transformed)
    raise documented_error(TypeError, "not-callable")(
        "explain(transformed): it explains what vmap, grad or another transform returned.\n"
        f"{format_columns([('transformed', format_short(transformed), type_name_of(transformed))])}"
        "\nPass the transformed function, then its arguments: explain(vmap(f))(x)."
    )


@dataclass(frozen=True, repr=False)
class Explanation(ExplainedCall):
    """The report on one call of a transformed function: it prints as text.

    ``to_html`` gives a page, ``format_operators`` a table of operators, and ``plot`` a picture of
    the examples of a `vmap`. The other transforms have no examples, and what tells of these is
    empty. The text has no times, so that it is the same for each call that runs in the same way.

    Time and memory are measured by torch's profiler, around this one call. It sees each operator
    that forall or torch's autograd ran on ordinary tensors: a batching rule counts with what it ran
    for all examples at once. The time is that of the host, with the operators that an operator
    calls; on a GPU it is the time to launch kernels. What is left of the call's time went to
    Python, forall and autograd. The profiler makes each operator some microseconds slower, so
    compare the numbers with each other, and use a timer for how long a call takes. The first call
    of a function may include what later calls need not do again.

    Attributes:
        call: the transform and its function.
        result: what the call returned.
        ways: how the call ran, in words, one try after another.
        replay: how many calls of the function were replayed, or why they are not, while
            `forall.config.replay` is on.
        program: the recorded program of such calls, one operator a line, if there is one.
        measured: how other calls with so many examples run, and how long that takes, if
            `forall.config.strategy` finds it out. An explained call runs together.
        examples: the number of examples of a `vmap`, else 0.
        seconds: how long the call took, while it was measured.
        operators: the calls, seconds and bytes allocated of each operator, the longest first.
            Empty also with ``operators=False``, and within another profiler.
        looped: the operators without a batching rule that ran once per example, as a warning tells,
            and numpy's functions, each with the number of its calls.
        inside: the explanations of the first few vmaps that ran inside a call of another transform,
            without their results. Empty if the call was replayed or recorded.

    Cost: nothing more; all is kept as it was found.

    Source: see `explain`.

    Example:
        >>> f = forall.vmap(lambda x: x.exp() if x > 0 else 0 * x)
        >>> e = forall.explain(f)(torch.arange(-1.0, 2.0))
        >>> [(p.construct, p.sizes) for p in e.divergences]
        [('if else', (1, 2))]
        >>> [cost.calls for cost in e.operators if cost.name == "exp"]
        [1]
        >>> e.to_html().startswith("<!DOCTYPE html>")
        True
    """

    def _list_reruns(self) -> list[tuple[str, str]]:
        return [(name, explain_plot.format_count(n, "time")) for name, n in self.again]

    def _list_scalar_lines(self) -> list[tuple[str, str, str]]:
        how = "otherwise for one example after another"
        return [(place.near(), place.text(), how) for place in self.scalar]

    def _list_looped(self) -> list[tuple[str, str]]:
        return [(name, explain_plot.format_count(n, "call")) for name, n in self.looped]

    def __str__(self) -> str:
        parts = [self._title()]
        for title, rows in (
            ("how it ran", [(way,) for way in _count_repeats(self.ways)]),
            ("where examples diverged", _list_divergences(self.divergences)),
            ("how many took each step", _list_steps(self.steps)),
            ("converted", [(f.name, f.place) for f in self.converted]),
            ("not converted, so run once for each group", [tuple(f) for f in self.refused]),
            ("diverged inside, as it is, and ran again for each group", self._list_reruns()),
            ("of Python's own values alone", self._list_scalar_lines()),
            ("once per example, without a batching rule", self._list_looped()),
            ("replayed", [(self.replay,)] if self.replay else []),
            ("how such calls run", [(self.measured,)] if self.measured else []),
            ("program", [(line,) for line in self.program.splitlines()]),
        ):
            if rows:
                parts.append(f"{title}\n{format_columns(rows)}")
        parts += [f"inside: {explained}" for explained in self.inside]
        return "\n\n".join(parts)

    __repr__ = __str__  # also where a terminal shows it

    def format_operators(self) -> str:
        """Return the table of operators as text: calls, time, share of it, and bytes allocated."""
        rest = find_other_time(self)
        rows = [
            ("operator", "calls", "time", "share", "allocated"),
            (OTHER_TIME, "", format_seconds(rest), format_share(rest, self.seconds), ""),
        ]
        rows += [
            (
                cost.name,
                str(cost.calls),
                format_seconds(cost.seconds),
                format_share(cost.seconds, self.seconds),
                format_bytes(cost.allocated),
            )
            for cost in self.operators
        ]
        return format_columns(rows)

    def to_html(self, path: Any = None) -> str:
        """Return the explanation as one HTML page, and write it to a file if there is a ``path``.

        The page needs nothing else: no script, no other file, no network. It shows the examples
        over the steps, the source with counts beside its lines, the operators, and the program.

        Args:
            path: a file to write, as text in UTF-8. A file that is there is replaced.

        Cost: the source files are read; the call is not made again.

        Source: ours.

        Example:
            >>> e = forall.explain(forall.grad(lambda x: x.square().sum()))(torch.ones(3))
            >>> "grad(&lt;lambda&gt;)" in e.to_html()
            True
        """
        from forall._api import explanation_page  # it imports html, which takes milliseconds

        page = explanation_page.make_page(self)
        if path is not None:
            Path(path).write_text(page, encoding="utf-8")
        return page

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        from forall._api import explanation_page  # as above

        return explanation_page.make_fragment(self)

    def _title(self) -> str:
        if not self.examples:
            return self.call
        return f"{self.call}: {explain_plot.format_count(self.examples, 'example')}"

    def plot(self, path: Any = None) -> Any:
        """Plot examples over steps, one colour per line of code, as a figure or into a file."""
        title = f"{self._title()}\n{self.ways[-1]}"
        return explain_plot.draw_explanation(title, self.examples, self.steps, path)


_REPLAYED = "replayed: the recorded program ran in the place of the function"
_RECORDED = "as it is, and recorded for later calls"
_AS_IT_IS = "as it is"


def _explain_mapped(
    measure: Measure, mapped: Callable, how: Transform, /, *args: Any, **kwargs: Any
) -> Explanation:
    report = Report()
    options = dict(how.how[1:])
    run = functools.partial(run_and_report, how.func, options, args, kwargs, report)
    with collect_report(report):
        measured = measure(run)
    replay = describe_replay(mapped) if config.now.replay else ""
    return _describe_mapped(report, measured, mapped, replay)


def _describe_mapped(
    report: Report, measured: MeasuredCall, mapped: Any = None, replay: str = ""
) -> Explanation:
    """Return the explanation of the call of a `vmap` that filled this report."""
    origin = report.level and report.level.origin
    func, size = (mapped, 0) if origin is None else (origin.call.func, origin.size)
    report.level = None
    return Explanation(
        f"vmap({_name_nested(func)})",
        measured.result,
        tuple(report.ways) or ("by torch's own vmap, which tells nothing",),
        replay,
        measured=loop_or_batch.describe_choice(find_code(func), size),
        examples=size,
        seconds=measured.seconds,
        operators=measured.operators,
        looped=measured.looped,
        _report=report,
    )


def _explain_transformed(
    measure: Measure, transformed: Callable, how: Transform, /, *args: Any, **kwargs: Any
) -> Explanation:
    describe = functools.partial(describe_replay, transformed)
    run = functools.partial(transformed, *args, **kwargs)
    run = functools.partial(measure, run)
    return _explain_replay(_name_nested(transformed), run, how.calls, describe, args, kwargs)


def _explain_at_point(
    measure: Measure, transform: Any, func: Callable, /, *args: Any, **kwargs: Any
) -> Explanation:
    def find_calls() -> ReplayableCalls | None:
        return find_calls_at_point(transform, func, kwargs)

    def describe() -> str:
        calls = find_calls()
        return "" if calls is None else calls.describe_replay()

    call = f"{transform.__name__}({_name_nested(func)})"
    run = functools.partial(measure, functools.partial(transform, func, *args, **kwargs))
    return _explain_replay(call, run, find_calls, describe, args, kwargs)


def _explain_replay(
    call: str,
    run: Callable[[], MeasuredCall],
    find_calls: Callable[[], ReplayableCalls | None],
    describe: Callable[[], str],
    args: tuple,
    kwargs: dict,
) -> Explanation:
    before = _count_hits(find_calls())
    with collect_inner_reports() as reports:
        measured = run()
    calls, program = find_calls(), ""
    is_replayed = _count_hits(calls) > before
    if calls is not None:
        program = calls.describe_program(call, args, kwargs, is_replayed=is_replayed)
    way = _REPLAYED if is_replayed else _AS_IT_IS
    replay = describe() if config.now.replay else ""
    return _describe_call(call, measured, way, replay, program, reports)


def _describe_call(
    call: str,
    measured: MeasuredCall,
    way: str,
    replay: str,
    program: str,
    reports: list[Report],
) -> Explanation:
    """Return the explanation of a call that has no examples, with those of the vmaps inside."""
    unknown = MeasuredCall(None, 0.0)
    return Explanation(
        call,
        measured.result,
        (way,),
        replay,
        program,
        seconds=measured.seconds,
        operators=measured.operators,
        looped=measured.looped,
        inside=tuple(
            _describe_mapped(report, unknown) for report in reports if report.level is not None
        ),
    )


def _count_hits(calls: ReplayableCalls | None) -> int:
    return 0 if calls is None else calls.hits


def _is_jitted(x: Any) -> bool:
    return type(x) is FunctionType and "kinds" in vars(x) and is_ours(x)


def _explain_jitted(measure: Measure, jitted: Any, /, *args: Any, **kwargs: Any) -> Explanation:
    from forall._jit.cache.cache_info import describe_arguments  # as above

    before = jitted.cache_info().hits
    with collect_inner_reports() as reports:
        measured = measure(functools.partial(jitted, *args, **kwargs))
    hits, arguments = jitted.cache_info().hits, describe_arguments(args, kwargs)
    kind = next((k for k in reversed(jitted.kinds()) if k.arguments == arguments), None)
    way, replay, program = _AS_IT_IS, "", ""
    if kind is not None:
        way = _REPLAYED if hits > before else _AS_IT_IS if kind.why else _RECORDED
        replay = f"no: {kind.why}" if kind.why else f"{hits} calls so far"
        program = "" if kind.why else kind.text
    return _describe_call(_name_nested(jitted), measured, way, replay, program, reports)


def _name_nested(func: Any) -> str:
    """Return the name of a function, with the transforms that made it."""
    if (how := find_transform(func)) is not None:
        return f"{how.how[0]}({_name_nested(how.func)})"
    if _is_jitted(func):
        return f"jit({_name_nested(func.__wrapped__)})"
    return name_of(func)


def _count_repeats(ways: tuple[str, ...]) -> list[str]:
    """Return each way that a call ran once, with how many chunks ran so."""
    return [way if n == 1 else f"{way} ({n} times)" for way, n in Counter(ways).items()]


def _list_divergences(divergences: tuple[Divergence, ...]) -> list[tuple[str, ...]]:
    found: dict[tuple[SourceLine, str], list[tuple[int, ...]]] = {}
    for p in divergences:
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
