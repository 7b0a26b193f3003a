"""Functions that are made anew with each call of another, and do what the last one did.

NOTE [functions that are made anew]
    ``u = lambda x: net(x)`` in a training step is another function in each step. It does what the
    last one did where its code is the same and it holds the very same things. So its calls are
    kept with a module that it holds; or in a table, if all that it holds is there for good anyway:
    functions and classes of modules, numbers, words. They are not kept if it holds tensors or other
    objects, which would then be held for good, or be others in the next step.

    What a function holds when it is called may be another thing than when it was transformed; so
    may be what the one holds by now whose program there is. Both are asked with each call.
"""

from __future__ import annotations

from inspect import CO_NESTED
from operator import is_
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module

from forall._core.remembering import contents

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST = 256  # functions in the table, the last ones
_WORDS = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, ModuleType)

table: dict[Any, Any] = {}


def held(func: FunctionType) -> tuple | None:
    """What a function is made of that is made anew; None where it is not, or may be another."""
    try:
        return tuple(_parts(func, 0)) if func.__code__.co_flags & CO_NESTED else None
    except _OfItsOwn:
        return None


def holds(func: Any, before: tuple) -> bool:
    """Whether it is made of the very same things."""
    now = held(func)
    return now is not None and len(now) == len(before) and all(map(is_, now, before))


def home(things: tuple) -> Module | None:
    """The module that the calls of such a function are kept with."""
    return next((x for x in things if isinstance(x, Module)), None)


class _OfItsOwn(Exception):  # noqa: N818 - no error: nothing is kept
    """Something that another function of the same code need not hold."""


def _parts(func: FunctionType, depth: int) -> Iterator[Any]:
    if vars(func) or func.__kwdefaults__ or depth > 3:  # or it holds itself
        raise _OfItsOwn
    yield func.__code__
    yield func.__globals__
    for x in (*(func.__defaults__ or ()), *map(contents, func.__closure__ or ())):
        if type(x) is FunctionType and x.__code__.co_flags & CO_NESTED:
            yield from _parts(x, depth + 1)
        elif isinstance(x, (Module, *_WORDS)) or _is_of_a_module(x):
            yield x
        else:
            raise _OfItsOwn


def _is_of_a_module(x: Any) -> bool:
    if isinstance(x, BuiltinFunctionType):
        return isinstance(x.__self__, ModuleType)
    return isinstance(x, (FunctionType, type)) and "<locals>" not in x.__qualname__
