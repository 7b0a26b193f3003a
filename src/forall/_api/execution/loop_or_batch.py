"""The choice between running examples together, and one after another as in a loop.

Code that tests the values of examples costs more together than in a loop if there are few examples,
or if most of its work is Python's own. Calls are timed, for each function and each number and form
of examples.

The first call runs as the loop. A later one runs together, and is given up if it takes longer. Then
the faster way stays. The other one is tried again when a try takes little of the time that calls
have taken since.

A loop over calls of a transformed function, as of ``jacfwd(f)``, gets faster: those calls are
recorded, and replayed from then on. The loop is timed when its calls have been recorded.
"""

from __future__ import annotations

import contextlib
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch.autograd import forward_ad

from forall._api import mapped_inputs
from forall._api.execution import python_loop
from forall._api.execution.function_record import find_bindings
from forall._api.execution.transform_decorator import can_replay, find_transform
from forall._api.nested_components import NestedExamples, group_by_shape
from forall._compat.devices import count_function_modes
from forall._compat.dispatch_state import in_torch_func
from forall._compat.private_api import PLAIN, count_dispatch_modes
from forall._core import config
from forall._core.code_table import CodeSet, CodeTable, find_code
from forall._core.divergence import TimeExceeded
from forall._core.errors import format_columns, name_of, warn_slow_path
from forall._core.levels import stack
from forall._divergence import is_running
from forall._vmap.concretize_listeners import end_recordings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import CodeType

    from forall._api.execution.mapped_call import MappedCall
    from forall._api.execution.side_effect_free import Bindings
    from forall._api.execution.transform_decorator import ReplayableCalls
    from forall._compat.call_site import SourceLine

    Strategy = Callable[[MappedCall], tuple[list, Any]]

_WORDS = frozenset({bool, int, float, complex, str, type(None)})
_MOST = 64  # keys of one function that are timed
_WORTH = 0.02  # seconds of calls as the loop, before running together is worth a try
_MUCH, _CONVERTING = 1.0, 0.05  # times the loop, and seconds, that a first try may take
_FIRST = 0.05  # seconds that the loop may take before all together was tried
_SHARE = 32  # a later try takes at most one part in so many of the time,
_MOST_SHARE = 4096  # twice as many after each one that changes nothing, up to this
_LOOPS_TO_WARM, _CALLS_TO_WARM = 8, 64  # in which the calls of a transform are recorded, at most
_WARMING = 1.0  # seconds of these before all together was tried
_SOME_GAIN, _MOST_GAIN = 4.0, 16.0  # times that a loop gets faster by that: likely, and at most
_MANY, _WORTH_A_WORD = 32, 0.001  # examples, and seconds of a loop that gets a warning


class CallTimes:
    """Seconds that calls of one size have taken in either way."""

    __slots__ = (
        "_preferred",
        "_share",
        "is_estimate",
        "looped",
        "next",
        "replayed",
        "replays",
        "spent",
        "together",
        "warming",
        "was_late",
    )  # fmt: skip

    def __init__(self, warming: int = 0) -> None:
        self.warming = warming  # loops at most, until one is timed
        self.was_late = False  # a first try of all together was broken off
        self.looped: float | None = None
        self.is_estimate = False  # `looped` is, from the first examples of a loop broken off
        self.together: float | None = None
        self.replayed: float | None = None
        self.replays = 0
        self.spent = 0.0
        self.next = _WORTH  # when so much was spent, the other way is tried
        self._share = _SHARE
        self._preferred: bool | None = None  # True if the loop was faster at the last try

    def note_seconds(self, seconds: float, *, together: bool = False) -> None:
        """Note the seconds of a call."""
        self.spent += seconds
        if together:
            if self.together is None or seconds < self.together:
                self.together = seconds
        elif self.looped is None or seconds < self.looped:
            self.looped = seconds

    def note_estimate(self, seconds: float) -> None:
        """Note the seconds that a loop that was broken off is estimated to take.

        Its first example may have paid for one-time work, such as an import of torch's. So the loop
        is tried once more after the first call together.
        """
        self.is_estimate = self.looped is None
        self.note_seconds(seconds)
        if self.together is not None:
            self.note_try(self.together)

    def get_loop_limit(self) -> float:
        """Return the seconds after which a loop is to be broken off."""
        if self.together is None:
            return _FIRST
        return inf if self.prefers_loop() or self.may_get_faster() else self.together

    def note_replay(self, seconds: float) -> None:
        """Note the seconds of a call for which a program was replayed."""
        self.replays += 1
        self.replayed = min(seconds, self.replayed or inf)

    def is_slow_to_replay(self) -> bool:
        """Return True if replaying a call takes longer than the loop over its examples."""
        replayed, looped = self.replayed, self.looped
        return replayed is not None and looped is not None and replayed > looped

    def note_try(self, seconds: float) -> None:
        """Note the cost of a try of the other way: the next try comes when that cost is little."""
        prefers = self.prefers_loop()
        is_news = prefers is not self._preferred
        self._share = _SHARE if is_news else min(2 * self._share, _MOST_SHARE)
        self._preferred = prefers
        self.next = self.spent + self._share * seconds

    def prefers_loop(self) -> bool:
        """Return True if the loop takes less time, as far as both are known."""
        return self.looped is None or self.together is None or self.looped <= self.together

    def may_get_faster(self) -> bool:
        """Return True if the loop may become the faster way once the calls in it are recorded.

        If running together is much faster so far, that waits until calls have taken as long as the
        recording may.
        """
        looped, together = self.looped, self.together
        if not self.warming or looped is None:
            return False
        if together is None:
            return self.spent < _WARMING
        if looped < _SOME_GAIN * together:
            return True
        return looped < _MOST_GAIN * together and self.spent >= _LOOPS_TO_WARM * looped

    def note_warming(self, *, is_over: bool) -> None:
        """Note a loop in which calls may have been recorded."""
        self.warming = 0 if is_over else self.warming - 1

    def loops(self) -> bool:
        """Return True if the next call is to run as the loop."""
        return self.looped is None or self.prefers_loop() == (self.spent < self.next)

    def loops_again(self) -> bool:
        """Return True if it is settled that the next call runs as the loop."""
        looped, together = self.looped, self.together
        if looped is None or self.spent >= self.next or self.warming:
            return False
        return together is None or looped <= together


_times: CodeTable[dict[Any, CallTimes]] = CodeTable()
_told = CodeSet()  # of functions that have been warned about, because they run as the loop


def _get_times_by_key(code: CodeType) -> dict[Any, CallTimes]:
    found = _times.get(code)
    if found is None:
        found = _times[code] = {}
        SettledCalls.codes += 1
    return found


def _make_key(func: Any, size: int, leaves: Sequence[Any]) -> tuple:
    """Return a key of a call: the transforms inside and outside, and the forms of its examples."""
    return (size, _get_transform_keys(func), type(stack.top), *_get_forms(leaves))


def _get_forms(leaves: Sequence[Any]) -> tuple:
    """Return the forms of arguments: the shape of a tensor, and whether it requires grad."""
    forms: list[Any] = []
    for x in leaves:
        if type(x) is NestedExamples:
            forms += NestedExamples, len(group_by_shape([x]))
        elif type(x) not in PLAIN or x.is_nested:  # others may have symbolic shapes, or none
            forms.append(type(x))
        else:
            forms += x.shape, x.requires_grad
    return (*forms,)


def _get_transform_keys(func: Any) -> tuple:
    how = find_transform(func)
    return () if how is None else (how.key, *_get_transform_keys(how.func))


def get_times(code: CodeType, call: MappedCall) -> CallTimes:
    """Return the times of calls of this code with as many examples of these shapes."""
    by_size = _get_times_by_key(code)
    key = _make_key(call.func, call.arguments.size, call.arguments.leaves)
    times = by_size.get(key)
    if times is None:
        if len(by_size) >= _MOST:
            by_size.pop(next(iter(by_size)), None)
        times = by_size[key] = CallTimes(_count_loops_to_warm(call.func, call.arguments.size))
    return times


def _count_loops_to_warm(func: Any, size: int) -> int:
    """Return how many loops may pass until the calls in a loop are recorded; 0 for no transform."""
    if find_transform(func) is None or not can_replay():
        return 0
    return max(_LOOPS_TO_WARM, _CALLS_TO_WARM // size)


def _count_replays(func: Any) -> float:
    """Return how many calls of a function were replayed; infinity if none ever will be."""
    how = find_transform(func)
    calls = how and how.calls()
    return inf if calls is None or calls.has_doubts() else calls.hits


class _KnownCalls(NamedTuple):
    """The times of calls with arguments of one form, and how to make such a call."""

    times: CallTimes
    dims: tuple
    size: int
    alone: Callable | None  # see `Transform`


class SettledCalls:
    """The calls of one mapped function that are known to run as the loop, without further checks.

    They are those with positional arguments, tensors and numbers. A loop that takes microseconds
    must not wait for all the checks that `vmap` makes of other calls.
    """

    __slots__ = ("_bindings", "_known", "_places", "dims", "func", "out_dims", "unknown")
    codes: ClassVar[int] = 0  # of all functions whose calls are timed

    def __init__(self, func: Callable, in_dims: Any, out_dims: Any) -> None:
        self.func, self.dims, self.out_dims = func, in_dims, out_dims
        self._places: mapped_inputs.OutDims | None = None
        self._bindings: Bindings | None = None
        self._known: dict[tuple, _KnownCalls] = {}  # by forms of arguments
        self.unknown = -1  # how many codes had times when this one had none

    def __reduce__(self) -> tuple:
        return SettledCalls, (self.func, self.dims, self.out_dims)  # times are a machine's

    def find(self, args: tuple) -> _KnownCalls | None:
        """Return the times of such calls and how to make them; None if none were timed."""
        forms = _get_forms(args)
        known = self._known.get(forms)
        return self._look_up(args, forms) if known is None else known

    def _look_up(self, args: tuple, forms: tuple) -> _KnownCalls | None:
        code = find_code(self.func)
        by_size = None if code is None else _times.get(code)
        if by_size is None:
            self.unknown = self.codes
            return None
        dims = (self.dims,) * len(args) if type(self.dims) is int else self.dims
        size = _count_examples(args, dims)
        times = size and by_size.get(_make_key(self.func, size, args))
        if not times or not size or stack.top is not None:
            return None
        if len(self._known) >= _MOST:
            self._known.clear()
        how = find_transform(self.func)
        alone = how and how.alone
        if any(type(x) in PLAIN and x.requires_grad for x in args):
            alone = None
        known = self._known[forms] = _KnownCalls(times, dims, size, alone)
        return known

    def run(self, args: tuple, known: _KnownCalls, calls: ReplayableCalls | None) -> Any:
        """Return a tuple of the result; None if the call is to be made in the ordinary way.

        ``calls`` may replay it. Few functions are called here: Python code that runs after an
        operator of torch's is cold. A dozen function calls cost as much as a loop over two
        examples.
        """
        times, dims, size, alone = known
        if not times.loops_again():
            return None
        if calls is not None and calls.may_replay() and not times.is_slow_to_replay():
            return None
        if stack.top is not None or stack.listening or config.now.strategy != "measured":
            return None
        if count_dispatch_modes() or count_function_modes() or is_running():
            return None
        # torch.export needs no check: its tensors are fake, and have no form that is known.
        if in_torch_func() or forward_ad._current_level >= 0:
            return None
        func, bindings = self.func, self._bindings
        if bindings is None or not bindings.hold(func):
            bindings = self._bindings = find_bindings(func)
            if bindings is None:
                return None
        places = self._places
        if places is None:
            places = self._places = mapped_inputs.OutDims("vmap", func, self.out_dims)
        start = perf_counter()
        if bindings.writes or bindings.tensors:
            if not bindings.may_take(args):
                return None
            arguments = python_loop.LoopArguments(args, dims, size, None)
            try:
                found = python_loop.run_each_example(func, arguments, places, bindings)
            except python_loop.CannotLoopError:
                return None
        else:
            # Inference mode records nothing, whatever grad mode says.
            if alone and torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
                func = alone
            found = python_loop.run_each_unguarded(func, args, dims, size, places)
        if found is not None:
            times.note_seconds(perf_counter() - start)
        return found


def _count_examples(args: tuple, dims: Any) -> int | None:
    """Return how many examples tensors have; None if an argument is no tensor, number or string."""
    if type(dims) is not tuple or len(dims) != len(args):
        return None
    size = None
    for x, dim in zip(args, dims, strict=True):
        if type(x) not in PLAIN:
            if dim is not None or type(x) not in _WORDS:
                return None
            continue
        if x.is_nested:
            return None
        if dim is None:
            continue
        if type(dim) is not int:
            return None
        if not -x.dim() <= dim < x.dim():
            return None
        if size is not None and x.shape[dim] != size:
            return None
        size = x.shape[dim]
    return size or None


def describe_choice(code: CodeType | None, size: int) -> str:
    """Describe which way calls with so many examples take, and why, once both were tried."""
    by_size = {} if code is None else _times.get(code, {})
    found = [t for key, t in by_size.items() if key[0] == size]
    looped, together = (found[-1].looped, found[-1].together) if found else (None, None)
    if looped is None or together is None or config.now.strategy != "measured":
        return ""
    if together == inf:
        return f"as the loop, in {_format_seconds(looped)}; together takes much longer"
    first, second = ("as the loop", "together") if looped <= together else ("together", "the loop")
    fast, slow = sorted((looped, together))
    return f"{first}, in {_format_seconds(fast)}; {second} takes {_format_seconds(slow)}"


def _format_seconds(seconds: float) -> str:
    for unit in ("s", "ms"):
        if seconds >= 1:
            return f"{seconds:.3g} {unit}"
        seconds *= 1000
    return f"{seconds:.3g} us"


class _TimeLimit:
    """A block in which a call that takes longer than so many seconds ends with `TimeExceeded`."""

    __slots__ = ("before", "end")

    def __init__(self, seconds: float) -> None:
        self.end = perf_counter() + seconds

    def __enter__(self) -> None:
        self.before = stack.late  # of a call around this one
        if self.end < inf:
            stack.late = self._check

    def __exit__(self, *_: object) -> None:
        stack.late = self.before

    def _check(self) -> None:
        if self.before is not None:
            self.before()
        if perf_counter() > self.end:
            stack.late = None  # not again, on the way out
            raise TimeExceeded


def run_cheaper(
    call: MappedCall,
    code: CodeType | None,
    together: Strategy,
    diverged_at: SourceLine | None = None,
) -> tuple[list, Any]:
    """Run a call by the strategy ``together``, or as the loop, whichever takes less time.

    ``diverged_at`` is the line where its examples have diverged, if they have.
    """
    if code is None or config.now.strategy == "together":
        return together(call)
    bindings = find_bindings(call.func)
    if bindings is None:
        return together(call)
    times = get_times(code, call)
    if diverged_at is not None and stack.listening and times.loops_again():
        end_recordings("its examples diverge, and take less time one after another")
    if not python_loop.may_run_as_loop(call, bindings):
        return together(call)
    if config.now.strategy == "loop" or times.may_get_faster() or times.loops():
        is_measured = config.now.strategy == "measured"
        try:
            found = _run_as_loop(call, times, times.get_loop_limit() if is_measured else inf)
        except python_loop.TooLongError as late:
            times.note_estimate(late.seconds)
        else:
            return found or together(call)
    found = _try_together(call, times, together)
    if diverged_at is not None and code not in _told and _is_worth_a_warning(call, times):
        _told.add(code)
        _warn_of_loop(call, diverged_at)
    return found


def _run_as_loop(call: MappedCall, times: CallTimes, most: float) -> tuple[list, Any] | None:
    """Run a call as the loop; return None if it has to be run in another way."""
    hits = _count_replays(call.func) if times.warming else inf
    start = perf_counter()
    try:
        found = python_loop.run_loop(call, most)
    except python_loop.TooLongError:
        raise
    except python_loop.CannotLoopError:
        return None
    seconds = perf_counter() - start
    times.note_seconds(seconds)
    times.is_estimate = False
    if times.warming:
        times.note_warming(is_over=_count_replays(call.func) >= hits + call.arguments.size)
    if not (times.prefers_loop() or times.may_get_faster()):
        times.note_try(seconds)
    return found


def _is_worth_a_warning(call: MappedCall, times: CallTimes) -> bool:
    """Return True if many examples will run as the loop, and that takes noticeable time."""
    looped, together = times.looped, times.together
    if looped is None or together is None or times.next <= times.spent:
        return False
    return call.arguments.size >= _MANY and looped > _WORTH_A_WORD and looped < together


def _warn_of_loop(call: MappedCall, diverged_at: SourceLine) -> None:
    """Warn that diverging examples run one after another, and how to avoid that."""
    text = diverged_at.text()
    at = [("at", f"{diverged_at.near()}   {text}".rstrip())] if text else []
    rows = [("examples", f"{call.arguments.size}"), *at]
    warn_slow_path(
        f"vmap({name_of(call.func)}): examples diverge, and take less time one after another than "
        "together, so such calls run as the plain loop.\n"
        f"{format_columns(rows)}\n"
        "To run them together is faster without Python's numbers, strings and lists of them: "
        "torch.where, forall.cond, forall.while_loop, an operator in their place. "
        "forall.explain tells where they diverge."
    )


def _try_together(call: MappedCall, times: CallTimes, together: Strategy) -> tuple[list, Any]:
    """Run a call together, and give it up if it takes much longer than the loop."""
    is_first = times.together is None
    looped = inf if times.looped is None else times.looped
    is_try = times.prefers_loop()
    most = _MUCH * looped + _CONVERTING * is_first
    if not is_try or call.arguments.size == 1:  # a run of one example cannot be undone
        most = inf
    start = perf_counter()
    try:
        with _TimeLimit(most):
            found = together(call)
    except TimeExceeded:
        found = None
    seconds = perf_counter() - start
    if found is None:
        # A first try may be late because of one-time work, or of other load on the machine.
        if times.was_late or not is_first:
            times.together = inf
        times.was_late = True
        times.note_try(seconds)
        with contextlib.suppress(python_loop.CannotLoopError):
            return python_loop.run_loop(call)
        return together(call)
    times.note_seconds(seconds, together=True)
    if is_first and (seconds > looped or times.is_estimate):
        # Try again: the first try converted its function, or the first loop did one-time work.
        times.next = times.spent
    elif is_try:
        times.note_try(seconds)
    return found
