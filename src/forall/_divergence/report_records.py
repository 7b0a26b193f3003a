"""What a report is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from forall._core.call_site import Place


class Parting(NamedTuple):
    """A construct, where it stands, and how many lanes went each way."""

    construct: str
    file: str
    line: int
    sizes: tuple[int, ...]

    @property
    def place(self) -> Place:
        return Place(self.file, self.line)


class Step(NamedTuple):
    """A test, and the examples that took it together: their numbers in the whole batch."""

    place: Place
    examples: Sequence[int]


class Function(NamedTuple):
    """A function that ran otherwise than it is written."""

    name: str
    place: str
    why: str = ""
