"""The time and memory of a call, by operator."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from forall._compat import profiler
from forall._core.looped_operators import count_looped_operators

if TYPE_CHECKING:
    from collections.abc import Callable


class OperatorCost(NamedTuple):
    """The cost of all calls of one operator together.

    Attributes:
        name: ``"mul"`` for an operator of torch's, ``"library::name"`` for another.
        calls: how often it ran. A batching rule that runs once for all examples counts once.
        seconds: on the host, with the operators that it calls. In forward mode these include the
            tangent, unless that is computed in Python. On a GPU that is the time to launch
            its kernels.
        allocated: the bytes that it allocated, on any device. What it freed again is included.
    """

    name: str
    calls: int
    seconds: float
    allocated: int


class CallCosts(Protocol):
    """A call that was measured."""

    @property
    def seconds(self) -> float: ...
    @property
    def operators(self) -> tuple[OperatorCost, ...]: ...


class MeasuredCall(NamedTuple):
    """The result of a call, and what it took; no operators if they were not recorded.

    ``looped`` are those that ran once per example, each with how often that was.
    """

    result: Any
    seconds: float
    operators: tuple[OperatorCost, ...] = ()
    looped: tuple[tuple[str, int], ...] = ()


def measure_call(run: Callable[[], Any], *, operators: bool) -> MeasuredCall:
    """Return ``run()``, measured by operator unless a profiler is on already."""
    with count_looped_operators() as looped:
        found = _measure(run, operators=operators)
    return found._replace(looped=tuple(looped.items()))


def _measure(run: Callable[[], Any], *, operators: bool) -> MeasuredCall:
    if not operators or profiler.is_profiling():
        start = perf_counter()
        result = run()
        return MeasuredCall(result, perf_counter() - start)
    with profiler.record_operators() as events:
        start = perf_counter()
        result = run()
        seconds = perf_counter() - start
    return MeasuredCall(result, seconds, _sum_by_operator(events))


def _sum_by_operator(events: list[profiler.OperatorEvent]) -> tuple[OperatorCost, ...]:
    """Return the cost of each operator, the longest first."""
    sums: dict[str, tuple[int, int, int]] = {}
    for name, nanoseconds, allocated in events:
        calls, time, memory = sums.get(name, (0, 0, 0))
        sums[name] = calls + 1, time + nanoseconds, memory + allocated
    costs = (
        OperatorCost(name.removeprefix("aten::"), calls, time * 1e-9, memory)
        for name, (calls, time, memory) in sums.items()
    )
    return tuple(sorted(costs, key=lambda cost: -cost.seconds))


OTHER_TIME = "Python, forall and autograd"


def find_other_time(call: CallCosts) -> float:
    """Return the seconds of a call that went to no operator."""
    return max(0.0, call.seconds - sum(cost.seconds for cost in call.operators))


def format_seconds(seconds: float) -> str:
    """Return a time as text, in the unit that fits."""
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def format_share(part: float, whole: float) -> str:
    """Return the share of ``part`` in per cent."""
    return f"{part / whole:.1%}" if whole else "0.0%"
