"""Calls of pure functions on raw stacks, without wrapper tensors.

`_ast_rewrite.pure_compute` rewrites such a function so that it calls this module for each value
from outside and for each function that it calls. If one of them needs wrappers, the call is
abandoned midway, which has no side effects.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch

from forall._compat.dispatch_state import functions_off, no_dispatch
from forall._core.levels import stack
from forall._divergence.thread_state import thread
from forall._vmap.batched_tensor import BatchedTensor
from forall._vmap.fast_path import raw_stack
from forall._vmap.fast_path.raw_stack import (
    LeaveFastPath,
    RawStack,
    can_use_raw_stacks,
    unwrap_to_raw,
    wrap_raw,
)

NOTHING: Any = object()
_CONSTANTS = frozenset({int, float, bool, str, type(None)})
_PURE = frozenset({sum, zip, range, len, enumerate, reversed, list, tuple, abs, min, max})
_OF_A_LIST = frozenset({"append", "extend"})  # of a list of the function's own: none is passed in


def take_outside_value(value: Any) -> Any:
    """Return a value from outside as a pure function takes it: a number, a raw stack, or a tuple.

    Raise `LeaveFastPath` for any other value.
    """
    kind = type(value)
    if kind in _CONSTANTS or kind is RawStack or (kind is tuple and _is_constant(value)):
        return value
    if kind is BatchedTensor:
        return unwrap_to_raw(value, stack.top)
    raise LeaveFastPath


def _is_constant(values: tuple) -> bool:
    return all(type(v) in _CONSTANTS or (type(v) is tuple and _is_constant(v)) for v in values)


def get_module_attribute(module: Any, name: str) -> Any:
    """Return ``module.name``; raise `LeaveFastPath` for an object that is no module."""
    if type(module) is not types.ModuleType:
        raise LeaveFastPath
    return getattr(module, name)


def find_pure_form(f: Any) -> Any:
    """Return the form of a pure function that runs on raw stacks."""
    if f in _PURE or (type(f) is types.BuiltinFunctionType and f.__module__ == "math"):
        return f
    if type(f) is types.FunctionType:
        computes = find_users_pure_form(f)
        if computes is not None:
            return computes
    return raw_stack.find_raw_version(f)


def find_users_pure_form(f: types.FunctionType) -> Any:
    """Return the form of a user's function that runs on raw stacks; None if it is not pure."""
    plan = thread.find_template(f)
    computes = plan.straight if plan is not None and plan.tries else None
    given = (*(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values())
    return computes and _is_constant(given) and computes.make_function(f)


def find_outside_method(owner: Any, name: str) -> Any:
    """Return the method ``owner.name`` of a value from outside, as `find_pure_method` does.

    The owner may be a module, but no list: the function would change what others see.
    """
    if type(owner) is types.ModuleType:
        return find_pure_form(getattr(owner, name))
    return find_pure_method(take_outside_value(owner), name)


def find_pure_method(owner: Any, name: str) -> Any:
    """Return the method ``owner.name`` in the form that runs on raw stacks."""
    if type(owner) is list and name in _OF_A_LIST:
        return getattr(owner, name)
    owner = take_outside_value(owner)
    if type(owner) is not RawStack:
        raise LeaveFastPath
    return functools.partial(raw_stack.find_raw_version(getattr(torch.Tensor, name, None)), owner)


def call_pure(plan: Any, f: types.FunctionType, args: tuple, kwargs: dict) -> Any:
    """Call ``f(*args, **kwargs)`` on raw stacks, or return `NOTHING` if it needs wrappers."""
    if not plan.tries or not can_use_raw_stacks():
        return NOTHING
    with functions_off(), no_dispatch():
        try:
            found: dict[int, Any] = {}  # one stack for each value, to preserve identity
            given = [found.setdefault(id(a), take_outside_value(a)) for a in args]
            named = {k: found.setdefault(id(a), take_outside_value(a)) for k, a in kwargs.items()}
        except LeaveFastPath:
            return NOTHING
        if not any(type(a) is RawStack for a in found.values()):
            return NOTHING
        try:
            computes = find_users_pure_form(f)
            return wrap_result(computes(*given, **named)) if computes else NOTHING
        except Exception:  # noqa: BLE001 - the call with wrappers raises it properly
            plan.tries -= 1
            return NOTHING


def wrap_result(out: Any) -> Any:
    """Wrap the raw stacks of a result for the user."""
    kind = type(out)
    if kind is RawStack:
        return wrap_raw(out, stack.top)
    if kind is tuple:
        items = [wrap_result(v) for v in out]
        return out if all(a is b for a, b in zip(items, out, strict=True)) else tuple(items)
    if kind is list:
        out[:] = map(wrap_result, out)
        return out
    if kind not in _CONSTANTS:
        raise LeaveFastPath
    return out
