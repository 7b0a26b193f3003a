"""The records of a report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from forall._compat.call_site import SourceLine


class Divergence(NamedTuple):
    """A divergence: a construct, its line, and how many lanes took each side."""

    construct: str
    file: str
    line: int
    sizes: tuple[int, ...]

    @property
    def place(self) -> SourceLine:
        return SourceLine(self.file, self.line)


class Step(NamedTuple):
    """A test, and the examples that ran it together, by their index in the whole batch.

    ``true`` are the examples that went the way of a true test, if they diverged there. It is None
    where all examples went the same way, and where code runs once for each group.
    """

    place: SourceLine
    examples: Sequence[int]
    true: Sequence[int] | None = None


class Function(NamedTuple):
    """A function that was converted, or could not be and why."""

    name: str
    place: str
    why: str = ""
