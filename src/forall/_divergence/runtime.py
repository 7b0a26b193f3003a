"""The entry point: convert and run a function. `Frame` is the one name that its code refers to."""

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
    """Return the contents of an object for the lanes of this active set."""
    mixed = thread.mixed.get(id(value))
    return value if mixed is None else mixed[1].within(world)


def convert(f: Callable, *, strict: bool = False) -> Callable | Refused:
    """Convert ``f`` so that its examples can diverge and reconverge; or return the reason why not.

    A callable that is no Python function (a module, a partial, a builtin) is never refused: each
    function that it calls is converted, or rerun for each group of examples.

    With ``strict``, no varying value that is not a tensor may outlive the call, neither in its
    result nor in an object: the call raises `Unsplittable`.
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
    """Return a result as one value of all lanes; raise if it varies."""
    result = settled(result, _content)
    for leaf in pytree.leaves(result):
        if type(leaf) in (Varying, Mixed):
            raise SeveralKinds("results of several kinds")
    return result


def is_running() -> bool:
    """True if converted code runs in this thread."""
    return thread.runs > 0


def users(f: Callable) -> Callable:
    """Return a function that a transform is to call, converted if converted code is running."""
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
