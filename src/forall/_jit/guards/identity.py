"""Keys of values: hashable keys that are equal only for values that no code can tell apart.

NOTE [when two values are one]
    ``1 == True == 1.0``, ``0.0 == -0.0``, and a user's class may define `__eq__` as it likes. So a
    value has a key by its contents only if its class is an immutable one of Python's or torch's
    own, or a container of these: with the classes, and floats by their digits. Every other value
    has its identity as key, and is one of the `objects <Reading.objects>` for the guards, which
    compare its contents. A class in C that guards cannot look into is `UnfitArgument`.

    A container of a registered class is more than its children: it has a context, and may have
    attributes outside of it. Both are part of the key, as values.
"""

from __future__ import annotations

import array
import datetime as dt
import decimal
import fractions
import functools
import logging
import operator
import re
import sys
import types
import uuid
import zoneinfo
from collections import OrderedDict, defaultdict, deque
from contextvars import ContextVar
from enum import Enum
from types import MemberDescriptorType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch

from forall._compat import pytree
from forall._compat.private_api import OpOverload, OpOverloadPacket, module_of
from forall._compat.tensordict import is_context_value
from forall._core.python_state import UnguardedState, is_library_object, is_not_users
from forall._core.reachable import DICT_VIEWS, WRAPPERS, list_own_attributes
from forall._jit.guards.leaves import LRU_CACHE

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence


class UnfitArgument(Exception):  # noqa: N818 - no error: the call runs eagerly
    """Signal an argument that no program can be made for; the text is the reason."""


# Values of these classes are the same if they are equal and of one class.
EXACT_CLASSES = frozenset(
    {
        int,
        bool,
        str,
        bytes,
        type(None),
        type(...),
        type(NotImplemented),
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
        torch.Size,
    }
)
_FRACTIONAL = (float, complex)
_SEQUENCES = (tuple, list, set, frozenset, deque)
_DICTS = (dict, OrderedDict, defaultdict)
# Classes in C that the guards look into, or that are immutable.
_KNOWN_CLASSES = frozenset(
    {
        object,
        type,
        *EXACT_CLASSES,
        *_FRACTIONAL,
        *_SEQUENCES,
        *_DICTS,
        *DICT_VIEWS,
        *WRAPPERS,
        LRU_CACHE,
        ContextVar,
        ref,
        array.array,
        bytearray,
        memoryview,
        range,
        slice,
        operator.itemgetter,
        operator.attrgetter,
        functools.partial,
        logging.Logger,
        re.Pattern,
        decimal.Decimal,
        fractions.Fraction,
        uuid.UUID,
        dt.date,
        dt.datetime,
        dt.time,
        dt.timedelta,
        dt.timezone,
        dt.tzinfo,
        zoneinfo.ZoneInfo,
        types.FunctionType,
        types.ModuleType,
        types.SimpleNamespace,
        types.MappingProxyType,
        types.CodeType,
        types.GenericAlias,
        types.UnionType,
        types.MethodDescriptorType,
        types.WrapperDescriptorType,
        types.ClassMethodDescriptorType,
        types.GetSetDescriptorType,
        types.MemberDescriptorType,
        torch.Generator,
        torch.finfo,
        torch.iinfo,
        *torch.Tensor.__mro__,
        OpOverload,
        OpOverloadPacket,
        torch.jit.ScriptFunction,
    }
)
_POINTER_BYTES = 8  # bytes of a pointer


class KeyMaker:
    """A maker of keys. ``objects`` are the values keyed by identity, for the guards to watch.

    ``nodes`` are the containers that were visited; code may compare them by identity.
    """

    def __init__(self, leaves: Iterable[Any] = ()) -> None:
        self.objects: list[Any] = []
        self.nodes: list[Any] = []
        self._places = {id(x): i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)}
        self._met: dict[int, int] = {}
        self._inner: dict[int, int] = {}  # places of the containers in the one that is looked at

    def make_key(self, x: Any) -> Any:
        """Return a hashable key that is equal for another value only if the two are the same."""
        kind: Any = type(x)
        if kind in EXACT_CLASSES:
            return kind, x
        if kind in _FRACTIONAL:
            if x == x:  # noqa: PLR0124 - not nan, which Python's containers compare by identity
                return kind, repr(x)
        elif kind is range or kind is slice:
            return kind, self.make_key(x.start), self.make_key(x.stop), self.make_key(x.step)
        elif kind in _SEQUENCES or (kind in _DICTS and not getattr(x, "__dict__", None)):
            return self._make_container_key(x)
        elif id(x) in self._inner:
            return kind, "inner", self._inner[id(x)]
        elif isinstance(x, torch.Tensor):
            if id(x) not in self._places:
                raise UnfitArgument(
                    "an argument that holds a tensor out of sight of its class's leaves"
                )
            return torch.Tensor, self._places[id(x)]
        elif is_context_value(x):
            return kind, *[self.make_key(value) for _, value in list_own_attributes(x)]
        elif _is_numpy_number(kind):
            return kind, x.dtype.str, x.tobytes()
        elif _is_object_method(x):  # each look-up makes a new bound method
            self._check_visible(x.__self__)
            self.objects += [x.__func__, x.__self__]
            return kind, id(x.__func__), id(x.__self__)
        else:
            self._check_visible(x)
        self.objects.append(x)
        return kind, id(x)

    def has_mutable(self) -> bool:
        """True if a mutable container was visited."""
        return any(isinstance(x, _MUTABLE_CONTAINERS) for x in self.nodes)

    def make_leaf_key(self, x: Any) -> Any:
        """Return the key of a leaf of the arguments; a set has its identity as key."""
        if type(x) is not set:
            return self.make_key(x)
        self.objects.append(x)
        return set, id(x)

    def make_context_key(self, node: Any, children: Sequence[Any], context: Any) -> Any:
        """Return the key of a container's context and attributes, without its children."""
        kept = self.make_key(context)
        kind = type(node)
        if kind in _DICTS and not getattr(node, "__dict__", None):
            return kept
        state = list_own_attributes(node)
        if not state:
            return kept
        if is_library_object(kind):
            state.sort(key=_get_name)  # its class's functions make it with any order of these
        mine = {id(child): i for i, child in enumerate(children)}
        self._inner = {
            id(child): i for i, child in enumerate(children) if pytree.is_registered(type(child))
        }
        found = [(n, mine.get(id(v), -1), self._make_key_unless(mine, v)) for n, v in state]
        self._inner = {}
        return kept, tuple(found)

    def _make_key_unless(self, known: dict[int, int], value: Any) -> Any:
        return None if id(value) in known else self.make_key(value)

    def _make_container_key(self, x: Any) -> Any:
        known = self._met.get(id(x))
        if known is not None:  # met before, perhaps inside itself
            return type(x), "met", known
        self._met[id(x)] = len(self.nodes)
        self.nodes.append(x)
        found: list[Any] = [type(x), len(x)]
        if isinstance(x, dict):
            found += map(self.make_key, x)
            found += map(self.make_key, x.values())
            if type(x) is defaultdict:
                found.append(self.make_key(x.default_factory))
        else:
            found += map(self.make_key, x)  # sets have an order too
            if type(x) is deque:
                found.append(self.make_key(x.maxlen))
        return tuple(found)

    def _check_visible(self, x: Any) -> None:
        if _has_hidden_state(type(x)):
            raise UnfitArgument(
                f"an argument of class {type(x).__name__}, into which nobody can look"
            )
        if isinstance(x, (dt.datetime, dt.time)) and x.tzinfo is not None:
            self.make_key(x.tzinfo)


_get_name = operator.itemgetter(0)


def _is_object_method(x: Any) -> bool:
    """True for a bound method of an object that has its identity as key."""
    if type(x) is not types.MethodType:
        return False
    return not isinstance(
        x.__self__, (torch.Tensor, *EXACT_CLASSES, *_FRACTIONAL, *_SEQUENCES, *_DICTS)
    )


def _is_numpy_number(kind: type) -> bool:
    if kind.__module__ != "numpy":
        return False
    numpy = sys.modules["numpy"]
    return issubclass(kind, (numpy.number, numpy.bool_, numpy.datetime64)) and is_not_users(kind)


def _has_hidden_state(kind: type) -> bool:
    """True if objects of a class may have state in C that guards cannot see."""
    known = _hidden.get(kind)
    if known is None:
        known = _hidden[kind] = not issubclass(kind, UnguardedState) and any(
            map(_class_hides_state, kind.__mro__)
        )
    return known


_hidden: WeakKeyDictionary[type, bool] = WeakKeyDictionary()


def _class_hides_state(kind: type) -> bool:
    """True if a class makes its objects larger than its attributes and slots explain."""
    if kind in _KNOWN_CLASSES or _is_numpy_class(kind):
        return False
    if issubclass(kind, (BaseException, super)):
        return True
    numpy = sys.modules.get("numpy")
    if numpy is not None and issubclass(kind, numpy.ndarray) and is_not_users(kind):
        return True  # a masked array, for example
    base = kind.__base__ or object
    shown = sum(type(found) is MemberDescriptorType for found in vars(kind).values())
    shown += ("__dict__" in vars(kind)) + ("__weakref__" in vars(kind))
    return kind.__basicsize__ - base.__basicsize__ > _POINTER_BYTES * shown or (
        kind.__itemsize__ > base.__itemsize__
    )


def _is_numpy_class(kind: type) -> bool:
    """True for a class of numpy's without hidden state: arrays, and immutable objects."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not module_of(kind).startswith("numpy") or kind is numpy.void:
        return False
    fixed = (numpy.generic, numpy.dtype, numpy.ufunc, type(numpy.sum))
    return kind in (numpy.ndarray, numpy.matrix) or issubclass(kind, fixed)


def outline_call(args: tuple, kwargs: dict) -> tuple[list[Any], Any, list[Any]]:
    """Return the leaves of a call, the outline of its arguments (their tree), and the containers.

    The outline also tells which containers are the same object, as ``a is b`` would. Bound methods
    count as containers, since their identity is no part of their value.
    """
    if not kwargs and pytree.are_leaves(map(type, args)):
        return [*args], len(args), []
    outline = pytree.TreeOutline()
    shape = (len(args), *outline.all(args))
    if kwargs:
        shape += (outline.outline_node(kwargs),)
    leaves, nodes = outline.leaves, outline.nodes
    nodes += filter(_is_object_method, leaves)
    if outline.odd:
        reading = KeyMaker(leaves)
        shape = (shape, *[reading.make_context_key(*one) for one in outline.odd])
        nodes += reading.nodes
    if len(nodes) > 1 and len({*map(id, nodes)}) < len(nodes):
        places = [*map(id, nodes)]
        shape = (shape, *map(places.index, places))
    return leaves, shape, nodes


def find_keyed_objects(args: tuple, kwargs: dict) -> list[Any]:
    """The arguments of a call that are keyed by identity, and container classes of the user's."""
    outline = pytree.TreeOutline()
    outline.outline_node((args, kwargs))
    reading = KeyMaker(outline.leaves)
    for one in outline.odd:
        reading.make_context_key(*one)
    for leaf in outline.leaves:
        if not isinstance(leaf, torch.Tensor):
            reading.make_leaf_key(leaf)
    classes = pytree.find_classes(pytree.flatten((args, kwargs))[1])
    return [*reading.objects, *[kind for kind in classes if not is_not_users(kind)]]


def find_result_problem(
    result: Any, leaves: list[Any], spec: Any, known: Container[int], given: Sequence[Any] | None
) -> str | None:
    """The reason why a program cannot make a call's result; None where it can.

    ``known`` are the ids of objects that existed before the call. ``given`` are the containers of
    the arguments, if a result may be none of these.
    """
    for x in leaves:
        if isinstance(x, torch.Tensor):
            if id(x) not in known and (vars(x) or type(x) is torch.nn.Parameter):
                return "a result with attributes, or one that is a Parameter"
        elif not _is_constant_value(x):
            return f"a result of class {type(x).__name__}"
    outline, reading = pytree.TreeOutline(), KeyMaker(leaves)
    told = outline.outline_node(result), [reading.make_context_key(*one) for one in outline.odd]
    for x in reading.objects:
        if id(x) not in known and not _is_permanent(x):
            return f"a result that holds an object of class {type(x).__name__}"
    if outline.odd:
        again, other = pytree.TreeOutline(), KeyMaker(leaves)
        made = again.outline_node(pytree.unflatten(leaves, pytree.copy_contexts(spec)))
        if (made, [other.make_context_key(*one) for one in again.odd]) != told:
            return "a result that is more than its leaves"
    if given is None:
        return None
    changing = [
        id(x) for x in (*outline.nodes, *reading.nodes) if isinstance(x, _MUTABLE_CONTAINERS)
    ]
    before = {*map(id, given)}
    if len({*changing}) < len(changing) or any(x in before or x in known for x in changing):
        return "a result that holds a list or dict twice, or one that was there before"
    return None


_MUTABLE_CONTAINERS = (list, dict, set, deque)


def _is_constant_value(x: Any) -> bool:
    """True for an immutable value that a program can return in each call."""
    kind = type(x)
    return (
        kind in EXACT_CLASSES
        or kind in _FRACTIONAL
        or _is_numpy_number(kind)
        or isinstance(x, Enum)
    )


def _is_permanent(x: Any) -> bool:
    """True if an object is the same in each call: a definition of a module's, or our own."""
    if isinstance(x, (type, types.FunctionType, types.BuiltinFunctionType)):
        return "<locals>" not in x.__qualname__ and "<lambda>" not in x.__qualname__
    return module_of(type(x)).partition(".")[0] == "forall" or _is_constant_value(x)
