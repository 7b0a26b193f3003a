"""Edges from Python objects to what they hold, and the walk over all that some objects reach.

NOTE [one walk over what a function reaches]
    Undo, guards, keys of arguments and stand-ins ask the same of Python's state: what does an
    object lead to? So one module knows the kinds of objects. Each user decides what to do at an
    object, and where to go on. An object has up to four kinds of edges:

    - attributes, which can be rebound by name: of functions, cells, objects with slots
    - entries: of a namespace (`__dict__`, a module's globals), by name
    - contents of a container or a buffer; of a container of a user's class, those that its builtin
      base has, since an override may have side effects
    - parts, of which an immutable object was made: the function of a bound method

    A `Walk` visits each object once, those nearest to its roots first, so that a limit cuts off
    what is farthest.
"""

from __future__ import annotations

import array
import functools
import gc
import sys
from collections import OrderedDict, defaultdict, deque
from contextlib import _GeneratorContextManager
from itertools import islice
from operator import itemgetter
from types import (
    BuiltinFunctionType,
    FrameType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    TracebackType,
)
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, WeakKeyDictionary

import torch

from forall._core.python_state import (
    UNSET,
    cell_contents_of,
    is_library_object,
    is_not_users,
    is_ours,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_MOST_CLASSES = 10_000
_MOST_HIDING = 10_000  # objects of results that are looked at
FUNCTION_ATTRIBUTES = ("__code__", "__defaults__", "__kwdefaults__", "__dict__")
CONTAINERS = (dict, list, tuple, set, frozenset, deque, bytearray)
_DICTS = (OrderedDict, defaultdict, dict)
_IN_C = frozenset({*_DICTS, MappingProxyType, list, tuple, deque, bytearray, set, frozenset})
_CALLED = (FunctionType, MethodType, functools.partial)
DICT_VIEWS = (type({}.keys()), type({}.values()), type({}.items()))
WRAPPERS = (
    MethodType,
    staticmethod,
    classmethod,
    functools.partial,
    property,
    functools.cached_property,
    BuiltinFunctionType,
    MethodWrapperType,
    _GeneratorContextManager,
)
# The names of an immutable object's parts, by its class.
_PARTS: tuple[tuple[type | tuple[type, ...], tuple[str, ...]], ...] = (
    (MethodType, ("__func__", "__self__")),
    ((staticmethod, classmethod), ("__func__",)),
    (functools.partial, ("func", "args", "keywords")),
    (property, ("fget", "fset", "fdel")),
    (functools.cached_property, ("func",)),  # its cached value is in the object
    ((BuiltinFunctionType, MethodWrapperType), ("__self__",)),
    (_GeneratorContextManager, ("func", "args", "kwds")),  # a decorator, whose calls make others
    (DICT_VIEWS, ("mapping",)),
    (slice, ("start", "stop", "step")),
)


class Visitors(dict[type, Any]):
    """The function to call at objects of each class; None for classes that are not visited.

    ``choose`` returns it for a class that was not met before. ``leaves`` are the classes that are
    not visited, of those met so far.
    """

    def __init__(self, choose: Callable[[type], Callable[[Any, Any], None] | None]) -> None:
        super().__init__()
        self.choose = choose
        self.leaves: set[type] = set()

    def __missing__(self, kind: type) -> Callable[[Any, Any], None] | None:
        if len(self) >= _MOST_CLASSES:  # programs may make new classes without end
            self.clear()
            self.leaves.clear()
        visit = self[kind] = self.choose(kind)
        if visit is None:
            self.leaves.add(kind)
        return visit


class Walk:
    """A walk over what objects reach, which visits each object once, those nearest first.

    ``left`` are the objects to be visited: those that a visitor adds to it are visited too, and
    those that it clears are not.
    """

    __slots__ = ("held", "left")

    def __init__(self, roots: Iterable[Any]) -> None:
        self.left = [*roots]
        self.held: dict[int, Any] = {}  # kept alive, so that no other object gets the same id

    def run(self, visitor: Any, visitors: Visitors) -> None:
        held = self.held
        for value in self.left:  # visitors append to it
            visit = visitors[type(value)]
            if visit is not None and id(value) not in held:
                held[id(value)] = value
                visit(visitor, value)
        self.left.clear()


def list_parts(value: Any) -> list[Any] | None:
    """Return the parts of an immutable object, a wrapper for example; None for other objects."""
    if isinstance(value, itemgetter):
        return [*value.__reduce__()[1]]
    if isinstance(value, ReferenceType):
        return [value()]
    names = next((names for kinds, names in _PARTS if isinstance(value, kinds)), None)
    if names is None:
        return None
    return [x for x in (getattr(value, n) for n in names) if not isinstance(x, ModuleType)]


def list_slots(kind: type) -> tuple[str, ...]:
    """Return the names of attributes of an object that are not in its `__dict__`.

    Those are slots, members of classes in C (the factory of a `defaultdict`), and the arguments of
    an exception. Members of libraries' classes in C are left out: they are as they were made.
    """
    names = _slots.get(kind)
    if names is None:
        found = {"args": issubclass(kind, BaseException)}
        for base in reversed(kind.__mro__):  # a class may hide a slot of its base
            own = vars(base)
            may_change = "__slots__" in own or not is_library_object(base)
            for name, x in own.items() if base is not BaseException else ():
                found[name] = may_change and type(x) is MemberDescriptorType and name != "__dict__"
        names = _slots[kind] = tuple(name for name, is_slot in found.items() if is_slot)
    return names


_slots: WeakKeyDictionary[type, tuple[str, ...]] = WeakKeyDictionary()


def list_own_attributes(thing: Any) -> list[tuple[str, Any]]:
    """Return the attributes that an object has itself, in `__dict__`, in slots and as parts."""
    found: list[tuple[str, Any]] = [("", part) for part in list_parts(thing) or ()]
    found += [(name, getattr(thing, name, UNSET)) for name in list_slots(type(thing))]
    state = (getattr(thing, "__dict__", None) or {}).items()
    return [*state, *[row for row in found if row[1] is not UNSET]]


def iterate_held(roots: Iterable[Any], is_end: Callable[[Any], bool]) -> Iterator[Any]:
    """Yield objects and all that they hold, each once, by the garbage collector's graph.

    So the contents of iterators and sets, and of objects in objects, are among these. What tensors
    hold is not, nor what objects hold at which ``is_end`` is true. What holds nothing is left out.
    """
    left, seen = deque(roots), set[int]()
    while left:
        x = left.popleft()
        if id(x) in seen:
            continue
        seen.add(id(x))
        yield x
        if isinstance(x, (ModuleType, type, torch.Tensor)) or is_end(x):
            continue
        if isinstance(x, FunctionType):  # its globals lead everywhere
            found: Iterable[Any] = [x.__closure__, x.__defaults__, x.__kwdefaults__, x.__dict__]
        else:
            found = gc.get_referents(x)
        left.extend(filter(gc.is_tracked, found))


def iterate_hidden(results: Iterable[Any]) -> Iterator[Any]:
    """Yield some results and what objects among them hold, the nearest first.

    Objects of forall's own are not looked into, as they lead to the state of all calls. Frames lead
    to all that runs. What lies behind many thousands of objects is not looked at.
    """
    objects = [*filter(gc.is_tracked, results)]
    return islice(iterate_held(objects, _leads_out), _MOST_HIDING) if objects else iter(())


def _leads_out(thing: Any) -> bool:
    """True if what an object holds is not the user's part of a result."""
    if isinstance(thing, FunctionType):
        return is_ours(thing)
    return isinstance(thing, (FrameType, TracebackType)) or _is_our_class(type(thing))


@functools.lru_cache(maxsize=1024)
def _is_our_class(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "forall"


def list_inner_callables(func: FunctionType) -> list[Any]:
    """Return what the closure of a library's function can call, and what the function wraps.

    Those are functions, methods, and objects of the user's classes.
    """
    wrapped = vars(func).get("__wrapped__")
    if wrapped is not None and is_ours(func):  # a transform, which calls no other of the user's
        return [wrapped]
    held = [*map(cell_contents_of, func.__closure__ or ()), wrapped]
    return [
        x for x in held if isinstance(x, _CALLED) or (callable(x) and not is_not_users(type(x)))
    ]


def is_ndarray(value: Any) -> bool:
    return "numpy" in sys.modules and isinstance(value, sys.modules["numpy"].ndarray)


def is_buffer(value: Any) -> bool:
    return isinstance(value, (bytearray, memoryview, array.array)) or is_ndarray(value)


def view_raw_container(value: Any) -> Any:
    """Return a view of a container without overrides: itself if its class is a builtin one."""
    return value if type(value) in _IN_C else RawContainer(value)


class RawContainer:
    """A container of a user's class, read and written by the methods of its builtin base.

    An override may have side effects when a container is only inspected: it may count, load, or
    raise (a tuple whose length is an error).
    """

    __slots__ = ("kind", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.kind: Any = next(kind for kind in type(value).__mro__ if kind in _IN_C)

    def __len__(self) -> int:
        return self.kind.__len__(self.value)

    def __iter__(self) -> Iterator[Any]:
        return self.kind.__iter__(self.value)

    def __getitem__(self, key: Any) -> Any:
        return self.kind.__getitem__(self.value, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.kind.__setitem__(self.value, key, value)

    def values(self) -> Iterable[Any]:
        return self.kind.values(self.value)

    def items(self) -> Iterable[tuple[Any, Any]]:
        return self.kind.items(self.value)

    def clear(self) -> None:
        self.kind.clear(self.value)

    def extend(self, values: Iterable[Any]) -> None:
        self.kind.extend(self.value, values)

    def update(self, values: Any) -> None:
        self.kind.update(self.value, values)

    def copy(self) -> Any:
        """Return a builtin container with the same contents."""
        if self.kind in _DICTS:
            return dict(zip(self, self.values(), strict=True))
        return self.kind(self)

    def replace_contents(self, copy: Any) -> None:
        """Replace the contents by those of ``copy``."""
        self.clear()
        (self.extend if hasattr(self.kind, "extend") else self.update)(copy)
