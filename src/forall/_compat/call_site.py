"""Call sites: the line of the user's program that runs now, for messages."""

from __future__ import annotations

import linecache
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forall._compat.devices import PASSES_ON

if TYPE_CHECKING:
    from types import CodeType, FrameType


TORCH, OURS = (
    f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1])
)
_NOT_THE_USERS = (TORCH, OURS)


class SourceLine(NamedTuple):
    """A line of a file."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    def near(self) -> str:
        """Return the place as text, with the path relative to the working directory if inside."""
        file = Path(self.file)
        here = Path.cwd()
        return f"{file.relative_to(here) if file.is_relative_to(here) else file}:{self.line}"

    @classmethod
    def from_code(cls, code: CodeType) -> SourceLine:
        """Return the first line of a function."""
        return cls(code.co_filename, code.co_firstlineno)

    def text(self) -> str:
        """Return the source text of the line, or "" if the file cannot be read."""
        return linecache.getline(self.file, self.line).strip()


def find_users_frame(frame: FrameType, others: tuple[str, ...] = _NOT_THE_USERS) -> FrameType:
    """Return the innermost frame, from this one outwards, whose file is in none of these folders.

    Frames of torch's mode for a default device, which forwards each call, are skipped too.
    """
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(others) or frame.f_code is PASSES_ON
    ):
        frame = frame.f_back
    return frame


def find_users_line_within(code: CodeType) -> SourceLine | None:
    """Return the innermost line that is the user's, if it runs within a call of this function."""
    frame = line = find_users_frame(sys._getframe(1))
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return None if frame is None else SourceLine(line.f_code.co_filename, line.f_lineno)


def find_users_instruction() -> tuple[CodeType, int]:
    """Return the innermost instruction that is the user's. Finding its line would take longer."""
    frame = find_users_frame(sys._getframe(1))
    return frame.f_code, frame.f_lasti


def find_users_line() -> SourceLine:
    """Return the innermost line that is neither ours nor torch's."""
    frame = find_users_frame(sys._getframe(1))
    return SourceLine(frame.f_code.co_filename, frame.f_lineno)


_WARNED: dict[Any, Any] = {}  # the registry of the standard library's warnings
_FIRST: dict[str, SourceLine] = {}


def warn_users_line(text: str, category: type[Warning]) -> None:
    """Warn at the user's line; once for each text, unless the user's filters show more."""
    place = _FIRST.get(text)
    if place is None or (text, category, place.line) not in _WARNED:
        place = _FIRST[text] = find_users_line()
    warnings.warn_explicit(text, category, *place, registry=_WARNED)
