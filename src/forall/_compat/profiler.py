"""Names for calls in a profile, computed only while a profiler of torch's is on."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch.compiler import is_dynamo_compiling as is_compiling

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F", bound="Callable")

is_profiling = torch._C._autograd._profiler_enabled


def make_span(name: str) -> Any:
    """Return a context under this name. It is no operator, so modes do not see it."""
    return torch._C._profiler._RecordFunctionFast(f"forall.{name}")


def profile_calls(told: Callable[[Any], str]) -> Callable[[F], F]:
    """Return a decorator for a transform, whose calls get the name ``told(func)`` in a profile."""

    def decorate(transform: F) -> F:
        @functools.wraps(transform)
        def call_in_span(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not is_profiling():
                return transform(*args, **kwargs)
            with make_span(told(args[0] if args else kwargs.get("func"))):
                return transform(*args, **kwargs)

        return cast("F", call_in_span)

    return decorate
