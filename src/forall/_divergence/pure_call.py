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
from forall._vmap.batched_tensor import Batched
from forall._vmap.fast_path import raw_stack
from forall._vmap.fast_path.raw_stack import (
    Aside,
    Bare,
    bared,
    may_be_bare,
    wrapped,
)

NOTHING: Any = object()
_CONSTANTS = frozenset({int, float, bool, str, type(None)})
_PURE = frozenset({sum, zip, range, len, enumerate, reversed, list, tuple, abs, min, max})
_OF_A_LIST = frozenset({"append", "extend"})  # any list is the function's own: none is passed in


def known(value: Any) -> Any:
    """Return a value from outside as a pure function takes it: a number, a raw stack, or a tuple.

    Raise `Aside` for any other value.
    """
    kind = type(value)
    if kind in _CONSTANTS or kind is Bare or (kind is tuple and _is_constant(value)):
        return value
    if kind is Batched:
        return bared(value, stack.top)
    raise Aside


def _is_constant(values: tuple) -> bool:
    return all(type(v) in _CONSTANTS or (type(v) is tuple and _is_constant(v)) for v in values)


def part(module: Any, name: str) -> Any:
    """Return ``module.name``; raise `Aside` for an object that is no module."""
    if type(module) is not types.ModuleType:
        raise Aside
    return getattr(module, name)


def does(f: Any) -> Any:
    """Return the form of a pure function that runs on raw stacks."""
    if f in _PURE or (type(f) is types.BuiltinFunctionType and f.__module__ == "math"):
        return f
    if type(f) is types.FunctionType:
        computes = straight(f)
        if computes is not None:
            return computes
    return raw_stack.does(f)


def straight(f: types.FunctionType) -> Any:
    """Return the form of a user's function that runs on raw stacks; None if it is not pure."""
    from forall._divergence.converted_call import plan_of  # which calls this

    plan = plan_of(f)
    computes = plan.straight if plan is not None and plan.tries else None
    given = (*(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values())
    return computes and _is_constant(given) and computes.function(f)


def method(owner: Any, name: str) -> Any:
    """Return the method ``owner.name`` in the form that runs on raw stacks."""
    kind = type(owner)
    if kind is types.ModuleType:
        return does(getattr(owner, name))
    if kind is list and name in _OF_A_LIST:
        return getattr(owner, name)
    owner = known(owner)
    if type(owner) is not Bare:
        raise Aside
    return functools.partial(raw_stack.does(getattr(torch.Tensor, name, None)), owner)


def called(plan: Any, f: types.FunctionType, args: tuple, kwargs: dict) -> Any:
    """Call ``f(*args, **kwargs)`` on raw stacks, or return `NOTHING` if it needs wrappers."""
    if not plan.tries or not may_be_bare():
        return NOTHING
    with functions_off(), no_dispatch():
        try:
            found: dict[int, Any] = {}  # one stack for each value, to preserve identity
            given = [found.setdefault(id(a), known(a)) for a in args]
            named = {k: found.setdefault(id(a), known(a)) for k, a in kwargs.items()}
        except Aside:
            return NOTHING
        if not any(type(a) is Bare for a in found.values()):
            return NOTHING
        try:
            computes = straight(f)
            return given_back(computes(*given, **named)) if computes else NOTHING
        except Exception:  # noqa: BLE001 - the call with wrappers raises it properly
            plan.tries -= 1
            return NOTHING


def given_back(out: Any) -> Any:
    """Wrap the raw stacks of a result for the user."""
    kind = type(out)
    if kind is Bare:
        return wrapped(out, stack.top)
    if kind is tuple:
        items = [given_back(v) for v in out]
        return out if all(a is b for a, b in zip(items, out, strict=True)) else tuple(items)
    if kind is list:
        out[:] = map(given_back, out)
        return out
    if kind not in _CONSTANTS:
        raise Aside
    return out
