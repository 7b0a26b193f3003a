"""Where in the user's program something happened."""

from __future__ import annotations

import linecache
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from forall._compat.devices import PASSES_ON

if TYPE_CHECKING:
    from types import CodeType, FrameType


TORCH, OURS = (
    f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1])
)
_NOT_THE_USERS = (TORCH, OURS)


class Place(NamedTuple):
    """A line of a file."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    def near(self) -> str:
        """The same, as short as it is clear where the program was started."""
        file = Path(self.file)
        here = Path.cwd()
        return f"{file.relative_to(here) if file.is_relative_to(here) else file}:{self.line}"

    @classmethod
    def of(cls, code: CodeType) -> Place:
        """Where a function begins."""
        return cls(code.co_filename, code.co_firstlineno)

    def text(self) -> str:
        """What is written there, as far as it is known."""
        return linecache.getline(self.file, self.line).strip()


def users_frame(frame: FrameType, others: tuple[str, ...] = _NOT_THE_USERS) -> FrameType:
    """The innermost frame, from this one outwards, whose code is none of ``others``'.

    Nor is it that of torch's mode for a default device, which passes each call on.
    """
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(others) or frame.f_code is PASSES_ON
    ):
        frame = frame.f_back
    return frame


def users_instruction() -> tuple[CodeType, int]:
    """The innermost instruction that is neither ours nor torch's: to find its line takes longer."""
    frame = users_frame(sys._getframe(1))
    return frame.f_code, frame.f_lasti


def users_line() -> Place:
    """The innermost line that is neither ours nor torch's."""
    frame = users_frame(sys._getframe(1))
    return Place(frame.f_code.co_filename, frame.f_lineno)
