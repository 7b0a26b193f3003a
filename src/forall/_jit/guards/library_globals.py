"""Guards of library functions: the names in their code, whose values user code may replace.

A library's function does the same with each call as long as its names have the same values. Code
may give a module another function (`unittest.mock.patch`), or register a function in a dict that
the library reads (`torch.distributions.kl.register_kl`).
"""

from __future__ import annotations

import functools
import sys
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

from forall._compat.private_api import OpOverload, OpOverloadPacket, module_of
from forall._compat.tensordict import is_setting
from forall._core.code_table import walk_codes
from forall._core.python_state import (
    cell_contents_of,
    instructions_of,
    is_library_module,
    is_not_users,
    is_not_users_module,
    module_name_of,
    names_of,
)
from forall._core.reachable import list_inner_callables
from forall._jit.guards.attribute_names import NAMES_TORCH_CALLS, SKIPPED_OPS
from forall._jit.guards.module_names import find_dotted_names

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator
    from types import CodeType

    from forall._core.reachable import Walk
    from forall._jit.guards.attribute_names import AttributeNames
    from forall._jit.guards.codegen import LibraryState, WatchedState

# Modules whose functions call others that bear on their results. What torch has around them (its
# dispatch to subclasses, its compilers) is left out: it does not change results.
_HOMES = ("torch", "tensordict")
_AROUND = (
    "torch.overrides",
    "torch._dynamo",
    "torch.fx",
    "torch.jit",
    "torch._jit_internal",
    "torch._logging",
    "torch.distributed",
    "torch.compiler",
    "torch._compile",
    "torch.onnx",
    "torch._higher_order_ops",
    "torch._ops",
    "torch._library",
    "torch.library",
    "torch._subclasses",
    "torch._functorch",  # a function that calls it is not replayed anyhow
)
# Functions that write into a library's registry, and read it at most to find duplicates.
_REGISTERS = ("register_", "private_register_")


class LibraryWalk:
    """The walk over libraries' functions: the names in their code, and registries they read."""

    def __init__(
        self, walk: Walk, asked: AttributeNames, state: WatchedState, libraries: LibraryState
    ) -> None:
        self.walk, self.asked, self.state, self.libraries = walk, asked, state, libraries
        self.left: list[FunctionType] = []
        self.methods = ClassMethods(asked)
        # Values that others have registered with a library, and the user's classes they are for.
        self._registered: list[tuple[list[type], Any]] = []
        self._names: frozenset[str] = frozenset()
        self._followed: set[CodeType] = set()
        self._modules: set[tuple[int, frozenset[str]]] = set()

    def run(self) -> None:
        """Visit the libraries' functions that can be reached, and methods that code names."""
        self.left += self.methods.take_named(self._names)
        while self.left:
            while self.left:
                func = self.left.pop()
                if is_not_users(func):
                    self._visit_function(func)
                else:
                    self.walk.left.append(func)
            self.left += self.methods.take_named(self._names)

    def list_registered(self, visited: Container[int]) -> Iterator[Any]:
        """Yield the registered values for whose keys all of the user's classes were visited."""
        for kinds, value in self._registered:
            if all(id(kind) in visited for kind in kinds):
                yield value

    def watch_module(self, module: ModuleType, inner: frozenset[str]) -> None:
        """Watch the names of a library's module that code may ask for: those that it contains."""
        if (id(module), inner) in self._modules:
            return
        self._modules.add((id(module), inner))
        for name in sorted(inner & vars(module).keys()):
            value = vars(module)[name]
            self.libraries.names.append((vars(module), name, value))
            if isinstance(value, FunctionType):
                self.left.append(value)
            elif isinstance(value, (OpOverload, OpOverloadPacket)):
                self.walk.left.append(value)
            elif isinstance(value, type):
                self.methods.add_classes(value.__mro__[:-1])
            elif isinstance(value, ModuleType) and is_library_module(value.__name__):
                self.watch_module(value, inner)

    def _visit_function(self, func: FunctionType) -> None:
        """Visit what a library's function leads to, by the names in its code."""
        ran = self.asked.ran
        if func.__code__ in self._followed or not is_followed(func):
            return
        if not ran.may_have_run(func.__code__):
            ran.did_not_run(func)
            return
        self._followed.add(func.__code__)
        self._names |= names_of(func.__code__)
        for names, name, value in find_named_globals(func):
            self.libraries.names.append((names, name, value))
            if isinstance(value, FunctionType):
                self.left.append(value)
            elif is_setting(value):
                self.state.attributes.append((value, "_mode", value._mode))
            elif isinstance(value, (dict, list)) and id(value) not in self.walk.held:
                self.walk.held[id(value)] = value
                self._watch_registry(value)
        for value in list_inner_callables(func):
            (self.left if isinstance(value, FunctionType) else self.walk.left).append(value)

    def _watch_registry(self, value: Any) -> None:
        """Watch a library's registry: a dict or list that others may add entries to."""
        self.state.watch_entries(value)
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        self._registered += [(find_key_classes(key), x) for key, x in select_users_entries(entries)]


class ClassMethods:
    """The methods of the classes that were met. Each is taken once, when code names it."""

    def __init__(self, asked: AttributeNames) -> None:
        self.asked = asked
        self._unread: list[type] = []
        self._read: dict[int, type] = {}
        self._unnamed: list[tuple[str, FunctionType]] = []  # methods that no code names so far
        self._taken: set[CodeType] = set()

    def add_classes(self, kinds: Iterable[type]) -> None:
        """Add classes, some of which may have been met before."""
        self._unread += kinds

    def take_named(self, names: frozenset[str]) -> list[FunctionType]:
        """Return the methods that code names by now; ``names`` are those in libraries' code."""
        for kind in self._unread:
            if id(kind) not in self._read:
                self._read[id(kind)] = kind
                self._unnamed += _iterate_methods(kind)
        self._unread.clear()
        asked, unnamed, found = self.asked, self._unnamed, []
        self._unnamed = []
        for name, func in unnamed:
            dunder = name[:2] == "__" or name in NAMES_TORCH_CALLS
            if asked.ran.seen or dunder or asked.contains_name(name) or name in names:
                if func.__code__ not in self._taken:
                    self._taken.add(func.__code__)
                    found.append(func)
            else:
                self._unnamed.append((name, func))
        return found


def _iterate_methods(kind: type) -> Iterator[tuple[str, FunctionType]]:
    """Yield the methods of a class, and the getters of its properties, with their names."""
    for name, found in vars(kind).items():
        func = getattr(found, "fget", None) or getattr(found, "__func__", found)
        if isinstance(func, FunctionType):
            yield name, func


def is_followed(func: FunctionType) -> bool:
    """True if the guards follow the names in the code of a library's function."""
    home = module_name_of(func)
    if home.partition(".")[0] not in _HOMES or home.startswith(_AROUND):
        return False
    return not func.__name__.lstrip("_").startswith(_REGISTERS)


def find_named_globals(func: FunctionType) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield the namespace, the name and the value of each global that a function's code names."""
    home = func.__globals__
    for way in _collect_dotted_names(func.__code__):
        names = home
        for name in way:
            if name not in names:
                break
            value = names[name]
            yield names, name, value
            if not isinstance(value, ModuleType) or not is_not_users_module(value.__name__):
                break
            names = vars(value)


def registry_of_optree() -> dict[Any, Any]:
    """The classes that optree takes apart, alone or in a namespace."""
    return sys.modules["optree.registry"]._NODETYPE_REGISTRY


def registered_with_optree() -> Iterator[Any]:
    """Yield the functions, not of libraries, by which optree flattens and unflattens classes."""
    for entry in registry_of_optree().values():
        if module_of(entry.type).partition(".")[0] != "optree":  # else by methods of that class
            yield from _of_others(entry.flatten_func)
            yield from _of_others(entry.unflatten_func)


def _of_others(func: Any) -> Iterator[Any]:
    """Yield a function, or those that it wraps, if they are not a library's own."""
    if isinstance(func, type) and is_not_users(func):
        return
    if not isinstance(func, FunctionType) or not _is_known_to_be_pure(func):
        yield func
        return
    for cell in func.__closure__ or ():
        if callable(inner := cell_contents_of(cell)):
            yield from _of_others(inner)


def _is_known_to_be_pure(func: FunctionType) -> bool:
    return is_not_users(func) or module_name_of(func).partition(".")[0] == "optree"


def is_in_order_of_optree(namespaces: tuple[str, ...]) -> tuple[bool, ...]:
    """Return for each namespace True if optree keeps the order of dicts, and does not sort."""
    ask = sys.modules["optree._C"].is_dict_insertion_ordered
    return tuple(ask(name, False) for name in namespaces)


def namespaces_in(code: CodeType) -> Iterator[str]:
    """The texts in code that names a namespace, or in code inside it."""
    for inner in walk_codes(code):
        texts = {text for c in inner.co_consts for text in _texts(c)}
        if _NAMESPACE in texts.union(inner.co_names, inner.co_varnames):
            yield from texts


def _texts(constant: Any) -> Iterator[str]:
    if isinstance(constant, str):
        yield constant
    elif isinstance(constant, (tuple, frozenset)):
        for inner in constant:
            yield from _texts(inner)


_NAMESPACE = "namespace"  # the name of optree's own parameter, which is given by name


def select_users_entries(entries: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """The entries of a library's registry whose values are not the library's own."""
    return [(key, value) for key, value in entries if not _is_library_value(value)]


def find_key_classes(key: Any) -> list[type]:
    """The user's classes in the key of an entry of a library's registry."""
    parts = key if isinstance(key, tuple) else (key,)
    return [part for part in parts if isinstance(part, type) and not is_not_users(part)]


def _is_library_value(value: Any) -> bool:
    if isinstance(value, (FunctionType, type)):
        return is_not_users(value)
    if isinstance(value, tuple):
        return all(map(_is_library_value, value))
    if isinstance(value, ModuleType):
        return is_not_users_module(value.__name__)
    if isinstance(value, (MethodType, functools.partial)):
        return all(map(_is_library_value, _list_parts(value)))
    return is_not_users(type(value))


def _list_parts(value: MethodType | functools.partial) -> tuple:
    if isinstance(value, MethodType):
        return value.__func__, value.__self__
    return value.func, *value.args, *value.keywords.values()


@functools.lru_cache(maxsize=4096)
def _collect_dotted_names(code: CodeType) -> tuple[tuple[str, ...], ...]:
    found = {}
    for inner in walk_codes(code):
        instructions = [i for i in instructions_of(inner) if i.opname not in SKIPPED_OPS]
        found.update(
            dict.fromkeys(tuple(way) for way, _ in find_dotted_names(instructions, ()) if way[0])
        )
    return (*found,)
