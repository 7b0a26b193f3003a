"""What converted code finds under its one free name of ours: `Frame`. And the way in."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from forall._ast_rewrite import Refused, runs_with, template
from forall._compat import pytree
from forall._divergence import py_builtins as _builtin
from forall._divergence.converted_call import call, converted, tell
from forall._divergence.frame import Frame
from forall._divergence.heap import Mixed, SeveralKinds, Unsplittable
from forall._divergence.join import UNDEFINED, merge, settled
from forall._divergence.pure_call import (
    does,
    known,
    method,
    part,
)
from forall._divergence.report import Report
from forall._divergence.thread_state import converted_run, thread
from forall._divergence.user_code import is_library
from forall._divergence.varying import Varying
from forall._divergence.vmap_interface import use, words


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
    for leaf in pytree.leaves(result):
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
