"""Operators that run once per example, as they have no batching rule: the warning, and counts."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

from forall._compat.exception_safety import contextmanager
from forall._core.errors import warn_slow_path

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Counters(threading.local):
    """The counts that are being made in this thread, one inside the other."""

    def __init__(self) -> None:
        self.now: list[Counter[str]] = []


_counters = _Counters()


@contextmanager
def count_looped_operators() -> Iterator[Counter[str]]:
    """Return a context with a count of the operators that run once per example within it."""
    found: Counter[str] = Counter()
    _counters.now.append(found)
    try:
        yield found
    finally:
        _counters.now[:] = [count for count in _counters.now if count is not found]


def note_looped_operator(name: str, text: str) -> None:
    """Warn by this text that an operator runs once per example, and count it for a report."""
    for count in _counters.now:
        count[name] += 1
    warn_slow_path(text)
