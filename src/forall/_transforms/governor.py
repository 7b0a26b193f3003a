"""Which way examples that part are run: together, or one after another as in a loop.

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
from forall._transforms import loop
from forall._transforms.computing import Bindings, bindings_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType

    from forall._transforms.vmap import Mapping

_MOST = 64  # sizes of one function that are told apart
_WORTH = 0.001  # seconds: what takes less in all is not worth to try another way for
_MUCH, _CONVERTING = 2.0, 0.05  # times the loop, and seconds, that a try may take
_AGAIN = 64  # calls until the slower way is tried once more, then twice as many each time


class Times:
    """What calls of one size have taken, in seconds each, in either way."""

    __slots__ = ("left", "looped", "spent", "together", "wait")

    def __init__(self) -> None:
        self.looped: float | None = None
        self.together: float | None = None
        self.spent = 0.0
        self.wait = self.left = _AGAIN

    def took(self, seconds: float) -> None:
        """A call has run as the loop."""
        self.spent += seconds
        self.looped = seconds if self.looped is None else min(self.looped, seconds)

    def loops(self) -> bool:
        """Whether the next call is to run as the loop."""
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


class Costs:
    """What is known of one function."""

    __slots__ = ("bindings", "func", "times")

    def __init__(self) -> None:
        self.bindings: Bindings | None = None
        self.func: Any = None
        self.times: dict[Any, Times] = {}

    def bound(self, func: Any) -> Bindings | None:
        """What the function is bound to, if it only computes; functions may be made anew."""
        if self.func is not func or self.bindings is None or not self.bindings.hold():
            self.func, self.bindings = func, bindings_of(func)
        return self.bindings

    def of(self, call: Mapping) -> Times:
        entering = call.entering
        key = (entering.size, *[getattr(x, "shape", None) for x in entering.leaves])
        times = self.times.get(key)
        if times is None:
            if len(self.times) >= _MOST:
                self.times.pop(next(iter(self.times)))
            times = self.times[key] = Times()
        return times


_known: WeakKeyDictionary[CodeType, Costs] = WeakKeyDictionary()


def costs_of(code: CodeType) -> Costs:
    costs = _known.get(code)
    if costs is None:
        costs = _known[code] = Costs()
    return costs


def told(code: CodeType | None, size: int) -> str:
    """Which way calls with so many examples take, and why; nothing where that is not known."""
    costs = None if code is None else _known.get(code)
    found = [] if costs is None else [t for key, t in costs.times.items() if key[0] == size]
    if not found or found[-1].looped is None or config.now.parting != "measured":
        return ""
    looped, together = found[-1].looped, found[-1].together
    if together is None:
        return f"as the loop, in {_in_words(looped)}; together was not tried yet"
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


class Late(BaseException):
    """A call that is tried in another way takes longer than it may."""


class _until:
    """Within, a call of ours that goes on for longer than so many seconds ends with `Late`."""

    __slots__ = ("end",)

    def __init__(self, seconds: float) -> None:
        self.end = perf_counter() + seconds

    def __enter__(self) -> None:
        stack.late = self._check

    def __exit__(self, *_: object) -> None:
        stack.late = None

    def _check(self) -> None:
        if perf_counter() > self.end:
            stack.late = None
            raise Late


def governed(
    call: Mapping, code: CodeType | None, together: Callable[[], tuple[list, Any]]
) -> tuple[list, Any]:
    """A call whose examples part, in the way that takes less time."""
    if code is None or config.now.parting == "together":
        return together()
    costs = costs_of(code)
    bindings = costs.bound(call.func)
    if bindings is None or not loop.may_run(call, bindings):
        return together()
    times = costs.of(call)
    if config.now.parting == "loop" or times.loops():
        start = perf_counter()
        try:
            found = loop.run(call, bindings)
        except loop.ElsewhereError:
            return together()
        times.took(perf_counter() - start)
        return found
    if times.looped is None:
        return together()
    start = perf_counter()
    try:
        if times.together is None or times.together > times.looped:
            with _until(_MUCH * times.looped + _CONVERTING):
                found = together()
        else:
            found = together()
    except Late:
        times.together = inf
        try:
            return loop.run(call, bindings)
        except loop.ElsewhereError:
            return together()
    times.together = min(perf_counter() - start, times.together or inf)
    return found
