"""The kinds of things of Python's that a function can reach, as the guards tell them apart."""

from __future__ import annotations

import functools
import gc
import logging
import sys
from collections import deque
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GenericAlias,
    MethodType,
    ModuleType,
    UnionType,
)
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from forall._core.remembering import Weakly

if TYPE_CHECKING:
    from collections.abc import Mapping

MOST = 10_000  # things that are watched
CONTAINERS = (dict, list, tuple, set, frozenset, deque, bytearray)
TELLERS = (logging.Logger, logging.Handler, logging.LoggerAdapter)  # have no say in results
CACHED = functools._lru_cache_wrapper
VIEWS = (type({}.keys()), type({}.values()), type({}.items()))
WRAPPERS = (
    MethodType,
    staticmethod,
    classmethod,
    functools.partial,
    property,
    BuiltinFunctionType,
)
LEAVES = (
    CodeType,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.Size,
    GenericAlias,
    UnionType,
    RemovableHandle,  # of hooks, which are looked at where they hang
)


def is_hint(value: Any) -> bool:
    """Whether it is a hint of typing's, of which only the reader makes something."""
    return type(value).__module__ == "typing"


def is_array(value: Any) -> bool:
    return "numpy" in sys.modules and isinstance(value, sys.modules["numpy"].ndarray)


def leads_to(wanted: set[int], held: Mapping[int, Any]) -> bool:
    """Whether any of these can be come to from what is held, as far as the collector can tell."""
    left, seen = [x for x in held.values() if not isinstance(x, Weakly)], set()
    while left:
        x = left.pop()
        if id(x) in wanted or len(seen) > MOST:
            return True
        if id(x) in seen or isinstance(x, (ModuleType, type, torch.Tensor)):
            continue
        seen.add(id(x))
        if isinstance(x, FunctionType):  # its globals lead everywhere
            found = [x.__closure__, x.__defaults__, x.__kwdefaults__, x.__dict__]
        else:
            found = gc.get_referents(x)
        left += filter(gc.is_tracked, found)
    return False
