"""What converted code finds under its one free name of ours: `Frame`. And the way in."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from forall._lanes import builtin as _builtin
from forall._lanes.calls import call, converted, tell
from forall._lanes.frame import Frame
from forall._lanes.heap import Mixed, SeveralKinds, Unsplittable
from forall._lanes.libraries import is_library
from forall._lanes.merging import UNDEFINED, merge, settled
from forall._lanes.report import Report
from forall._lanes.state import converted_run, thread
from forall._lanes.straightly import does, known, method, part
from forall._lanes.varying import Varying
from forall._lanes.words import use, words
from forall._source import Refused, runs_with, template
from forall._torch import trees


class _Runtime:
    Frame = Frame
    known, part, does, method = map(staticmethod, (known, part, does, method))


runs_with(_Runtime)
del _builtin


def _content(world: Any, value: Any) -> Any:
    """What an object holds for lanes of this world."""
    mixed = thread.mixed.get(id(value))
    return value if mixed is None else mixed[1].within(world)


def convert(f: Callable, *, strict: bool = False) -> Callable | Refused:
    """f, run so that its examples can part and meet again; or why not.

    What is no function written in Python (a module, a partial, a builtin) is never refused: each
    of the functions that it calls is converted, or run again for each group of examples.

    With ``strict`` nothing that differs without being a tensor may outlive the call, neither in its
    result nor in an object: `Unsplittable`.
    """
    if isinstance(f, types.FunctionType) and not is_library(f.__code__):
        found = template(f)
        if isinstance(found, Refused):
            if thread.report is not None:
                tell(f, found)
            return found

    def run(*args: Any, **kwargs: Any) -> Any:
        with converted_run(strict=strict):
            result = call(f, *args, **kwargs)
            return whole(result) if strict else settled(result, _content)

    return run


def whole(result: Any) -> Any:
    """A result that all lanes have in common."""
    result = settled(result, _content)
    for leaf in trees.leaves(result):
        if type(leaf) in (Varying, Mixed):
            raise SeveralKinds("results of several kinds")
    return result


def is_running() -> bool:
    """Whether converted code runs in this thread."""
    return thread.runs > 0


def users(f: Callable) -> Callable:
    """A function that a transform is to call: converted where its examples may part."""
    return run_converted(f) if thread.runs else f


def run_converted(f: Callable) -> Callable:
    def run(*args: Any, **kwargs: Any) -> Any:
        return whole(call(f, *args, **kwargs))

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
