"""The outermost call of a transform: what has to be set up around it, once for each thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.compiler import is_dynamo_compiling as is_compiling

from forall._compat import exception_safety, export_tracer, trace_modes

if TYPE_CHECKING:
    from collections.abc import Callable


def call_transform(func: Callable, /, *args: Any, **kwargs: Any) -> Any:
    """Return ``func(*args, **kwargs)``; if that fails, this thread's state is as it was before.

    A call within another one, or within a function that Dynamo compiles, is made as it is. A
    tracer that is on before autograd records the call after autograd.
    """
    if is_compiling() or exception_safety.is_inside_call():
        return func(*args, **kwargs)
    if trace_modes.is_pre_dispatch_tracing():
        return export_tracer.call_after_autograd(call_transform, func, *args, **kwargs)
    return exception_safety.call_and_restore(func, *args, **kwargs)
