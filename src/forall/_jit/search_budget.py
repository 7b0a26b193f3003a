"""What it may cost to look for calls that can be replayed, and when that is given up.

NOTE [what recording may cost]
    A call that is recorded takes no longer than three calls as they are and 50 milliseconds, or as
    long as the calls of its kind have taken so far, if that is more. A recording that would is
    broken off, and what can wait (to clean a program and write it down) is done bit by bit in the
    calls that come next. Time is that of the processor in this thread: what other programs do on
    the machine is no reason to give up.

    A recording that was broken off is tried again after twice as many calls as the last time, and
    may then take about twice as long. So all of these together take no longer than twice the calls,
    and whatever is called often enough is recorded, however much of Python's state it reaches.

    Each attempt, to see what a call runs or to record it, is paid for by calls that are replayed.
    Some are free. Where these are used up the next one comes after twice as many calls as the last,
    so that a function that is never the same costs what it costs as it is.

    A call is looked at to learn of what kind it is. Where no kind comes back, calls pass unseen for
    some time, longer each time, and then some are looked at again.
"""

from __future__ import annotations

import gc
import time
from contextlib import contextmanager
from math import inf
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

ALLOWED = 32  # attempts that have not paid, before they become rare
WORTH = 32  # replayed calls that make up for one attempt
WINDOW = 64  # calls in a row that are looked at in vain
LONGEST = 1024  # calls in a row that are not looked at
CALLS, SLACK = 3.0, 0.05  # eager calls and seconds that the call which is recorded may take
EACH = 32  # steps of whatever kind after which the clock is asked
_SHARE = 0.96  # of these until something is broken off: to stop takes time too
_UNRECORDED = 1.3  # the time of what goes on as it is, below a recorder that does not listen
TOO_LONG = "to record it takes too long next to a call"

clock = time.thread_time


class Deadline(NamedTuple):
    """When recording has to stop, by the `clock`."""

    call: float  # where the call itself is under way: its rest goes on as it is
    work: float  # where nothing is left to do
    seconds: float = 0.0  # that the call takes as it is
    operators: int = 0  # that it comes to, if that is known

    @classmethod
    def of(cls, seconds: float, operators: int = 0, spent: float = 0.0) -> Deadline:
        """That of a call which begins now and takes so long as it is.

        ``spent`` are the seconds that calls of its kind have taken since one was recorded.
        """
        start, most = clock(), CALLS * seconds + max(SLACK, spent)
        late = start + _SHARE * most
        return cls(late - seconds, late, seconds, operators)

    def is_over(self, operators: int) -> bool:
        """Whether a call is to go on as it is, that has come to so many operators.

        How many are left is known where it was recorded before, and broken off.
        """
        if not self.operators:
            return clock() > self.call
        left = max(0.0, 1 - operators / self.operators)
        return clock() + _UNRECORDED * left * self.seconds > self.work


NEVER = Deadline(inf, inf)


class Attempts:
    """How often calls of one function were looked at and recorded, and for how much."""

    __slots__ = (
        "_debt",
        "_paid",
        "_patience",
        "_put_off",
        "_rest",
        "_seen",
        "_vain",
        "looks",
        "rest",
    )

    def __init__(self) -> None:
        self.looks = 0  # calls whose kind was found out
        self.rest = 0  # calls that will pass without a look
        self._rest = WINDOW  # the next time that they do
        self._vain = 0  # looks in a row that led to nothing
        self._seen = 0  # replayed calls then
        self._debt = 0  # replayed calls that are yet to make up for attempts
        self._paid = 0  # replayed calls that did
        self._put_off = 0  # attempts in a row that were not made
        self._patience = WINDOW  # of these, until one is

    def passes(self, hits: int) -> bool:
        """Whether a call is not looked at; ``hits`` calls were replayed so far."""
        if not self.rest:
            return False
        if hits != self._seen:
            self.rest = 0
            return False
        self.rest -= 1
        return True

    def missed(self, hits: int) -> None:
        """A call was looked at in vain."""
        if hits != self._seen:
            self._seen, self._vain, self._rest = hits, 0, WINDOW
        self._vain += 1
        if self._vain >= WINDOW:
            self._vain, self.rest = 0, self._rest
            self._rest = min(2 * self._rest, LONGEST)

    def may_begin(self, hits: int) -> bool:
        """Whether one more attempt is worth it; it is counted as made."""
        self._debt = max(0, self._debt - (hits - self._paid))
        self._paid = hits
        if self.are_used_up():
            self._put_off += 1
            if self._put_off < self._patience:
                return False
            self._put_off, self._patience = 0, 2 * self._patience
            return True
        self._debt += WORTH
        return True

    def are_used_up(self) -> bool:
        """Whether attempts have been for nothing too often."""
        return self._debt > (ALLOWED - 1) * WORTH


class _Frozen:
    """Objects that Python's collector is told to leave alone."""

    is_users = False  # as soon as some were found


@contextmanager
def without_collections() -> Iterator[None]:
    """Within it Python does not look for garbage; then only among what is new.

    A program is thousands of small objects, of which few outlive the recording. They would make
    Python look through all that torch is made of, which takes longer than to record them. So what
    is left counts as old at once: to freeze all there is and let it go again does that, and no
    more, unless somebody else has frozen something. Python counts what is frozen one by one, so it
    is not asked again where there was something.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.collect(0)
        _Frozen.is_users = _Frozen.is_users or gc.get_freeze_count() > 0
        if not _Frozen.is_users:
            gc.freeze()
            gc.unfreeze()
        gc.enable()
