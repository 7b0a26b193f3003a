"""A mapping and a set of code objects that drop an entry when its code object dies."""

from __future__ import annotations

import functools
import inspect
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload
from weakref import ref

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

V = TypeVar("V")
D = TypeVar("D")


class CodeTable(Generic[V]):
    """A mapping from code objects that does not keep them alive.

    Keys are compared by identity. A ``WeakKeyDictionary`` would hash the code object, for which
    Python reads all of its instructions each time: a microsecond of every call.
    """

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        self._kept: dict[int, tuple[ref[CodeType], V]] = {}

    def __contains__(self, code: object) -> bool:
        return id(code) in self._kept

    def __getitem__(self, code: CodeType) -> V:
        return self._kept[id(code)][1]

    def __setitem__(self, code: CodeType, value: V) -> None:
        kept, key = self._kept, id(code)
        kept[key] = ref(code, lambda _: kept.pop(key, None)), value

    @overload
    def get(self, code: CodeType) -> V | None: ...

    @overload
    def get(self, code: CodeType, default: D) -> V | D: ...

    def get(self, code: CodeType, default: D | None = None) -> V | D | None:
        """Return the value of this code object, or the default if it has none."""
        found = self._kept.get(id(code))
        return default if found is None else found[1]

    def setdefault(self, code: CodeType, value: V) -> V:
        """Return the value of this code object, which becomes ``value`` if it has none."""
        if code not in self:
            self[code] = value
        return self[code]


class CodeSet(CodeTable[None]):
    """A set of code objects that does not keep them alive."""

    __slots__ = ()

    def add(self, code: CodeType) -> None:
        """Add this code object to the set."""
        if code not in self:
            self[code] = None


def find_code(func: Any) -> CodeType | None:
    """Return the code of a function, which identifies it even if it is created with each call."""
    if type(func) is BuiltinFunctionType:
        return None
    if type(func) is not FunctionType or "__wrapped__" in vars(func):
        func = inspect.unwrap(func)
        while isinstance(func, functools.partial):
            func = inspect.unwrap(func.func)
        if isinstance(func, torch.nn.Module):
            func = type(func).forward
    return getattr(getattr(func, "__func__", func), "__code__", None)


def walk_codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a function's code object and those of the functions nested in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from walk_codes(constant)
