"""Snapshots of Python state that a user's function may change, so that it can run again.

Before any part of a function runs twice, the containers and attributes that it can reach are
restored. It reaches them by its arguments, its closure, the object that it is bound to, and
globals. Globals that a function called by name reads are included. Deeper state (an object in an
object) and effects outside the process (print, files) are not restored.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections import deque
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch

from forall._compat.private_api import module_of
from forall._core.raw_containers import RawContainer, view_raw_container

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from weakref import ref

_CONTAINERS = (list, dict, set, bytearray, deque)
_EMPTIED = frozenset(_CONTAINERS)
_MOST = 10_000  # entries in all: longer containers are data, not a record of calls
UNSET = object()  # the content of an empty cell, and the value of an unbound name
_HERE = __file__.rsplit("_core", 1)[0]
_STATELESS = (ModuleType, type(None))  # ``__self__`` of builtin functions that are no methods


class UnguardedState:
    """Base of objects kept from call to call that have no influence on a call's result."""


class WeakBox(UnguardedState):
    """A weak reference to an object of the user's; ``of()`` is the object, or None."""

    __slots__ = ("of",)

    def __init__(self, of: ref) -> None:
        self.of = of


class PythonSnapshot:
    """A snapshot of the state that a function can reach, taken before it runs."""

    __slots__ = ("cells", "classes", "copies", "functions", "generators", "left", "names")

    def __init__(self, func: Callable, given: Iterable[Any]) -> None:
        self.copies: dict[int, tuple[Any, Any]] = {}
        self.cells: list[tuple[CellType, Any]] = []
        self.names: list[tuple[dict[str, Any], str, Any]] = []
        self.classes: list[tuple[type, dict[str, Any]]] = []
        self.functions: set[FunctionType] = set()
        self.generators: list[tuple[torch.Generator, torch.Tensor]] = []  # restored by callers
        self.left = _MOST
        self._take_all(given, 1)
        self._take_callable(func)

    def _take_callable(self, func: Any) -> None:
        if type(func) is FunctionType and not func.__dict__:  # as most are: it wraps nothing
            self._take_function(func, 2)
            return
        if type(func) is BuiltinFunctionType and isinstance(func.__self__, _STATELESS):
            return
        while isinstance(func, functools.partial):
            self._take((func.args, func.keywords), 1)
            func = func.func
        wrapped = getattr(func, "__wrapped__", None)
        if wrapped is not None:
            self._take_callable(wrapped)
        owner = getattr(func, "__self__", func)
        func = getattr(func, "__func__", func)
        if not isinstance(func, FunctionType):
            func = getattr(type(func), "__call__", None)  # noqa: B004 - the function itself
        if not isinstance(owner, FunctionType):
            self._take(owner, 1)
            self._take_class(type(owner))
        self._take_function(func, 2)

    def _take_function(self, func: Any, depth: int) -> None:
        """Take what a function, and the user's functions that it names, can rebind or change."""
        if not isinstance(func, FunctionType) or func in self.functions or is_library_object(func):
            return
        code = func.__code__
        if code.co_filename.startswith(_HERE):
            return  # a transform's wrapper, which has the name of the user's function
        self.functions.add(func)
        self._take(func.__dict__, 0)
        for cell in func.__closure__ or ():
            value = cell_contents_of(cell)
            self.cells.append((cell, value))
            self._take_reached(value, depth)
        names = func.__globals__
        for name, written in globals_of(code):
            value = names.get(name, UNSET)
            if written:
                self.names.append((names, name, value))
            if value is not UNSET:  # else a builtin's name
                self._take_reached(value, depth)

    def _take_reached(self, value: Any, depth: int) -> None:
        kind = type(value)
        if kind is FunctionType:
            if depth:
                self._take_function(value, depth - 1)
        elif issubclass(kind, type):
            self._take_class(value)
        elif _KINDS.get(kind) is not _PLAIN:
            self._take(value, 1)

    def _take_class(self, kind: type) -> None:
        if not is_library_object(kind):
            self.classes.append((kind, dict(vars(kind))))

    def _take_object(self, thing: Any, depth: int) -> None:
        state = getattr(thing, "__dict__", None)
        if type(state) is dict:
            self._take(state, depth)

    def _take(self, value: Any, depth: int) -> None:
        """Take a container with all containers in it, and objects nested at most ``depth`` deep."""
        kind = _container_class(type(value))
        if kind is _PLAIN:
            return
        if kind is tuple:
            self._take_all(view_raw_container(value), depth)
        elif kind is torch.Generator:
            self.generators.append((value, value.get_state()))
        elif kind is object:
            if depth:
                self._take_object(value, depth - 1)
        elif id(value) not in self.copies:
            held = view_raw_container(value)
            if len(held) <= self.left:
                self.left -= len(held)
                self.copies[id(value)] = (held, held.copy())
                if kind is not bytearray:
                    self._take_all(held.values() if kind is dict else held, depth)

    def _take_all(self, values: Iterable[Any], depth: int) -> None:
        for value in values:
            kind = _KINDS.get(type(value))
            if kind is _PLAIN or (kind is object and not depth):  # as most are; a call is dear
                continue
            if type(value) in _EMPTIED and not value:  # as most that a module has
                self.copies[id(value)] = (value, ())
            else:
                self._take(value, depth)

    def differs_from_now(self) -> bool:
        """True if anything has changed since the snapshot."""
        return (
            any(cell_contents_of(cell) is not value for cell, value in self.cells)
            or any(names.get(name, UNSET) is not value for names, name, value in self.names)
            or any(not _holds_same(dict(vars(kind)), state) for kind, state in self.classes)
            or any(not _holds_same(container, copy) for container, copy in self.copies.values())
        )

    def restore(self) -> None:
        for cell, value in self.cells:
            if cell_contents_of(cell) is not value:
                if value is UNSET:
                    del cell.cell_contents
                else:
                    cell.cell_contents = value
        for names, name, value in self.names:
            if value is not UNSET:
                names[name] = value
            else:
                names.pop(name, None)
        for kind, state in self.classes:
            _restore_class(kind, state)
        for container, copy in self.copies.values():
            if isinstance(container, RawContainer):
                container.replace_contents(copy)
            elif isinstance(container, (list, bytearray)):
                container[:] = copy
            else:
                container.clear()
                (container.extend if isinstance(container, deque) else container.update)(copy)


def _holds_same(one: Any, other: Any) -> bool:
    """True if two containers of one class hold the same objects in the same order."""
    if not one or not other:
        return len(one) == len(other)
    if isinstance(other, dict):
        one, other = [*one, *one.values()], [*other, *other.values()]
    if isinstance(other, set):
        return len(one) == len(other) and other.issuperset(one)
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


_NOT_THE_USERS = frozenset({"builtins", "torch", "numpy"})
_PLAIN = type(None)  # nothing in it that a call could change without being seen
_KINDS: dict[type, type] = {}


def _container_class(of: type) -> type:
    """Return the class that decides how a value is taken: a container's, or object for others."""
    try:
        return _KINDS[of]
    except KeyError:
        pass
    if len(_KINDS) >= _MOST:  # programs may make new classes without end
        _KINDS.clear()
    kind = next((k for k in (*_CONTAINERS, tuple, torch.Generator) if issubclass(of, k)), object)
    if kind is object and module_of(of) in _NOT_THE_USERS:
        kind = _PLAIN
    _KINDS[of] = kind
    return kind


_LIBRARIES = frozenset(
    {"builtins", "torch", "numpy", "forall", "functools", "math", "typing_extensions"}
    | {"pybind11_builtins"}  # the module of base classes of torch's
)


def is_library_object(thing: Any) -> bool:
    return is_library_module(module_of(thing))


def is_not_users(thing: Any) -> bool:
    """True if a class or function is a library's or Python's own, so that it does not change.

    A class that a library derives from one of the user's counts as the user's. So does a class that
    `torch.fx` makes for a graph, since its ``forward`` is the user's code.
    """
    if isinstance(thing, type):
        if thing.__qualname__.endswith("GraphModuleImpl"):
            return False
        return all(is_not_users_module(module_of(kind)) for kind in thing.__mro__)
    # functools.wraps gives a function the name of another
    name = module_name_of(thing) if isinstance(thing, FunctionType) else module_of(thing)
    return isinstance(name, str) and is_not_users_module(name)


def is_not_users_module(module: str) -> bool:
    """True if this is the name of a library's module or of one of Python's own."""
    return is_library_module(module) or module.partition(".")[0] in sys.stdlib_module_names


def is_ours(func: FunctionType) -> bool:
    return module_name_of(func).partition(".")[0] == "forall"


def module_name_of(func: FunctionType) -> str:
    """Return the name of the module whose globals a function has; "" if they have no name."""
    return func.__globals__.get("__name__") or ""


def is_library_module(module: str) -> bool:
    """True if this is the name of a module of one of the known libraries."""
    return module.partition(".")[0] in _LIBRARIES


def _restore_class(kind: type, state: dict[str, Any]) -> None:
    now = dict(vars(kind))
    for name in now.keys() - state.keys():
        delattr(kind, name)
    for name, value in state.items():
        if now.get(name, UNSET) is not value:
            setattr(kind, name, value)


def cell_contents_of(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return UNSET


_GLOBALS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"})
_REBINDS_GLOBALS = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL"})
_REBINDS = frozenset({"STORE_DEREF", "DELETE_DEREF"})
# Code that has one of these names can read or bind other names without naming them.
SETTERS = frozenset({"setattr", "delattr"})  # of modules too, whose names are global
_NAMESPACES = SETTERS | {"globals", "eval", "exec", "__closure__", "__globals__"}


@functools.lru_cache(maxsize=1024)
def instructions_of(code: CodeType) -> tuple[dis.Instruction, ...]:
    """Return the instructions of a function, without those of functions written inside it."""
    return (*dis.get_instructions(code),)


@functools.lru_cache(maxsize=4096)
def globals_of(code: CodeType) -> tuple[tuple[str, bool], ...]:
    """Return the globals that a function, or one inside it, names, and whether it rebinds them."""
    found: dict[str, bool] = {}
    for i in instructions_of(code):
        if i.opname in _GLOBALS:
            found[i.argval] = found.get(i.argval, False) or i.opname in _REBINDS_GLOBALS
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            for name, rebound in globals_of(constant):
                found[name] = found.get(name, False) or rebound
    return tuple(found.items())


@functools.lru_cache(maxsize=4096)
def find_rebound_names(code: CodeType) -> frozenset[str]:
    """Return the names of closure variables that a function, or one inside it, rebinds."""
    inner = [find_rebound_names(c) for c in code.co_consts if isinstance(c, CodeType)]
    own = (i.argval for i in instructions_of(code) if i.opname in _REBINDS)
    return frozenset(own).union(*inner)


@functools.lru_cache(maxsize=4096)
def may_rebind(code: CodeType) -> bool:
    """True if a function may rebind names that are not its own."""
    return may_rebind_by(code, names_of(code))


def may_rebind_by(code: CodeType, names: frozenset[str]) -> bool:
    """True if a function rebinds names that are not its own, or may do so by one of ``names``."""
    if not find_rebound_names(code).isdisjoint(code.co_freevars):
        return True
    return any(written for _, written in globals_of(code)) or not _NAMESPACES.isdisjoint(names)


@functools.lru_cache(maxsize=4096)
def names_of(code: CodeType) -> frozenset[str]:
    """Return all names of globals and attributes in a function, or in one written inside it."""
    inner = [names_of(c) for c in code.co_consts if isinstance(c, CodeType)]
    return frozenset(code.co_names).union(*inner)


@functools.lru_cache(maxsize=4096)
def find_names_and_text(code: CodeType) -> frozenset[str]:
    """Return all names and string constants in a function, or in one inside it."""
    return frozenset(code.co_names).union(*map(find_names_in_constant, code.co_consts))


def find_names_in_constant(constant: Any) -> Iterable[str]:
    """Return the names and strings in a constant of a code object."""
    if isinstance(constant, CodeType):
        return find_names_and_text(constant)
    if isinstance(constant, (tuple, frozenset)):
        return [name for c in constant for name in find_names_in_constant(c)]
    return [constant] if isinstance(constant, str) else ()  # any text may name an attribute
