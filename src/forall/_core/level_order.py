"""The order in which levels were entered."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forall._core.levels import Level

_numbers = count(1)


def numbered(before: Level | None) -> tuple[Any, Any]:
    """Return a new level's number, after all others or just ``before`` one; and the room below."""
    n = next(_numbers)
    if before is None:
        return n, 1
    from fractions import Fraction  # few need it

    below = before.room * Fraction(1, n + 1)
    return before.number - below, below / n
