"""The choice between running examples that part together, and one after another as in a loop.

Code in which examples part costs more together than by itself where they are few, or where what
they do is Python's own work. What each way takes is measured as calls are made, for each function
and each number and shape of its examples: the first call runs as the loop, a later one together,
given up where that takes much longer; then the faster way stays, and the other one is tried again
ever more seldom.
"""

from __future__ import annotations

from math import inf
from time import perf_counter
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from forall._core import config
from forall._core.levels import stack
from forall._core.parting import Late
from forall._transforms import loop
from forall._transforms.replaying import find_bindings

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType

    from forall._transforms.computing import Bindings
    from forall._transforms.vmap import Mapping

_MOST = 64  # sizes of one function that are describe_choice apart
_WORTH = 0.001  # seconds: what takes less in all is not worth to try another way for
_MUCH, _CONVERTING = 2.0, 0.05  # times the loop, and seconds, that a try may take
_FIRST = 0.05  # seconds that the loop may take before all together was tried
_AGAIN = 64  # calls until the slower way is tried once more, then twice as many each time


class Times:
    """Seconds that calls of one size have taken in either way."""

    __slots__ = ("left", "looped", "spent", "together", "wait")

    def __init__(self) -> None:
        self.looped: float | None = None
        self.together: float | None = None
        self.spent = 0.0
        self.wait = self.left = _AGAIN

    def took(self, seconds: float) -> None:
        """Note the seconds of a call that has run as the loop."""
        self.spent += seconds
        self.looped = seconds if self.looped is None else min(self.looped, seconds)

    def loops(self) -> bool:
        """Return True if the next call is to run as the loop."""
        if self.looped is None:
            return True
        if self.together is None:
            return self.spent < _WORTH
        is_faster = self.looped <= self.together
        self.left -= 1
        if self.left > 0:
            return is_faster
        self.wait = self.left = 2 * self.wait
        return not is_faster


_times: WeakKeyDictionary[CodeType, dict[Any, Times]] = WeakKeyDictionary()


def times_of(code: CodeType, call: Mapping) -> Times:
    """Return the times of calls of this code with as many examples of these shapes."""
    by_size = _times.get(code)
    if by_size is None:
        by_size = _times[code] = {}
    entering = call.entering
    key = (entering.size, *[getattr(x, "shape", None) for x in entering.leaves])
    times = by_size.get(key)
    if times is None:
        if len(by_size) >= _MOST:
            by_size.pop(next(iter(by_size)), None)
        times = by_size[key] = Times()
    return times


def describe_choice(code: CodeType | None, size: int) -> str:
    """Say which way calls with so many examples take, and why, once both were tried."""
    by_size = {} if code is None else _times.get(code, {})
    found = [t for key, t in by_size.items() if key[0] == size]
    looped, together = (found[-1].looped, found[-1].together) if found else (None, None)
    if looped is None or together is None or config.now.parting != "measured":
        return ""
    if together == inf:
        return f"as the loop, in {_in_words(looped)}; together takes much longer"
    first, second = ("as the loop", "together") if looped <= together else ("together", "the loop")
    fast, slow = sorted((looped, together))
    return f"{first}, in {_in_words(fast)}; {second} takes {_in_words(slow)}"


def _in_words(seconds: float) -> str:
    for unit in ("s", "ms"):
        if seconds >= 1:
            return f"{seconds:.3g} {unit}"
        seconds *= 1000
    return f"{seconds:.3g} us"


class _until:
    """Within, a call of ours that goes on for longer than so many seconds ends with `Late`."""

    __slots__ = ("end",)

    def __init__(self, seconds: float) -> None:
        self.end = perf_counter() + seconds

    def __enter__(self) -> None:
        if self.end < inf:
            stack.late = self._check

    def __exit__(self, *_: object) -> None:
        stack.late = None

    def _check(self) -> None:
        if perf_counter() > self.end:
            stack.late = None
            raise Late


def run_cheaper(
    call: Mapping, code: CodeType | None, together: Callable[[], tuple[list, Any]]
) -> tuple[list, Any]:
    """Make a call whose examples part, in the way that takes less time."""
    if code is None or config.now.parting == "together":
        return together()
    bindings = find_bindings(call.func)
    if bindings is None or not loop.may_run(call, bindings):
        return together()
    times = times_of(code, call)
    if config.now.parting == "loop" or times.loops():
        most = _FIRST if times.together is None and config.now.parting == "measured" else inf
        start = perf_counter()
        try:
            found = loop.run(call, bindings, most)
        except loop.TooLongError as late:
            times.took(late.seconds)
        except loop.ElsewhereError:
            return together()
        else:
            times.took(perf_counter() - start)
            return found
    return _try_together(call, bindings, times, together)


def _try_together(
    call: Mapping, bindings: Bindings, times: Times, together: Callable[[], tuple[list, Any]]
) -> tuple[list, Any]:
    """Make a call together, and give it up where it takes much longer than the loop."""
    is_known = times.together is not None and times.together <= (times.looped or inf)
    is_known |= call.entering.size == 1  # nothing is kept of it to be undone
    start = perf_counter()
    try:
        with _until(inf if is_known else _MUCH * (times.looped or inf) + _CONVERTING):
            found = together()
    except Late:
        times.together = inf
        try:
            return loop.run(call, bindings)
        except loop.ElsewhereError:
            return together()
    times.together = min(perf_counter() - start, times.together or inf)
    return found
