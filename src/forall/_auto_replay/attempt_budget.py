"""The budget of attempts to record calls without being asked, and when attempts are given up.

NOTE [what attempts may cost]
    One attempt costs what `forall._jit.deadline` allows.

    A recording that was broken off is tried again after twice as many calls as the last time, and
    may then take about twice as long. So all attempts together take at most twice the time of the
    calls. Whatever is called often enough is recorded, however much of Python's state it reaches.

    Each attempt, to observe what a call runs or to trace it, is paid for by replayed calls. Some
    are free. When these are used up, the next attempt comes after twice as many calls as the last.
    So a function whose calls never repeat costs what it costs without tracing.

    A call is looked at to compute its cache key. Where no key comes back, calls pass without a
    look for some time, longer each time, and then some are looked at again.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

FREE_ATTEMPTS = 32  # attempts that have not paid, before they become rare
REPLAYS_PER_ATTEMPT = 32  # replayed calls that make up for one attempt
LOOKS_BEFORE_PAUSE = 64  # calls in a row that are looked at in vain
LONGEST_PAUSE = 1024  # calls in a row that are not looked at


class AttemptBudget:
    """Counts of the attempts to trace calls of one function, and of the replays that pay them."""

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
        self.looks = 0  # calls whose cache key was computed
        self.rest = 0  # calls that will pass without a look
        self._rest = LOOKS_BEFORE_PAUSE  # the length of the next such pause
        self._vain = 0  # looks in a row that led to no replay
        self._seen = 0  # replayed calls when the first of these looks was made
        self._debt = 0  # replayed calls that are yet to pay for attempts
        self._paid = 0  # replayed calls that have paid
        self._put_off = 0  # attempts in a row that were not made
        self._patience = LOOKS_BEFORE_PAUSE  # attempts to put off before the next one is made

    def skips_call(self, hits: int) -> bool:
        """True if a call passes without a look; ``hits`` calls were replayed so far."""
        if not self.rest:
            return False
        if hits != self._seen:
            self.rest = 0
            return False
        self.rest -= 1
        return True

    def count_miss(self, hits: int) -> None:
        """Count a call that was looked at and not replayed."""
        if hits != self._seen:
            self._seen, self._vain, self._rest = hits, 0, LOOKS_BEFORE_PAUSE
        self._vain += 1
        if self._vain >= LOOKS_BEFORE_PAUSE:
            self._vain, self.rest = 0, self._rest
            self._rest = min(2 * self._rest, LONGEST_PAUSE)

    def has_paused(self) -> bool:
        """True if so many looks in a row were in vain that calls passed, or pass, without one."""
        return self._rest > LOOKS_BEFORE_PAUSE

    def may_attempt(self, hits: int) -> bool:
        """True if the budget allows one more attempt, which is counted as made."""
        self._debt = max(0, self._debt - (hits - self._paid))
        self._paid = hits
        if self.is_spent():
            self._put_off += 1
            if self._put_off < self._patience:
                return False
            self._put_off, self._patience = 0, 2 * self._patience
            return True
        self._debt += REPLAYS_PER_ATTEMPT
        return True

    def is_spent(self) -> bool:
        """True if too many attempts were not paid for by replayed calls."""
        return self._debt > (FREE_ATTEMPTS - 1) * REPLAYS_PER_ATTEMPT


class _FrozenObjects:
    """A record of whether somebody else has frozen objects by `gc.freeze`."""

    is_users = False  # True as soon as frozen objects were found


@contextmanager
def disable_gc() -> Iterator[None]:
    """Disable garbage collection inside the context; at the end collect the youngest objects alone.

    A program is thousands of small objects, of which few outlive the recording. They would make
    Python traverse all of torch's objects, which takes longer than the recording. So the survivors
    are moved to the oldest generation at once, by `gc.freeze` and `gc.unfreeze`.

    That would unfreeze what somebody else has frozen, so it is not done where something is frozen.
    Python counts frozen objects one by one, so it is not asked again once there were some.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.collect(0)
        _FrozenObjects.is_users = _FrozenObjects.is_users or gc.get_freeze_count() > 0
        if not _FrozenObjects.is_users:
            gc.freeze()
            gc.unfreeze()
        gc.enable()
