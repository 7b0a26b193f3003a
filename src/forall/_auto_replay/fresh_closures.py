"""Recognition of fresh closures: functions created with each call that do what the last one did.

NOTE [functions that are made anew]
    ``loss = lambda p: mse(net(p, x), y)`` in a training step is another function in each step. It
    does what the last one did if its code and all that it captures are the very same, but for
    bound values. Bound values are tensors, alone or in lists, tuples and dicts of tensors, numbers
    and strings. A recorded call takes them as it takes its arguments.

    Bound values may be in the function's closure, its defaults, the arguments of a
    `functools.partial`, or under the global names that its own code reads. A tuple of functions is
    taken apart (``compose(f, g)``).

    The calls of all such functions share one cache. The cache is kept with a module that they
    capture. If all that they capture is permanent (functions and classes of modules, numbers,
    strings), it is kept in a table.

    The recorded function is a template: a copy of the function that holds no bound values and is
    given them with each call. Calls of a function that rebinds what it captures are not kept,
    because the template would rebind its own copy.

NOTE [objects of the user's]
    An object may have the function as a method, ``grad(self.loss)``, or a fresh closure may capture
    it. The object is the same in each step, and must not live longer for it. A template, the guards
    and the table hold the object by a weak reference, and its calls are dropped when it dies.

    Guards that reach something which holds the object (a part that refers to its parent) hold it
    too. So the object's calls are kept with a module among its attributes, if there is one: the
    garbage collector can then free the cycle. If there is none, the table drops calls that were
    not made between two full collections, and the second collection frees the object.
"""

from __future__ import annotations

import builtins
import functools
from collections import OrderedDict
from inspect import CO_NESTED
from itertools import chain
from types import (
    BuiltinFunctionType,
    CellType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
)
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch.nn import Module

from forall._api.execution.function_record import RECORD
from forall._api.execution.transform_decorator import find_transform
from forall._api.vjp import PullbackRecord, find_pullback
from forall._auto_replay.bound_pullback import BoundPullback
from forall._compat import pytree
from forall._compat.private_api import PLAIN, OpOverload, OpOverloadPacket
from forall._compat.pure_functions import SCRIPTS
from forall._core.python_state import (
    PLACEHOLDER,
    UNSET,
    ObjectStandIn,
    UnguardedState,
    WeakBox,
    cell_contents_of,
    find_attributes_read,
    globals_of,
    is_not_users,
    may_rebind,
)
from forall._core.reachable import list_slots

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator
    from types import CodeType

    from forall._jit.cache.replayed_pullback import ReplayedPullback

MOST = 256  # functions in the table, the last ones
_DEEPEST = 8  # nested closures; a function that is deeper is taken to hold itself
_MANY = 1000
_OF_OURS = frozenset({RECORD})  # among a function's attributes
_MOST_GIVEN = 2000  # tensors, numbers and words, which are read with each call
_NUMBERS = (int, float, complex)
_WORDS = (bool, str, bytes, type(None), torch.dtype, torch.device)
_LEAVES = frozenset((*PLAIN, *_NUMBERS, *_WORDS))

table: dict[Any, Any] = {}
_keys: dict[Hashable, Hashable] = {}


class BoundValue(UnguardedState):
    """A placeholder in a template for a value that each call binds."""


_TREES = frozenset({tuple, list, dict, OrderedDict})
_SINGLE = frozenset((*PLAIN, *_NUMBERS, BoundValue))
_GIVEN = _SINGLE | _TREES


class FreshClosure(NamedTuple):
    """The parts of a function: ``same``, which make up its key, and ``given``, the bound values.

    ``kept`` are calls that a recorded program keeps, if the key has one.
    """

    same: list
    given: list
    kept: dict[Any, Any] | None = None

    def home(self) -> Module | None:
        """Return a module that the cache of such functions is kept with, or None."""
        objects = [r() for r in self.objects()]
        attributes = (v for x in objects for v in getattr(x, "__dict__", {}).values())
        found = chain(self.same, objects, attributes)
        return next((x for x in found if isinstance(x, Module)), None)

    def objects(self) -> list[ReferenceType]:
        """Return the weak references to the user's objects in the key."""
        return [x for x in self.same if type(x) is ReferenceType]


def may_be_fresh_closure(func: Any) -> bool:
    """Return True if the parts of a function have to be read with each call."""
    how = find_transform(func)
    if how is not None:
        return may_be_fresh_closure(how.func)
    if type(func) is functools.partial or _has_bound_values(func):
        return True
    return find_pullback(func) is not None


def read_fresh_closure(func: Any) -> FreshClosure | None:
    """Return the parts of a fresh closure; None for any other function."""
    reading = _ClosureReader()
    try:
        reading.root(func)
    except CannotShare:
        return None
    return FreshClosure(reading.same, reading.given, reading.kept)


def rebuild_closure(func: Any, given: Iterator | None = None) -> Any:
    """Return a copy of a function with the bound values ``given``; without them, a template.

    Raises:
        CannotShare: for a template of a pull-back whose graph has been freed.
    """
    if _is_tuple_of_functions(func):
        return tuple(rebuild_closure(x, given) for x in func)
    if type(func) in _GIVEN or _is_plain_namedtuple(func):
        return BoundValue() if given is None else next(given)
    how = find_transform(func)
    if how is not None:
        return how.make(rebuild_closure(how.func, given))
    pull = find_pullback(func)
    if pull is not None:
        return BoundPullback(pull, _find_replayed(pull))
    if type(func) is BoundPullback:
        return func if given is None else func.bind([next(given) for _ in range(func.count)])
    if type(func) is WeakBox:
        return func if given is None else func.of()
    if type(func) is ObjectStandIn:
        return ObjectStandIn({n: rebuild_closure(x, given) for n, x in vars(func).items()})
    if is_users_object(func):
        return WeakBox(ref(func))
    if type(func) is MethodType:
        return MethodType(func.__func__, rebuild_closure(func.__self__, given))
    if type(func) is functools.partial:
        inner, *args = (rebuild_closure(x, given) for x in (func.func, *func.args))
        return functools.partial(
            inner, *args, **{name: rebuild_closure(x, given) for name, x in func.keywords.items()}
        )
    return _rebuild_function(func, given) if _has_bound_values(func) else func


class CannotShare(Exception):  # noqa: N818 - no error: nothing is kept
    """A part of a function that another function with the same code need not have."""


class _TooDeep(CannotShare):
    """A part is in too many functions."""


class _ClosureReader:
    def __init__(self) -> None:
        self.same, self.given = [], []
        self.kept: dict[Any, Any] | None = None

    def root(self, func: Any) -> None:
        how = find_transform(func)
        if how is not None:
            self.same.append(_intern_key(how.key))
            self.root(how.func)
        elif type(func) is functools.partial or find_pullback(func) is not None:
            self.part(func, 0)
        elif _has_bound_values(func):
            self.function(func, 1)
        elif isinstance(func, BuiltinFunctionType) and _is_module_level(func):
            self.same.append(func)  # `vmap(torch.sum)`: permanent, and captures nothing
        elif is_users_object(func.__self__ if type(func) is MethodType else func):
            self.part(func, 0)
        else:
            raise CannotShare

    def part(self, x: Any, depth: int) -> None:
        kind = type(x)
        if _is_tuple_of_functions(x):
            if depth > _DEEPEST:
                raise _TooDeep
            self.same += [kind, len(x)]
            for inner in x:
                self.part(inner, depth + 1)
        elif kind in _GIVEN or _is_plain_namedtuple(x):
            if kind not in _SINGLE and not _is_tree_of_plain_leaves(x):
                raise CannotShare
            self.same.append(BoundValue)
            self.given.append(x)
        elif depth > _DEEPEST:
            raise _TooDeep
        elif kind is functools.partial:
            self.same += [kind, len(x.args), *x.keywords]
            for inner in (x.func, *x.args, *x.keywords.values()):
                self.part(inner, depth + 1)
        elif (how := find_transform(x)) is not None:
            self.same.append(_intern_key(how.key))
            self.part(how.func, depth + 1)
        elif (pull := find_pullback(x)) is not None:
            self.pullback(x, pull)
        elif _has_bound_values(x):
            self.function(x, depth + 1)
        elif isinstance(x, (Module, ModuleType, *_WORDS)) or _is_unique(x) or _is_module_level(x):
            self.same.append(x)
        elif kind is MethodType:
            self.same.append(x.__func__)
            self.part(x.__self__, depth + 1)
        elif is_users_object(x):
            self.same.append(ref(x))
        else:
            raise CannotShare

    def pullback(self, func: Any, pull: PullbackRecord) -> None:
        found = _find_replayed(pull)
        BoundPullback.originals[found.saved[0]] = func
        key = found.outputs, found.gradients, pull.has_aux
        self.same += [found.recorded, _intern_key(key), *[BoundValue] * len(found.saved)]
        self.given += found.saved
        self.kept = found.recorded.derivative.calls

    def function(self, func: FunctionType, depth: int) -> None:
        if vars(func).keys() - _OF_OURS or func.__kwdefaults__ or may_rebind(func.__code__):
            raise CannotShare
        names = func.__globals__
        self.same += [func.__code__, names]
        for x in func.__defaults__ or ():
            self.part(x, depth)
        for variable, x in _iterate_captured(func):
            read = _read_attributes(func.__code__, variable, x)
            if read is None or not self.attributes(read, depth):
                self.part(x, depth)
        for name in _find_undefined_names(func):
            self.same += [name, UNSET]
        for name in find_bound_globals(func):
            self.same.append(name)
            self.part(names[name], depth)

    def attributes(self, read: dict[str, Any], depth: int) -> bool:
        """Add attributes of an object in its place; False if another object need not have them."""
        before = len(self.same), len(self.given)
        self.same += [ObjectStandIn, *read]
        try:
            for x in read.values():
                if _is_held_weakly(x):
                    self.same.append(ref(x))
                else:
                    self.part(x, depth + 1)
        except _TooDeep:
            raise
        except CannotShare:
            del self.same[before[0] :], self.given[before[1] :]
            return False
        return True


def _is_unique(x: Any) -> bool:
    """Return True for a mark: an empty cell's content, an open place in a `functools.partial`."""
    return x is UNSET or x is PLACEHOLDER


def _iterate_captured(func: FunctionType) -> Iterator[tuple[str, Any]]:
    cells = map(cell_contents_of, func.__closure__ or ())
    return zip(func.__code__.co_freevars, cells, strict=True)


def _read_attributes(code: CodeType, variable: str, x: Any) -> dict[str, Any] | None:
    """Return what code reads of an object that it captures; None if that may be anything else."""
    names = find_attributes_read(code, variable) if is_users_object(x) else None
    if names is None:
        return None
    own, kind = vars(x), type(x)
    if kind.__getattribute__ is not object.__getattribute__:
        return None
    if any(name not in own or _has_setter(kind, name) for name in names):
        return None  # the class has a say
    return {name: own[name] for name in names}


def _has_setter(kind: type, name: str) -> bool:
    """Return True if a class has a data descriptor, which goes before an object's attribute."""
    found = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
    return hasattr(type(found), "__set__") or hasattr(type(found), "__delete__")


def _find_replayed(pull: PullbackRecord) -> ReplayedPullback:
    found = pull.pull.find_replayed()
    if found is None or not found.saved:
        raise CannotShare
    return found


def find_bound_globals(func: FunctionType) -> tuple[str, ...]:
    """Return the global names in a function's own code that hold bound values."""
    known = vars(func).get("__forall_given__")  # a template's; guards read it too
    if known is not None:
        return known
    names = func.__globals__
    return tuple(n for n, _ in globals_of(func.__code__) if _holds_tensors(names.get(n)))


def _find_undefined_names(func: FunctionType) -> list[str]:
    names = func.__globals__
    return [n for n, _ in globals_of(func.__code__) if n not in names and not hasattr(builtins, n)]


def _rebuild_function(func: FunctionType, given: Iterator | None) -> FunctionType:
    defaults = tuple(rebuild_closure(x, given) for x in func.__defaults__ or ())
    cells = [_rebuild_captured(func.__code__, *found, given) for found in _iterate_captured(func)]
    names, home = find_bound_globals(func), func.__globals__
    if given is not None and names:
        home = home | {name: next(given) for name in names}
    closure = tuple(CellType() if x is UNSET else CellType(x) for x in cells)
    made = FunctionType(func.__code__, home, func.__name__, defaults or None, closure)
    made.__qualname__ = func.__qualname__
    if given is None:
        vars(made)["__forall_given__"] = names
    return made


def _rebuild_captured(code: CodeType, variable: str, x: Any, given: Iterator | None) -> Any:
    read = _read_attributes(code, variable, x)
    if read is None or not _ClosureReader().attributes(read, 0):
        return rebuild_closure(x, given)
    weakly = {n: WeakBox(ref(v)) if _is_held_weakly(v) else v for n, v in read.items()}
    return rebuild_closure(ObjectStandIn(weakly), given)


def _is_held_weakly(x: Any) -> bool:
    """Return True for a module whose attributes are all that guards read of it."""
    return isinstance(x, Module) and not isinstance(x, SCRIPTS)


def _has_bound_values(x: Any) -> bool:
    """Return True for a user's function that is nested, a lambda, or reads bound globals."""
    if type(x) is not FunctionType or is_not_users(x):
        return False
    return (
        _is_nested_or_lambda(x)
        or "__forall_given__" in vars(x)
        or bool(find_bound_globals(x) or _find_undefined_names(x))
    )


def _is_nested_or_lambda(func: FunctionType) -> bool:
    return bool(func.__code__.co_flags & CO_NESTED) or func.__name__ == "<lambda>"


def _holds_tensors(x: Any) -> bool:
    if type(x) in PLAIN:
        return True
    is_tree = type(x) in _TREES or _is_plain_namedtuple(x)
    return (
        is_tree
        and _is_tree_of_plain_leaves(x)
        and any(type(leaf) in PLAIN for leaf in pytree.get_leaves(x))
    )


def _is_plain_namedtuple(x: Any) -> bool:
    """Return True for a NamedTuple that has nothing but its entries."""
    kind = type(x)
    return issubclass(kind, tuple) and hasattr(kind, "_fields") and not kind.__dictoffset__


def is_users_object(x: Any) -> bool:
    """Return True for a user's object that has attributes and can be referenced weakly."""
    kind = type(x)
    known = _kinds.get(kind)
    if known is None:
        known = _kinds[kind] = _is_users_class(kind)
    return known and not pytree.is_registered(kind)


_kinds: WeakKeyDictionary[type, bool] = WeakKeyDictionary()


def _is_users_class(kind: type) -> bool:
    if is_not_users(kind) or not (kind.__dictoffset__ and kind.__weakrefoffset__):
        return False
    if issubclass(kind, (Module, torch.Tensor, type, *_TREES, *_NUMBERS, *_WORDS[:3])):
        return False
    return not list_slots(kind)


def _is_tree_of_plain_leaves(x: Any) -> bool:
    """Return True for a tree of tensors, numbers and strings."""
    return len(x) <= _MOST_GIVEN and _LEAVES.issuperset(map(type, pytree.get_leaves(x)))


def _is_tuple_of_functions(x: Any) -> bool:
    """Return True for a tuple of functions and the like, and not of values that can be bound."""
    return type(x) is tuple and not _is_tree_of_plain_leaves(x)


def _is_module_level(x: Any) -> bool:
    if isinstance(x, BuiltinFunctionType):
        return x.__self__ is None or isinstance(x.__self__, ModuleType)
    if isinstance(x, (MethodDescriptorType, OpOverload, OpOverloadPacket)):
        return True
    return isinstance(x, (FunctionType, type)) and "<locals>" not in x.__qualname__


def _intern_key(key: Hashable) -> Hashable:
    """Return the first of all equal keys, so that keys can be compared by identity."""
    if key is None:
        raise CannotShare
    if len(_keys) >= _MANY:
        _keys.clear()
    return _keys.setdefault(key, key)
