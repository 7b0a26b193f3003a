"""The outermost call of a transform: what has to be set up around it, once for each thread.

If it fails, this thread's state is as it was before. See NOTE [an exception between two
instructions] in `exception_safety`.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling as is_compiling

from forall._compat import export_tracer
from forall._compat.exception_safety import (
    IDLE,
    PLACES,
    PUT_BACK,
    first_call,
    list_dispatch_modes,
    list_function_modes,
    open_calls,
)
from forall._compat.private_api import (
    BEFORE_AUTOGRAD,
    count_all_function_modes,
    count_dispatch_modes,
    is_key_included,
    pop_functions,
    pop_mode,
    push_functions,
    push_mode,
    subclass_functions_are_on,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_records = torch.is_grad_enabled
_is_forward_on = torch._C._is_fwd_grad_enabled
_keeps_casts = torch.is_autocast_cache_enabled

_guards: list[Any] = []


def call_transform(func: Callable, /, *args: Any, **kwargs: Any) -> Any:
    """Return ``func(*args, **kwargs)``; if that fails, this thread's state is as it was before.

    A call within another one, or within a function that Dynamo compiles, is made as it is. A
    tracer that is on before autograd records the call after autograd.
    """
    if is_compiling() or open_calls.before is not None:
        return func(*args, **kwargs)
    if is_key_included(BEFORE_AUTOGRAD):
        return export_tracer.call_after_autograd(call_transform, func, *args, **kwargs)
    first_call.was_made = True
    try:
        open_calls.before = _take_snapshot()
        result = func(*args, **kwargs)
        open_calls.before = None
    except BaseException:
        before, open_calls.before = open_calls.before, None
        if before is not None:
            _restore_snapshot(before)
        raise
    return result


def _enter_for_good(guard: Any) -> None:
    """Enter a context of torch's for good, and keep it: dropping it would undo its change."""
    guard.__enter__()
    _guards.append(guard)


def _take_snapshot() -> tuple:
    """Return this thread's state of torch and of forall."""
    dicts = open_calls.dicts
    if len(dicts) != len(PLACES):
        dicts[:] = map(vars, PLACES)
    return (
        len(open_calls.open),
        subclass_functions_are_on(),
        _records(),
        _is_forward_on(),
        forward_ad._current_level,
        _keeps_casts(),
        list_dispatch_modes() if count_dispatch_modes() else (),
        list_function_modes() if count_all_function_modes() else (),
        [*map(dict.copy, dicts)],
    )


def _restore_snapshot(before: tuple) -> None:
    """Restore all state that has changed."""
    opened, on, grad, forward, level, caches, dispatch, function, ours = before
    while len(open_calls.open) > opened:
        with contextlib.suppress(Exception):  # its state may have been changed by others
            open_calls.open.pop().close()
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        left = _restore_modes(list_dispatch_modes, dispatch, lambda: pop_mode(None), push_mode)
        _restore_modes(list_function_modes, function, pop_functions, push_functions)
        torch.set_autocast_cache_enabled(caches)
        for tell in PUT_BACK:
            tell(left, level)
        for place in IDLE:
            vars(place).clear()
        for now, was in zip(open_calls.dicts, ours, strict=False):
            if now != was:
                now.clear()
                now.update(was)
    if on and not subclass_functions_are_on():
        _enter_for_good(torch._C._EnableTorchFunction())
    torch._C._set_grad_enabled(grad)
    torch._C._set_fwd_grad_enabled(forward)


def _restore_modes(found: Callable[[], tuple], was: tuple, pop: Callable, push: Callable) -> list:
    """Restore a stack of modes; return those that were left on."""
    now = found()
    same = 0
    for a, b in zip(now, was, strict=False):
        if a is not b:
            break
        same += 1
    for _ in now[same:]:
        pop()
    for mode in was[same:]:
        push(mode)
    return [*now[same:]]
