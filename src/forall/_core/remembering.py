"""What a user's function may have changed of Python's own state, so that it can run once more.

Before any part of a function runs twice, the containers that it can reach by its arguments, its
closure and the globals that it names are put back as they were. What lies deeper (an object in an
object) and what leaves the process (print, files) is not.
"""

from __future__ import annotations

import dis
import functools
from collections import deque
from types import CellType, CodeType, FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_CONTAINERS = (list, dict, set, bytearray, deque)
_MOST = 10_000  # entries: a longer container is data, not a record of calls
_UNSET = object()


class Remembered:
    """The state of what a function can reach, taken before it runs."""

    __slots__ = ("cells", "copies", "globals", "names")

    def __init__(self, func: Callable, given: Iterable[Any]) -> None:
        self.copies: dict[int, tuple[Any, Any]] = {}
        self.cells: list[tuple[CellType, Any]] = []
        self.globals: dict[str, Any] = {}
        self.names: dict[str, Any] = {}
        for value in given:
            self._take(value, 3)
        self._function(func)

    def _function(self, func: Any) -> None:
        while isinstance(func, functools.partial):
            for value in (*func.args, *func.keywords.values()):
                self._take(value, 2)
            func = func.func
        owner = getattr(func, "__self__", None)
        if owner is not None:
            self._object(owner)
            func = getattr(func, "__func__", func)
        if not isinstance(func, FunctionType):
            self._object(func)
            return
        for cell in func.__closure__ or ():
            value = _contents(cell)
            self.cells.append((cell, value))
            if isinstance(value, FunctionType):
                for inner in value.__closure__ or ():
                    self.cells.append((inner, _contents(inner)))
                    self._take(_contents(inner), 2)
            self._take(value, 2)
        self.globals = func.__globals__
        read, written = _names(func.__code__)
        for name in read:
            value = self.globals.get(name, _UNSET)
            if isinstance(value, _CONTAINERS):
                self._take(value, 2)
            if name in written:
                self.names[name] = value

    def _object(self, thing: Any) -> None:
        state = getattr(thing, "__dict__", None)
        if type(state) is dict:
            self._take(state, 2)

    def _take(self, value: Any, depth: int) -> None:
        if not isinstance(value, _CONTAINERS):
            if depth > 1 and type(value).__module__ not in _NOT_THE_USERS:
                self._object(value)
            if isinstance(value, tuple) and depth:
                for inner in value:
                    self._take(inner, depth - 1)
            return
        if id(value) in self.copies or len(value) > _MOST:
            return
        self.copies[id(value)] = (value, value.copy())
        if depth and not isinstance(value, bytearray):
            for inner in value.values() if isinstance(value, dict) else value:
                if isinstance(inner, _CONTAINERS):
                    self._take(inner, depth - 1)

    def restore(self) -> None:
        for cell, value in self.cells:
            if _contents(cell) is not value:
                if value is _UNSET:
                    del cell.cell_contents
                else:
                    cell.cell_contents = value
        for name, value in self.names.items():
            if value is _UNSET:
                self.globals.pop(name, None)
            else:
                self.globals[name] = value
        for container, copy in self.copies.values():
            if isinstance(container, (list, bytearray)):
                container[:] = copy
            else:
                container.clear()
                (container.extend if isinstance(container, deque) else container.update)(copy)


_NOT_THE_USERS = frozenset({"builtins", "torch", "numpy"})


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _UNSET


@functools.lru_cache(maxsize=4096)
def _names(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The globals that a function, or one written inside it, names and rebinds."""
    written = {i.argval for i in dis.get_instructions(code) if i.opname == "STORE_GLOBAL"}
    read = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            more, rebound = _names(constant)
            read |= more
            written |= rebound
    return frozenset(read | written), frozenset(written)
