"""What converted code finds under its one free name of ours: `Frame`. And the way in."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from forall._lanes import builtin as _builtin
from forall._lanes.calls import call, converted, is_library, tell
from forall._lanes.frame import Frame
from forall._lanes.heap import Unsplittable
from forall._lanes.merging import UNDEFINED, merge, settled
from forall._lanes.report import Report
from forall._lanes.state import thread
from forall._lanes.varying import Varying
from forall._lanes.words import use, words
from forall._source import Refused, runs_with, template


class _Runtime:
    Frame = Frame


runs_with(_Runtime)
del _builtin


def _content(world: Any, value: Any) -> Any:
    """What an object holds for lanes of this world."""
    mixed = thread.mixed.get(id(value))
    return value if mixed is None else mixed[1].within(world)


def convert(f: Callable) -> Callable | Refused:
    """f, run so that its examples can part and meet again; or why not.

    What is no function written in Python (a module, a partial, a builtin) is never refused: each
    of the functions that it calls is converted, or run again for each group of examples.
    """
    if isinstance(f, types.FunctionType) and not is_library(
        f.__code__.co_filename, f.__code__.co_name
    ):
        found = template(f)
        if isinstance(found, Refused):
            if thread.report is not None:
                tell(f, found)
            return found

    def run(*args: Any, **kwargs: Any) -> Any:
        return settled(call(f, *args, **kwargs), _content)

    return run


__all__ = [
    "UNDEFINED",
    "Frame",
    "Refused",
    "Report",
    "Unsplittable",
    "Varying",
    "call",
    "convert",
    "converted",
    "merge",
    "settled",
    "thread",
    "use",
    "words",
]
