"""What of Python's state a recorded call depends on, and whether it is still so.

A program knows nothing of Python. So what the function can be seen to reach (its closure, its
defaults, the object it is bound to, the globals that it or a function it calls names, and modules,
containers and objects in these) is compared with each call, by identity.
"""

from __future__ import annotations

import functools
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import torch

from forall._core.remembering import contents, is_a_library, is_library, names_of
from forall._programs.holding import holding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import CellType

_UNSET = object()
_DEEP = 4  # objects in objects
_MOST = 10_000  # things that are watched
_LEAVES = (
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
)


class Guards:
    """The state that a function can be seen to reach, as it is now."""

    def __init__(self, func: Callable, given: Iterable[Any] = ()) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        self._cells: list[tuple[CellType, Any]] = []
        self._attributes: list[tuple[FunctionType, str, Any]] = []
        self._names: list[tuple[dict[str, Any], str, Any]] = []
        self._dicts: list[tuple[dict, tuple, tuple]] = []
        self._lists: list[tuple[Any, tuple]] = []
        self._sets: list[tuple[Any, Any]] = []
        self._watched: list[torch.Tensor] = []
        self._holding: Callable[[], bool] | None = None
        self.too_many = False  # to be watched with each call
        self._seen: set[int] = set()
        self._held: list[Any] = []  # so that no other object takes one's identity
        self._take(func, _DEEP)
        for value in given:
            self._take(value, _DEEP)

    def hold(self) -> bool:
        """Whether everything is as it was."""
        if self._holding is None:
            self._holding = holding(
                self._cells,
                self._attributes,
                self._names,
                self._dicts,
                self._lists,
                self._watched,
            )
        return self._holding() and all(known == copy for known, copy in self._sets)

    def watch(self, tensors: Iterable[torch.Tensor]) -> None:
        """These are read by the program: they must stay what they are, but for their numbers."""
        self._watched, self._holding = [*tensors], None

    def _take(self, value: Any, depth: int) -> None:
        if isinstance(value, _LEAVES) or id(value) in self._seen or self.too_many:
            return
        self.too_many = len(self._held) >= _MOST
        self._seen.add(id(value))
        self._held.append(value)
        if isinstance(value, torch.Tensor):
            self.tensors[id(value)] = value
        elif isinstance(value, dict):
            self._dicts.append((value, tuple(value), tuple(value.values())))
            self._all(value.values(), depth)
        elif isinstance(value, (list, tuple)) or type(value).__name__ == "deque":
            if not isinstance(value, tuple):
                self._lists.append((value, tuple(value)))
            self._all(value, depth)
        elif isinstance(value, (set, frozenset)):
            self._sets.append((value, value.copy()))
            self._all(value, depth)
        elif isinstance(value, functools.partial):
            self._all((value.func, value.args, value.keywords), depth)
        elif isinstance(value, MethodType):
            self._all((value.__func__, value.__self__), depth)
        elif isinstance(value, FunctionType):
            self._function(value, depth)
        elif isinstance(value, type):
            if not is_a_library(value):
                self._all((dict(vars(value)).values()), depth)
        elif not isinstance(value, (ModuleType, BuiltinFunctionType)):
            self._object(value, depth)

    def _all(self, values: Iterable[Any], depth: int) -> None:
        for value in values:
            self._take(value, depth)

    def _function(self, func: FunctionType, depth: int) -> None:
        if func.__globals__.get("__name__", "").partition(".")[0] == "forall":
            for cell in func.__closure__ or ():  # ours never change, nor what they are bound to
                self._take(contents(cell), depth)
            return
        for name in ("__code__", "__defaults__", "__kwdefaults__"):
            value = getattr(func, name)
            self._attributes.append((func, name, value))
            self._take(value, depth)
        for cell in func.__closure__ or ():
            value = contents(cell)
            self._cells.append((cell, value))
            self._take(value, depth)
        if is_a_library(func):
            return
        self._named(func.__globals__, names_of(func.__code__)[0], depth)

    def _named(self, names: dict[str, Any], wanted: Iterable[str], depth: int) -> None:
        """What these names stand for; of a module of the user's, its names among them too."""
        for name in wanted:
            value = names.get(name, _UNSET)
            if value is _UNSET:
                continue
            self._names.append((names, name, value))
            if isinstance(value, ModuleType) and not is_library(value.__name__):
                if id(value) not in self._seen:
                    self._seen.add(id(value))
                    self._named(vars(value), wanted, depth)
            else:
                self._take(value, depth)

    def _object(self, thing: Any, depth: int) -> None:
        """A module with all modules in it; of other objects so many, one in another."""
        if not isinstance(thing, torch.nn.Module):
            depth -= 1
        if depth:
            self._take(type(thing), depth)
            state = getattr(thing, "__dict__", None)
            if type(state) is dict:
                self._take(state, depth)
