"""Snapshots of Python state that a user's function may change, so that it can run again.

Before any part of a function runs twice, the state that it can reach is restored. It reaches it by
its arguments, its closure, its defaults, the object that it is bound to, and the globals that it or
a function it calls names; and by what these hold. Effects outside the process (print, files), the
position of iterators and the contents of caches are not restored.

Nor are the objects of a program that runs the user's, as pytest and Jupyter do. A function leads to
them by its `assert`, which pytest rewrites to call its own code. Their threads change them while
the function runs, and to restore them would undo that: a worker of pytest-xdist ran a test again.
"""

from __future__ import annotations

import array
import functools
from collections import OrderedDict, defaultdict, deque
from copy import copy
from types import CodeType, FunctionType, MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ReferenceType

import torch
from torch.nn import Module

from forall._compat.private_api import module_of
from forall._compat.tensordict import is_of_tensordict
from forall._core import communication_log
from forall._core.python_state import (
    CONSTRUCTORS,
    UNSET,
    UnguardedState,
    cell_contents_of,
    find_names_and_text,
    globals_of,
    is_installed_module,
    is_library_object,
    is_not_users,
    is_not_users_module,
    is_runners_module,
    module_name_of,
    names_of,
)
from forall._core.reachable import (
    DICT_VIEWS,
    FUNCTION_ATTRIBUTES,
    WRAPPERS,
    RawContainer,
    Visitors,
    Walk,
    is_ndarray,
    list_inner_callables,
    list_parts,
    list_slots,
    view_raw_container,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# Longer containers are data, not a record of calls. Functions and classes are visited nearest
# first, so that a call need not wait for a walk over all of a large package. Classes of installed
# packages are not visited: they have many attributes, and seldom change any.
_MOST = {"entries": 10_000, "code": 300, "installed code": 15}
_MOST_CODES = 10_000  # whose names are kept
_MOST_BYTES = 4096  # of an array
_IN_C = frozenset({list, dict, set, bytearray, deque, OrderedDict, defaultdict})
_METHODS = (FunctionType, staticmethod, classmethod, property)
_DATA_MODULES = frozenset({"builtins", "torch", "numpy"})  # whose objects hold no Python state
_NAMES_TORCH_CALLS = ("forward", "backward", "setup_context", "vmap", "jvp")


class PythonSnapshot:
    """A snapshot of the state that a function can reach, taken before it runs."""

    __slots__ = (
        "asked",
        "attributes",
        "classes",
        "contents",
        "empty",
        "functions",
        "generators",
        "left",
        "messages",
        "names",
        "waiting",
        "walk",
    )

    def __init__(self, func: Callable, given: Iterable[Any]) -> None:
        self.attributes: list[tuple[Any, str, Any]] = []
        self.names: list[tuple[dict[str, Any], str, Any]] = []
        self.contents: list[tuple[Any, Any]] = []
        self.empty: list[Any] = []  # containers
        self.functions: list[tuple[FunctionType, tuple]] = []
        self.classes: list[tuple[type, dict[str, Any]]] = []
        self.generators: list[tuple[torch.Generator, torch.Tensor]] = []  # restored by callers
        self.messages = communication_log.get_position()
        self.left = {**_MOST}
        self.asked = {*_NAMES_TORCH_CALLS}  # names in the code of functions
        self.waiting: dict[str, list[Any]] = {}  # methods that are visited if code names them
        self.walk = Walk([func, *given])
        self.walk.run(self, _visitors)
        while found := self.waiting.keys() & self.asked:
            self.walk.left += [x for name in found for x in self.waiting.pop(name)]
            self.walk.run(self, _visitors)
        del self.asked, self.waiting, self.walk

    def _visit_function(self, func: FunctionType) -> None:
        """Take what a function of the user's can rebind or change; visit what it captures.

        A library's function, a transform's wrapper for example, may capture one of the user's.
        """
        left, own = self.walk.left, func.__dict__
        module = module_name_of(func)
        if is_runners_module(module):
            return
        if is_not_users_module(module):
            left += list_inner_callables(func)
            return
        if not self._may_visit_code(module):
            return
        code, defaults, by_name = func.__code__, func.__defaults__, func.__kwdefaults__
        self.functions.append((func, (code, defaults, by_name, own)))
        if own:
            left.append(own)
        else:
            self.empty.append(own)
        if defaults or by_name:
            left += (defaults, by_name)
        for cell in func.__closure__ or ():
            value = cell_contents_of(cell)
            self.attributes.append((cell, "cell_contents", value))
            self._visit_named(value, code)
        names = func.__globals__
        known = _read_code(code)
        for name, written in known.names:
            value = names.get(name, UNSET)
            if written:
                self.names.append((names, name, value))
            self._visit_named(value, code)
        self.asked |= known.words

    def _may_visit_code(self, module: str) -> bool:
        """Return True if one more function or class of a module may be visited, and count it."""
        kind = "installed code" if is_installed_module(module) else "code"
        self.left[kind] -= 1
        return self.left[kind] >= 0

    def _visit_named(self, value: Any, code: CodeType) -> None:
        """Visit the value of a variable; of a user's module, the values that code may name."""
        if _visitors[type(value)] is not None:
            self.walk.left.append(value)
        elif isinstance(value, ModuleType) and not _is_left_alone(value.__name__):
            self._visit_module(value, names_of(code))

    def _visit_module(self, module: ModuleType, words: frozenset[str]) -> None:
        """Take what a module of the user's, and modules in it, have under these names."""
        modules = [module]
        for inside in modules:
            names = vars(inside)
            for name in () if _is_left_alone(inside.__name__) else words:
                value = names.get(name, UNSET)
                self.names.append((names, name, value))
                if not isinstance(value, ModuleType):
                    self.walk.left.append(value)
                elif value not in modules:
                    modules.append(value)

    def _visit_parts(self, value: Any) -> None:
        self.walk.left += list_parts(value) or ()

    def _visit_class(self, kind: type) -> None:
        self.asked |= CONSTRUCTORS  # code that has a class may make objects of it
        self._take_class(kind)

    def _visit_class_of(self, thing: Any) -> None:
        kind = type(thing)
        if id(kind) not in self.walk.held:
            self._take_class(kind)

    def _take_class(self, kind: type) -> None:
        """Take a class of the user's; its methods wait for code that names them."""
        module = module_of(kind)
        if is_not_users_module(module) or is_installed_module(module):
            return
        if not self._may_visit_code(module):
            return
        held, left, leaves = self.walk.held, self.walk.left, _visitors.leaves
        held[id(kind)] = kind
        for base in (type(kind), *kind.__bases__):
            if base is not object and base is not type and id(base) not in held:
                self._take_class(base)
        state = dict(vars(kind))
        self.classes.append((kind, state))
        for name, value in state.items():
            if type(value) in leaves:
                continue
            is_special = name[:2] == "__"
            if not isinstance(value, _METHODS):
                left += () if is_special else (value,)  # else annotations, fields of a dataclass
            elif is_special and name not in CONSTRUCTORS:
                left.append(value)
            else:
                self.waiting.setdefault(name, []).append(value)

    def _visit_slots(self, thing: Any) -> None:
        for name in list_slots(type(thing)):
            value = _get_attribute(thing, name)
            self.attributes.append((thing, name, value))
            self.walk.left.append(value)

    def _visit_object(self, thing: Any) -> None:
        state = getattr(thing, "__dict__", None)
        if type(state) is dict:
            self.attributes += ((thing, "__class__", type(thing)), (thing, "__dict__", state))
            if self._take_contents(state):
                self._visit_all(state.values())

    def _visit_library_object(self, thing: Any) -> None:
        """Take the containers that a library's object has; its other objects lead everywhere."""
        state = getattr(thing, "__dict__", None)
        if type(state) is dict:
            self.contents.append((state, state.copy()))
            self.walk.left += [x for x in state.values() if type(x) in _IN_C]

    def _visit_tuple(self, value: Any) -> None:
        self._visit_all(view_raw_container(value))

    def _visit_mapping(self, value: Any) -> None:
        self._visit_all(value.values())

    def _visit_container(self, value: Any) -> None:
        held = view_raw_container(value)
        if not self._take_contents(held):
            return
        if isinstance(value, dict):
            self._visit_all(held)
            self._visit_all(held.values())
        elif not isinstance(value, bytearray):
            self._visit_all(held)

    def _take_contents(self, held: Any) -> bool:
        """Take what a container holds, if it is not too long."""
        if not held:
            self.empty.append(held)
            return False
        if len(held) > self.left["entries"]:
            return False
        self.left["entries"] -= len(held)
        self.contents.append((held, held.copy()))
        return True

    def _visit_all(self, values: Iterable[Any]) -> None:
        leaves = _visitors.leaves
        if leaves.issuperset(map(type, values)):
            return
        empty, left = self.empty, self.walk.left
        for value in values:
            kind = type(value)
            if kind in leaves:
                continue
            if kind in _IN_C and not value:  # as most that a module has
                empty.append(value)
            else:
                left.append(value)

    def _visit_array(self, value: Any) -> None:
        if value.itemsize * (value.size if is_ndarray(value) else len(value)) <= _MOST_BYTES:
            self.contents.append((value, copy(value)))

    def _visit_generator(self, value: torch.Generator) -> None:
        self.generators.append((value, value.get_state()))

    def differs_from_now(self) -> bool:
        """True if anything has changed since the snapshot."""
        return (
            any(not _holds_same(_get_function_state(func), state) for func, state in self.functions)
            or any(_get_attribute(row[0], row[1]) is not row[2] for row in self.attributes)
            or any(names.get(name, UNSET) is not value for names, name, value in self.names)
            or any(not _holds_same(dict(vars(kind)), state) for kind, state in self.classes)
            or any(map(len, self.empty))
            or any(not _holds_same(container, held) for container, held in self.contents)
        )

    def restore(self) -> None:
        communication_log.rewind_log(self.messages)
        for func, state in self.functions:
            for name, value in zip(FUNCTION_ATTRIBUTES, state, strict=True):
                if getattr(func, name) is not value:
                    setattr(func, name, value)
        for thing, name, value in self.attributes:
            if _get_attribute(thing, name) is not value:
                if value is UNSET:
                    object.__delattr__(thing, name)
                else:
                    object.__setattr__(thing, name, value)
        for names, name, value in self.names:
            if value is not UNSET:
                names[name] = value
            else:
                names.pop(name, None)
        for kind, state in self.classes:
            _restore_class(kind, state)
        for container in self.empty:
            container.clear()
        for container, held in self.contents:
            if _holds_same(container, held) and not isinstance(container, set):
                continue
            if isinstance(container, RawContainer):
                container.replace_contents(held)
            elif isinstance(container, (dict, set, deque)):
                container.clear()
                (container.extend if isinstance(container, deque) else container.update)(held)
            else:
                container[... if is_ndarray(container) else slice(None)] = held


def _is_left_alone(module: str) -> bool:
    return is_not_users_module(module) or is_runners_module(module)


def _holds_same(one: Any, other: Any) -> bool:
    """True if two containers of one class hold the same objects in the same order."""
    if is_ndarray(one):
        return one.tobytes() == other.tobytes()
    if not one or not other:
        return len(one) == len(other)
    if isinstance(other, dict):
        one, other = [*one, *one.values()], [*other, *other.values()]
    if isinstance(other, set):
        return len(one) == len(other) and other.issuperset(one)
    if isinstance(other, array.array):
        return one == other
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _get_function_state(func: FunctionType) -> tuple:
    return tuple(getattr(func, name) for name in FUNCTION_ATTRIBUTES)


def _get_attribute(thing: Any, name: str) -> Any:
    """Return an attribute past the methods of a user's class; UNSET if there is none."""
    if name == "__class__":
        return type(thing)
    try:
        return object.__getattribute__(thing, name)
    except (AttributeError, ValueError):  # an empty cell raises the latter
        return UNSET


def _restore_class(kind: type, state: dict[str, Any]) -> None:
    now = dict(vars(kind))
    for name in now.keys() - state.keys():
        delattr(kind, name)
    for name, value in state.items():
        if now.get(name, UNSET) is not value:
            setattr(kind, name, value)


def _choose_visitor(kind: type) -> Callable[[PythonSnapshot, Any], None] | None:
    """Return the function that takes objects of a class; None if they hold no state of Python's."""
    if is_runners_module(module_of(kind)):
        return None
    visits = [visit for kinds, visit in _VISITORS if issubclass(kind, kinds)][:1]
    if module_of(kind) in _DATA_MODULES or issubclass(kind, _LEAVES):
        is_array = kind.__name__ == "ndarray"
        visits = [PythonSnapshot._visit_array] if is_array else visits
    elif not is_not_users(kind):
        visits += [_choose_for_attributes(kind), PythonSnapshot._visit_class_of]
    elif not visits and not issubclass(kind, torch.Tensor):
        visits = [_choose_for_attributes(kind)]
    elif issubclass(kind, functools.partial):
        visits.append(PythonSnapshot._visit_object)
    if list_slots(kind) and module_of(kind).partition(".")[0] != "forall":  # whose hold caches
        visits.append(PythonSnapshot._visit_slots)
    if len(visits) < 2:
        return next(iter(visits), None)

    def visit_all(snapshot: PythonSnapshot, value: Any) -> None:
        for visit in visits:
            visit(snapshot, value)

    return visit_all


def _choose_for_attributes(kind: type) -> Callable[[PythonSnapshot, Any], None]:
    """Return the method that takes the attributes of objects of a class."""
    is_from_library = is_library_object(kind) and not issubclass(kind, Module)
    is_collection = is_of_tensordict(module_of(kind))  # of the user's tensors, which it may nest
    if (
        is_from_library and not is_collection
    ) or not kind.__dictoffset__:  # the latter make their `__dict__` themselves
        return PythonSnapshot._visit_library_object
    return PythonSnapshot._visit_object


class _CodeWords(NamedTuple):
    """The globals that code names, and whether it rebinds them; and all names and text in it."""

    code: CodeType  # kept alive, so that no other has its id
    names: tuple[tuple[str, bool], ...]
    words: frozenset[str]


def _read_code(code: CodeType) -> _CodeWords:
    known = _codes.get(id(code))  # a code object's own hash reads all that is in it
    if known is None:
        if len(_codes) >= _MOST_CODES:
            _codes.clear()
        known = _codes[id(code)] = _CodeWords(code, globals_of(code), find_names_and_text(code))
    return known


_codes: dict[int, _CodeWords] = {}
_LEAVES = (ModuleType, UnguardedState)
# The first that fits.
_VISITORS: tuple[tuple[Any, Callable[[PythonSnapshot, Any], None]], ...] = (
    (FunctionType, PythonSnapshot._visit_function),
    ((tuple, frozenset), PythonSnapshot._visit_tuple),
    ((*_IN_C,), PythonSnapshot._visit_container),
    (torch.Generator, PythonSnapshot._visit_generator),
    (MappingProxyType, PythonSnapshot._visit_mapping),
    (array.array, PythonSnapshot._visit_array),
    (type, PythonSnapshot._visit_class),
    ((slice, ReferenceType, *DICT_VIEWS, *WRAPPERS), PythonSnapshot._visit_parts),
)
_visitors = Visitors(_choose_visitor)
