"""Whether everything that a function does can be told from what it can be seen to reach.

`jit` is told that its function is pure. Where nobody says so, a call may be replayed only if this
is certain: each function it can reach is read, name by name, and each name has to lead to something
that does the same with each call and nothing besides (`trusted`), or to what the guards compare.
Whatever is not certain runs as it is.

What changes something that the guards see (a counter, a list of results) needs no care here: the
recording finds it changed. What is looked for is what they cannot see: the clock, Python's random
numbers, files, the screen, a tensor's version.
"""

from __future__ import annotations

import dis
import functools
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType

import torch

from forall._core.remembering import (
    Unwatched,
    contents,
    is_library,
    is_no_users,
    is_ours,
    may_rebind,
    rebound_of,
)
from forall._programs.guards import CONTAINERS, VIEWS, is_array
from forall._torch import trusted
from forall._torch.names import PLAIN

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from forall._programs.guards import Guards

_WRAPPERS = (MappingProxyType, MethodType, staticmethod, classmethod, property, functools.partial)
_METHODS = (MethodDescriptorType, WrapperDescriptorType, MethodWrapperType)
_SKIPPED = frozenset(
    {"CACHE", "PUSH_NULL", "PRECALL", "EXTENDED_ARG", "COPY_FREE_VARS", "RESUME", "NOP"}
)
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"})
_GLOBALS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
_IMPORTS = frozenset({"IMPORT_NAME", "IMPORT_FROM", "IMPORT_STAR"})


def doubt(guards: Guards, *, rebinds: bool = True) -> str | None:
    """What of it is not certain; None where all is. What it names of torch is watched from now.

    A function that stands in for another does not see what that is bound to anew while it runs, so
    there nothing may rebind names of other functions, or of modules.
    """
    if guards.why is not None:
        return guards.why
    reading = _Reading(guards)
    for value in [*guards.reached()]:
        if isinstance(value, FunctionType) and not is_ours(value):
            if trusted.is_trusted(value):
                continue
            why = reading.of(value)
            if not rebinds and may_rebind(value.__code__):
                why = why or f"{value.__qualname__} rebinds names of another function's"
        else:
            why = None if _is_certain(value) else f"it reaches {_named(value)}"
        if why is not None:
            return why
    return None


class _Reading:
    """Functions, read name by name."""

    def __init__(self, guards: Guards) -> None:
        self.guards = guards

    def of(self, func: FunctionType) -> str | None:
        home = func.__globals__
        if is_no_users(func):
            return f"it reaches {_named(func)}"
        cells = zip(func.__code__.co_freevars, func.__closure__ or (), strict=True)
        found = {n: contents(c) for n, c in cells if isinstance(contents(c), ModuleType)}
        for code, modules in _codes(func.__code__, found):
            for way in _ways(code, modules):
                why = self._way(way, modules if way[0] in modules else home)
                if why is not None:
                    return f"{func.__qualname__} {why} ({code.co_filename}:{code.co_firstlineno})"
        return None

    def _way(self, way: list[str], home: dict[str, Any]) -> str | None:
        """Where a way of names leads: `.name` of something unknown, or from a global onwards."""
        first = way[0]
        if not first:
            return _telling(way[1:])
        if first not in home:
            return None if first in trusted.BUILTINS else f"uses {first}"
        value = home[first]
        for i, name in enumerate(way[1:], 1):
            if not isinstance(value, ModuleType):
                return _telling(way[i:])
            inside, value = value, getattr(value, name, None)
            if is_library(inside.__name__) and not isinstance(value, ModuleType):
                if not trusted.is_trusted(value):
                    return f"uses {'.'.join(way[: i + 1])}"
                self.guards.watch_name(vars(inside), name, value)
        return f"names the module {value.__name__}" if isinstance(value, ModuleType) else None


def _telling(names: Iterable[str]) -> str | None:
    return next((f"asks for .{name}" for name in names if name in trusted.TELLING), None)


def _ways(code: CodeType, modules: Collection[str]) -> Iterator[list[str]]:
    """The names that code goes along: from a global or a module that the closure has onwards.

    ["", name] is an attribute of something else.
    """
    way: list[str] = []
    for i in dis.get_instructions(code):
        if i.opname in _SKIPPED:
            continue
        if i.opname in _ATTRIBUTES and way and way[0]:
            way.append(i.argval)
            continue
        if way:
            yield way
            way = []
        if i.opname in _GLOBALS or (i.opname == "LOAD_DEREF" and i.argval in modules):
            way = [i.argval]
        elif i.opname in _ATTRIBUTES:
            yield ["", i.argval]
        elif i.opname in _IMPORTS:
            yield ["import " + str(i.argval)]
    if way:
        yield way


def _codes(
    code: CodeType, modules: dict[str, ModuleType]
) -> Iterator[tuple[CodeType, dict[str, ModuleType]]]:
    """A function's code and that of all written inside it, with the modules its closure has."""
    rebound = {*code.co_cellvars, *rebound_of(code)}
    modules = {n: m for n, m in modules.items() if n not in rebound}
    yield code, modules
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant, modules)


def _is_certain(value: Any) -> bool:
    """Whether the guards see all of a value, or it never changes; functions are read."""
    kind: Any = type(value)
    if kind in CONTAINERS or kind in _WRAPPERS or kind in VIEWS:
        return True
    if trusted.is_inert(value) or is_array(value):
        return True
    if value is ReferenceType:  # the class of those that are judged by what they refer to
        return True
    if isinstance(value, (FunctionType, Unwatched)):
        return True  # ours
    if isinstance(value, torch.Tensor):
        return kind in PLAIN
    if isinstance(value, type):
        if is_no_users(value):
            return trusted.is_trusted(value)
        bases = [b for b in (*kind.__mro__, *value.__mro__) if is_no_users(b)]
        return is_no_users(kind) and all(b is type or trusted.is_trusted_base(b) for b in bases)
    if isinstance(value, BuiltinFunctionType):
        return trusted.is_trusted(value) or type(value.__self__) in CONTAINERS
    if isinstance(value, _METHODS):
        return trusted.is_trusted_base(getattr(value, "__objclass__", object))
    if isinstance(value, ReferenceType):
        return type(value()) in PLAIN  # as torch's recurrent layers have them of their weights
    if trusted.is_trusted(value):
        return True
    return trusted.is_trusted_base(kind) if is_no_users(kind) else True


def _named(value: Any) -> str:
    name = getattr(value, "__qualname__", None)
    if name is None:
        return f"an object of class {type(value).__module__}.{type(value).__qualname__}"
    return f"{getattr(value, '__module__', None) or ''}.{name}".lstrip(".")
