"""The log of what a call has communicated, for parts of it that run once more.

A transform may undo a run of a function and run it once more. What the function has sent to other
processes cannot be undone: they would wait for nothing, or take one message for another. So the
results of all messages are kept as long as the outermost call runs. A run that is made again reads
them there, at the same places.

They are kept only if a run may be undone: whoever undoes one has asked for the position first, as
`PythonSnapshot` does. By default a call of several examples may be undone up to its end, since its
examples may diverge. A call with ``divergence="error"`` keeps no messages, and neither does a
program that cannot fail.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from forall._compat.exception_safety import RestoredState, open_calls
from forall._core.errors import CollectiveError

if TYPE_CHECKING:
    import torch


class LogEntry(NamedTuple):
    """One message: its description, a hash of what was sent if it is known, and the result.

    A recorded program sends what the function does up to rounding, so it leaves no hash. Another
    hash is a tensor on the device of what was sent: to read it at once would wait for that.
    """

    what: str
    sent: int | torch.Tensor | None
    result: torch.Tensor


class CommunicationLog:
    """The messages of one outermost call, and how many of them the present run has come to.

    ``is_replay`` is True while a recorded program runs. It ``keeps_messages`` if the function may
    run after it, since the program may fail.
    """

    __slots__ = ("call", "entries", "is_replay", "keeps_messages", "position")

    def __init__(self, call: Any) -> None:
        self.call = call
        self.entries: list[LogEntry] = []
        self.position = 0
        self.is_replay, self.keeps_messages = False, True

    def read_next(self) -> LogEntry | None:
        """Return the entry that the run comes to, and go past it; None at the end of the log."""
        if self.position == len(self.entries):
            return None
        self.position += 1
        return self.entries[self.position - 1]

    def add(self, entry: LogEntry) -> None:
        self.entries.append(entry)
        self.position += 1


class _Newest(RestoredState):
    log: CommunicationLog | None = None  # may be of a call that has ended
    notified_in: Any = None  # the outermost call in which the other ranks were told of an error
    is_used = False  # True once this thread has made a call over ranks


_newest = _Newest.make_instance(idle=True)


def begin_use() -> None:
    """Keep messages from now on, where a run may be undone. Earlier ones asked for no position."""
    if not _newest.is_used:
        _newest.is_used = True
        _make_log()


def _make_log() -> CommunicationLog | None:
    call = open_calls.before
    if call is None:
        return None
    if _newest.log is None or _newest.log.call is not call:
        _newest.log = CommunicationLog(call)
    return _newest.log


def get_log() -> CommunicationLog | None:
    """Return the log of the outermost call of this thread; None if no run of it can be undone."""
    log = _newest.log
    return None if log is None or log.call is not open_calls.before else log


def is_reading() -> bool:
    """Return True if the next message was sent by an earlier run, and is read from the log."""
    log = get_log()
    return log is not None and log.position < len(log.entries)


def drop_log() -> None:
    """Forget the messages: no run that came to them can be undone any more."""
    _newest.log = None


def note_notified_error() -> None:
    """Note that the other ranks were told of an error of this one: they have ended the call."""
    _newest.notified_in = open_calls.before


def is_final(error: BaseException) -> bool:
    """Return True if what ended with an error cannot run once more: nobody would answer it."""
    call = open_calls.before
    return isinstance(error, CollectiveError) or (call is not None and _newest.notified_in is call)


def get_position() -> int:
    """Return how many messages of the outermost call are kept; later ones are kept, too.

    Whoever may undo a run asks for it before the run.
    """
    log = _make_log() if _newest.is_used else None
    return 0 if log is None else log.position


def rewind_log(position: int) -> None:
    """Go back to a place in the log, since what came after it is undone and runs again."""
    log = _newest.log
    if log is not None and log.call is open_calls.before:
        log.position = position
