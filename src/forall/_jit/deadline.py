"""The deadline of tracing: how long a traced call may take.

NOTE [what recording may cost]
    A traced call takes at most the time of three eager calls plus 50 milliseconds, or the time
    that the eager calls with its cache key have taken so far, if that is more. A recording that
    would take longer is broken off. Work that can wait (passes and code generation) is done bit by
    bit in the calls that come next. Time is this thread's processor time, so the load of the
    machine is no reason to give up.
"""

from __future__ import annotations

import time
from math import inf
from typing import NamedTuple

# A traced call may take so many eager calls, and so many seconds more.
EAGER_CALLS_ALLOWED = 3.0
SECONDS_ALLOWED = 0.05
STEPS_PER_CLOCK_READ = 32  # steps of whatever kind after which the clock is asked
_SHARE_OF_BUDGET = 0.96  # the share of the budget after which tracing stops: to stop takes time too
_SLOWDOWN_UNRECORDED = 1.3  # the slowdown of eager code under a tracer that has stopped recording
TOO_LONG = "to record it takes too long next to a call"

clock = time.thread_time


class Deadline(NamedTuple):
    """The times of `clock` at which a recording has to stop."""

    call: float  # while the call is under way: the rest of the call runs eagerly
    work: float  # after the call: for passes and code generation
    seconds: float = 0.0  # that an eager call takes
    operators: int = 0  # that the call runs, if that is known

    @classmethod
    def make_for_call(cls, seconds: float, operators: int = 0, spent: float = 0.0) -> Deadline:
        """The deadline of a call that begins now and takes ``seconds`` if it runs eagerly.

        ``spent`` are the seconds that calls with its key have taken since one was recorded.
        """
        start, most = clock(), EAGER_CALLS_ALLOWED * seconds + max(SECONDS_ALLOWED, spent)
        late = start + _SHARE_OF_BUDGET * most
        return cls(late - seconds, late, seconds, operators)

    def is_over(self, operators: int) -> bool:
        """True if a call that has run so many ``operators`` has to go on without a tracer.

        The number of operators left is known where an earlier recording was broken off.
        """
        if not self.operators:
            return clock() > self.call
        left = max(0.0, 1 - operators / self.operators)
        return clock() + _SLOWDOWN_UNRECORDED * left * self.seconds > self.work


NO_DEADLINE = Deadline(inf, inf)
