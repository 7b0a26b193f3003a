"""The entry point: convert and run a function. `Frame` is the one name that its code refers to."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from forall._ast_rewrite import Refusal, find_template, set_runtime
from forall._compat import pytree
from forall._divergence import py_builtins as _builtin
from forall._divergence.converted_call import call_converted, report_refusal, wrap_converted
from forall._divergence.frame import Frame
from forall._divergence.heap import Mixed, Unsplittable
from forall._divergence.join import UNDEFINED, merge, unify_varying
from forall._divergence.pure_call import (
    find_outside_method,
    find_pure_form,
    find_pure_method,
    get_module_attribute,
    take_outside_value,
)
from forall._divergence.report import Report
from forall._divergence.thread_state import ConvertedRun, thread
from forall._divergence.user_code import is_library_code
from forall._divergence.varying import Varying, make_kinds_error


class _Runtime:
    Frame = Frame
    known, part, does = map(
        staticmethod, (take_outside_value, get_module_attribute, find_pure_form)
    )
    method, outside_method = map(staticmethod, (find_pure_method, find_outside_method))


set_runtime(_Runtime)
del _builtin


def _contents_within(world: Any, value: Any) -> Any:
    """Return the contents of an object for the lanes of this active set."""
    mixed = thread.mixed.get(id(value))
    return value if mixed is None else mixed[1].restrict_to(world)


def convert(f: Callable, *, strict: bool = False) -> Callable | Refusal:
    """Convert ``f`` so that its examples can diverge and reconverge; or return the reason why not.

    A callable that is no Python function (a module, a partial, a builtin) is never refused: each
    function that it calls is converted, or rerun for each group of examples.

    With ``strict``, no varying value that is not a tensor may outlive the call, neither in its
    result nor in an object: the call raises `Unsplittable`.
    """
    if isinstance(f, types.FunctionType) and not is_library_code(f.__code__):
        found = find_template(f)
        if isinstance(found, Refusal):
            if thread.report is not None:
                report_refusal(f, found)
            return found

    def run(*args: Any, **kwargs: Any) -> Any:
        with ConvertedRun(strict=strict):
            result = call_converted(f, *args, **kwargs)
            return require_uniform(result) if strict else unify_varying(result, _contents_within)

    return run


def require_uniform(result: Any) -> Any:
    """Return a result as one value of all lanes; raise if it varies."""
    result = unify_varying(result, _contents_within)
    for n, leaf in enumerate(pytree.get_leaves(result)):
        if type(leaf) in (Varying, Mixed):
            raise make_kinds_error(result, n, leaf)
    return result


def is_running() -> bool:
    """True if converted code runs in this thread."""
    return thread.runs > 0


def convert_if_running(f: Callable) -> Callable:
    """Return a function that a transform is to call, converted if converted code is running."""
    return wrap_uniform(f) if thread.runs else f


def wrap_uniform(f: Callable) -> Callable:
    def run(*args: Any, **kwargs: Any) -> Any:
        return require_uniform(call_converted(f, *args, **kwargs))

    return run


__all__ = [
    "UNDEFINED",
    "Frame",
    "Refusal",
    "Report",
    "Unsplittable",
    "Varying",
    "call_converted",
    "convert",
    "wrap_converted",
    "merge",
    "unify_varying",
    "thread",
]
