"""Guards: the Python state that a recorded call depends on, and the check that it is unchanged.

A program knows nothing of Python. So each call compares by identity what the function can reach:
its closure, its defaults, the object it is bound to, the globals that it or a function it calls
names, and modules, classes, containers and objects in these. A method that nothing calls is
compared itself; its closure and globals are not.
"""

from __future__ import annotations

import abc
import builtins
import copyreg
import functools
import gc
import os
import pickle
import sys
from collections import deque
from contextvars import ContextVar
from types import (
    BuiltinFunctionType,
    CellType,
    FunctionType,
    MappingProxyType,
    ModuleType,
)
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType

import torch
from torch.nn.utils import parametrize

from forall._compat.private_api import PLAIN, OpOverload, OpOverloadPacket
from forall._compat.pure_functions import (
    SCRIPTS,
    find_op_definition,
    has_tolist,
    is_known_function,
    is_of_optree,
    is_trusted_value,
)
from forall._compat.pytree import is_registered
from forall._core.python_state import (
    UNSET,
    ObjectStandIn,
    UnguardedState,
    WeakBox,
    cell_contents_of,
    is_library_module,
    is_library_object,
    is_not_users,
    is_ours,
)
from forall._core.reachable import (
    FUNCTION_ATTRIBUTES,
    WRAPPERS,
    Visitors,
    Walk,
    is_buffer,
    is_ndarray,
    list_parts,
    list_slots,
    view_raw_container,
)
from forall._jit.deadline import (
    NO_DEADLINE,
    STEPS_PER_CLOCK_READ,
    TOO_LONG,
    Deadline,
    clock,
)
from forall._jit.guards.attribute_names import AttributeNames
from forall._jit.guards.conditions import GuardConditions
from forall._jit.guards.import_sources import find_imports
from forall._jit.guards.leaves import (
    LOGGING_CLASSES,
    LRU_CACHE,
    SEQUENCE_ITERATORS,
    can_reach_ids,
    count_remaining,
    get_hint_parts,
    has_state,
    is_alive,
    is_c_iterator,
    is_constant_class,
    is_environment,
    is_method_def,
    is_type_hint,
    lacks_names,
    list_cached,
    make_cache_test,
    may_have_attributes,
    read_buffer,
)
from forall._jit.guards.library_globals import (
    LibraryWalk,
    is_in_order_of_optree,
    namespaces_in,
    registered_with_optree,
    registry_of_optree,
)
from forall._jit.guards.module_names import find_held_modules, find_open_namespaces, is_users_module
from forall._jit.tracing.coverage import FULL_COVERAGE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from forall._jit.tracing.coverage import FullCoverage

_MOST_BYTES = 4096  # of an array that each call compares
TOO_MUCH = "the function reaches too much of Python's state to watch"
_FUNCTION_ATTRIBUTES = (
    *FUNCTION_ATTRIBUTES,
    "__name__",
    "__qualname__",
    "__doc__",
    "__module__",
    "__annotations__",  # from Python 3.14 on this runs code, which may raise
    *(name for name in ("__annotate__", "__type_params__") if name in vars(FunctionType)),
)
_BUILTINS = vars(builtins)
_OPERATORS = (OpOverload, OpOverloadPacket)
_MODULE_HOOKS = frozenset({"__getattr__"})  # a module's name that Python looks up by itself


class Guards(GuardConditions):
    """A snapshot of the Python state that a function can reach, as far as its code tells."""

    def __init__(
        self,
        func: Callable,
        given: Iterable[Any] = (),
        ran: FullCoverage = FULL_COVERAGE,
        until: Deadline = NO_DEADLINE,
    ) -> None:
        super().__init__()
        self.ran = ran
        self.until = until  # the deadline of the walk
        self.generators: list[torch.Generator] = []
        self.given = [*given]  # arguments that a cache key may know by identity
        self.watch_class(torch.Tensor)  # code may ask it for any name
        walk = _GuardWalk(self, [func, *self.given])
        # All visited objects, kept alive so that no other gets the same id.
        self._held, self._kinds = walk.walk.held, walk.kinds
        walk.run()

    def list_visited(self) -> Iterable[Any]:
        """All visited objects, except the modules that code names."""
        return [*self._held.values(), *self._kinds.values()]

    def collect_ids(self) -> frozenset[int]:
        """The ids of all visited objects, tensors too: an argument may be one of these."""
        return frozenset((*self._held, *self.tensors))

    def leads_to_weak(self) -> bool:
        """True if an object that is to be held weakly can be reached from what is held here."""
        weakly = {id(x.of()) for x in self._held.values() if isinstance(x, WeakBox)}
        return bool(weakly) and can_reach_ids(weakly, self._held)


class _GuardWalk:
    """The walk of guards over what a function reaches, in which attributes wait to be named.

    It is gone with what it holds once the guards are made: that may lead anywhere. Names are looked
    up in an order that does not depend on hashes, as the first obstacle met is the one told.
    """

    def __init__(self, guards: Guards, roots: list[Any]) -> None:
        self.guards, self.ran, self.state = guards, guards.ran, guards._state
        self.walk = Walk(roots)
        # `sys.modules` counts as visited: code names the modules that it asks for.
        self.walk.held[id(sys.modules)] = sys.modules
        self.kinds: dict[int, type] = {}  # the classes of objects, and their bases
        self.asked = AttributeNames(self.ran)
        self.libraries = LibraryWalk(self.walk, self.asked, self.state, guards._libraries)
        # The `__dict__`s of objects of which code asks some names, with weak holders of these.
        self.states: list[tuple[dict[str, Any], WeakBox | None]] = []
        self.functions: list[FunctionType] = []  # the user's, and those that do not run
        self.aside: list[Mapping[str, Any]] = []  # entries are visited only if code names them
        self.modules: set[tuple[int, frozenset[str]]] = set()
        self.asks_optree = False

    def run(self) -> None:
        while self.walk.left and self.guards.why is None:
            self.walk.run(self, _visitors)
            self.libraries.run()
            self.walk.left += self._list_late()
        self._watch_states()
        if self.asks_optree:
            self._watch_optree()

    def visit(self, value: Any) -> None:
        """Visit an object; its own `__class__` or `__dict__` may raise."""
        guards, visited = self.guards, len(self.walk.held)
        if guards.why is not None:
            self.walk.left.clear()
        elif visited > self.ran.most:
            guards.why = TOO_MUCH
        elif not visited % STEPS_PER_CLOCK_READ and clock() > guards.until.call:
            guards.why = TOO_LONG
        else:
            try:
                self._visit(value)
            except Exception as error:  # noqa: BLE001
                guards.why = _describe_error(error)

    def _list_late(self) -> Iterator[Any]:
        """Yield what code names by now and is not yet visited."""
        late = [value for _, _, value in self._read_named_attributes()]
        late += [x for names in self.aside for n, x in names.items() if self.asked.contains_name(n)]
        late += self.libraries.list_registered({**self.kinds, **self.walk.held})
        known = self.walk.held
        return (x for x in late if id(x) not in known and _visitors[type(x)] is not None)

    def _read_named_attributes(self) -> list[tuple[FunctionType, str, Any]]:
        """Return the functions with their attributes that code may ask for, by name and value."""
        made_of = FUNCTION_ATTRIBUTES if self.asked.contains_name("signature") else ()
        asked = [n for n in _FUNCTION_ATTRIBUTES if n in made_of or self.asked.contains_name(n)]
        try:
            return [(f, name, getattr(f, name)) for f in self.functions for name in asked]
        except Exception as error:  # noqa: BLE001
            self.guards.why = _describe_error(error)
            return []

    def _visit(self, value: Any) -> None:
        look = next((look for kinds, look in _VISITORS if isinstance(value, kinds)), None)
        if is_c_iterator(value):
            self.guards.why = (
                "the function reaches an iterator, and nothing tells how far that has come"
            )
        elif type(value) in SEQUENCE_ITERATORS:
            self._visit_iterator(value)
        elif is_environment(value):
            self.state.watch_entries(os.environ._data)
        elif is_buffer(value):
            self._watch_buffer(value)
        elif look is not None:
            look(self, value)
        elif is_type_hint(value):
            self._visit_hint(value)
        elif (parts := list_parts(value)) is not None:
            self.walk.left += parts
        elif not isinstance(value, UnguardedState):
            self._visit_object(value)
        if may_have_attributes(value):
            self._visit_object(value)  # of a user's class with entries: a NamedTuple, a dict

    def _visit_tensor(self, value: torch.Tensor) -> None:
        self.guards.tensors[id(value)] = value
        self.walk.left.append(vars(value))  # attributes of the user's

    def _watch_buffer(self, value: Any) -> None:
        """Watch the data of a numpy array or a Python buffer."""
        data = read_buffer(value)
        self.state.data.append((value, data))
        if len(data[0]) > _MOST_BYTES or (is_ndarray(value) and value.dtype.hasobject):
            self.guards.why = (
                "the function reaches an array whose numbers may change, too large to watch"
            )

    def _visit_script(self, value: Any) -> None:
        if has_tolist(value):
            self.guards.why = "a function in TorchScript that it reaches makes a list of a tensor"
        self._visit_object(value)

    def _visit_mapping(self, value: Mapping) -> None:
        self.state.watch_entries(value)
        self.walk.left += [*view_raw_container(value), *view_raw_container(value).values()]

    def _visit_sequence(self, value: Any) -> None:
        value, kind = view_raw_container(value), type(value)
        if not issubclass(kind, (tuple, frozenset)):
            self.state.lists.append((value, tuple(value)))  # sets have an order too
        self.walk.left += value

    def _visit_hint(self, value: Any) -> None:
        origin = getattr(value, "__origin__", None)
        if not (isinstance(origin, type) and is_not_users(origin)):  # a call of the hint calls it
            self.walk.left.append(origin)
        self.aside.append(get_hint_parts(value))

    def _visit_cell(self, cell: CellType) -> None:
        value = cell_contents_of(cell)
        self.state.attributes.append((cell, "cell_contents", value))
        self.walk.left.append(value)

    def _visit_weak(self, value: WeakBox) -> None:
        self._visit_object(value.of(), value)

    def _visit_reference(self, value: ContextVar | ReferenceType) -> None:
        if isinstance(value, ReferenceType):
            self.state.others.append(functools.partial(is_alive, value, wanted=is_alive(value)))
            self.walk.left += [WeakBox(value)] if type(value()) not in (type(None), *PLAIN) else []
            return
        now = value.get(UNSET)
        self.state.others.append(lambda: value.get(UNSET) is now)
        self.walk.left += [now, *gc.get_referents(value)]  # the default of the variable among these

    def _visit_iterator(self, value: Any) -> None:
        now = count_remaining(value)
        self.state.others.append(lambda: count_remaining(value) == now)
        self.walk.left += value.__reduce__()[1]

    def _visit_logger(self, value: Any) -> None:
        self.state.attributes.append((value, "__class__", type(value)))
        self.aside.append(vars(value))
        self.states.append((vars(value), None))

    def _visit_wrapper(self, value: Any) -> None:
        if isinstance(value, functools.cached_property):  # the others are as they were made
            self.state.attributes.append((value, "func", value.func))
        if is_of_optree(value) and not self.asks_optree:
            self.asks_optree = True
            self.walk.left += registered_with_optree()
        if value is pickle.dumps:  # it calls functions that are registered for a class
            self.walk.left.append(copyreg.dispatch_table)
        if isinstance(value, BuiltinFunctionType):
            self.walk.left += self.asked.release_for_value(value)
        if type(value) is classmethod:
            self.walk.left += self.asked.release_makers()
        if isinstance(value, functools.partial):
            self.walk.left.append(vars(value))
        if not is_of_optree(value):
            self.walk.left += list_parts(value) or ()

    def _watch_optree(self) -> None:
        """Watch what others may tell optree: the classes it takes apart, and its order of dicts."""
        registry = registry_of_optree()
        self.walk.held[id(registry)] = registry
        self.state.watch_entries(registry)
        texts = {key[0] for key in registry if isinstance(key, tuple)}
        texts |= {x for *_, x in self.state.names + self.state.attributes if isinstance(x, str)}
        for names, keys, values in self.state.dicts:
            if names is not registry and "namespace" in keys:
                texts |= {x for x in values if isinstance(x, str)}
        for func in self.functions:
            texts.update(namespaces_in(func.__code__))
            texts |= {x for x in func.__defaults__ or () if isinstance(x, str)}
        names = tuple(sorted(name for name in texts if name.isprintable() and " " not in name))
        self.guards.watch_answer(functools.partial(is_in_order_of_optree, ("", *names)))

    def _visit_cache(self, func: Any) -> None:
        self.state.others.append(make_cache_test(func))
        self.walk.left.append((*list_cached(func),))

    def _visit_function(self, func: FunctionType) -> None:
        if is_not_users(func) and not is_ours(func):
            self.libraries.left.append(func)
        if is_known_function(func):
            return
        if is_ours(func):
            # Our own functions never change, nor do their globals and defaults.
            self.walk.left += [
                *map(cell_contents_of, func.__closure__ or ()),
                *func.__dict__.values(),
            ]
            return
        self.functions.append(func)
        if not self.ran.may_have_run(func.__code__):
            if func.__dict__ or not (is_not_users(func) or is_method_def(func)):
                self._visit_state(func.__dict__)
            return
        written = self.ran.list_written_names(func.__code__) | _MODULE_HOOKS
        self.walk.left += [*self.asked.release_for_value(func), *self.asked.release_for_code(func)]
        for name in FUNCTION_ATTRIBUTES:
            value = getattr(func, name)
            self.state.attributes.append((func, name, value))
            self.walk.left.append(value)
        asked = self.ran.list_free_vars(func.__code__)
        for name, cell in zip(func.__code__.co_freevars, func.__closure__ or (), strict=True):
            if name in asked:
                value = cell_contents_of(cell)
                self.state.attributes.append((cell, "cell_contents", value))
                self._visit_named_value(value, written)
        if not is_not_users(func):
            names, given = func.__globals__, vars(func).get("__forall_given__", ())
            wanted = [n for n in self.ran.list_globals(func.__code__) if n not in given]
            missing = [n for n in wanted if n not in names]
            self.state.names += [(names, n, UNSET) for n in missing]
            self.state.names += [(_BUILTINS, n, _BUILTINS.get(n, UNSET)) for n in missing]
            self._watch_names(names, wanted, written)
            self._visit_modules_of(func)

    def _visit_modules_of(self, func: FunctionType) -> None:
        """Visit the user's modules that a function imports, or has whole in a variable."""
        imports = find_imports(func, self.ran)
        self.walk.left += find_held_modules(func, self.ran, imports)
        for name, home in find_open_namespaces(func, self.ran):
            self.state.names.append((sys.modules, name, sys.modules.get(name, UNSET)))
            self._watch_namespace(home)
        for code, found in imports.items():
            inner = self.ran.list_written_names(code)
            self.state.names += [(sys.modules, name, module) for name, module in found.found]
            for module in found.modules.values():
                self._visit_named_value(module, inner)
            for inside, name, _ in found.taken:
                if not is_library_module(inside.__name__):
                    self._watch_names(vars(inside), [name], inner)

    def _watch_names(
        self, names: dict[str, Any], wanted: Iterable[str], inner: frozenset[str]
    ) -> None:
        """Watch these names and visit their values.

        In a user's module among the values, the ``inner`` names are watched and visited too.
        """
        for name in wanted:
            value = names.get(name, UNSET)
            if value is UNSET:
                continue
            self.state.names.append((names, name, value))
            self._visit_named_value(value, inner)

    def _visit_named_value(self, value: Any, inner: frozenset[str]) -> None:
        if not isinstance(value, ModuleType):
            self.walk.left.append(value)
            return
        if is_library_module(value.__name__):
            self.libraries.watch_module(value, inner)
        self.walk.left += self.asked.release_for_value(value)
        if type(value) is not ModuleType:  # then its class has a say too
            self.walk.left.append(value)
        if not is_library_module(value.__name__) and (id(value), inner) not in self.modules:
            self.modules.add((id(value), inner))
            self.state.attributes.append((value, "__class__", type(value)))
            self.state.missing.append((vars(value), inner - vars(value).keys()))
            self._watch_names(vars(value), sorted(inner & vars(value).keys()), inner)

    def _visit_module(self, module: ModuleType) -> None:
        if is_users_module(module):
            self.state.attributes.append((module, "__class__", type(module)))
            self._watch_namespace(vars(module))
            if type(module) is not ModuleType:
                self._visit_class_attributes(type(module))

    def _watch_namespace(self, names: dict[str, Any]) -> None:
        """Watch a module's names that code can reach in any way: each name that code contains."""
        if id(names) not in self.walk.held:
            self.walk.held[id(names)] = names
            own = {n: x for n, x in names.items() if n == "__getattr__" or n[:2] != "__"}
            modules = {n: x for n, x in own.items() if isinstance(x, ModuleType)}
            self.states.append((names, None))
            self.aside.append(modules)  # modules lead everywhere
            self.walk.left += self.asked.release_in_object(
                {n: x for n, x in own.items() if n not in modules}
            )

    def _visit_class(self, kind: type) -> None:
        if not is_not_users(type(kind)):  # a metaclass of the user's defines what the class does
            self.state.attributes.append((kind, "__class__", type(kind)))
            self.walk.left.append(type(kind))
        self.walk.left += [*self.asked.list_makers(kind), *self.asked.release_for_value(kind)]
        self._visit_class_attributes(kind)

    def _visit_class_attributes(self, kind: type) -> None:
        if id(kind) in self.kinds:
            return
        self.kinds[id(kind)] = kind
        if kind.__module__ == parametrize.__name__:
            self.state.names.append((vars(parametrize), "_cache_enabled", 0))
            if parametrize._cache_enabled:
                self.guards.why = "it is within torch.nn.utils.parametrize.cached()"
        if isinstance(kind, abc.ABCMeta):  # others may be registered as its subclasses
            self.guards.watch_answer(abc.get_cache_token)
        names = vars(kind)
        if is_not_users(kind):
            for base in kind.__mro__:
                if is_library_object(base) and base.__module__ != "builtins":
                    self.libraries.methods.add_classes([base])
            known = is_trusted_value(kind)
            put = ((n, f) for n, f in names.items() if type(f) is FunctionType)
            self.aside.append({n: f for n, f in put if not is_not_users(f)} if known else names)
            self.guards.watch_class(kind)  # it and its bases may be given other methods
            return
        self.state.attributes.append((kind, "__mro__", kind.__mro__))
        self.state.watch_entries(names)
        self.walk.left += self.asked.release_in_class(kind)
        for base in kind.__mro__:
            self._visit_class_attributes(base)

    def _visit_object(self, thing: Any, weakly: WeakBox | None = None) -> None:
        state = getattr(thing, "__dict__", None)
        if state is None and is_library_object(type(thing)):
            return
        held = thing if weakly is None else weakly
        self.state.attributes.append((held, "__class__", type(thing)))
        self._visit_class_attributes(type(thing))
        for name in list_slots(type(thing)):
            value = getattr(thing, name, UNSET)
            self.state.attributes.append((held, name, value))
            self.walk.left.append(value)
        if type(state) is dict:
            if weakly is None:
                self.state.attributes.append((thing, "__dict__", state))
            kind = type(thing)
            if is_registered(kind) or any(map(is_not_users, kind.__mro__[:-1])):
                self.walk.left.append(state)  # a library may read it by any name
                if weakly is not None:
                    self.state.others.append(functools.partial(has_state, weakly, state))
            else:
                self._visit_state(state, weakly)

    def _visit_state(self, state: dict[str, Any], weakly: WeakBox | None = None) -> None:
        self.states.append((state, weakly))
        self.walk.left += self.asked.release_in_object(state)

    def _watch_states(self) -> None:
        self.state.attributes += self._read_named_attributes()
        for state, weakly in self.states:
            if self.asked.any:
                self.state.watch_entries(state)
                continue
            asked, missing = self.asked.match_names(state)
            if weakly is None:
                self.state.names += [(state, name, state[name]) for name in asked]
                self.state.missing.append((state, missing))
            else:  # the state may hold what leads back to the object, under other names
                self.state.of_weakly += [(weakly, name, state[name]) for name in asked]
                self.state.others.append(functools.partial(lacks_names, weakly, missing))


def _describe_error(error: Exception) -> str:
    return f"an object that it reaches raises {type(error).__name__} when looked at"


# In this order: an object may be an instance of several.
_VISITORS: tuple[tuple[Any, Callable[[_GuardWalk, Any], None]], ...] = (
    (torch.Tensor, _GuardWalk._visit_tensor),
    (SCRIPTS, _GuardWalk._visit_script),
    (torch.Generator, lambda walk, value: walk.guards.generators.append(value)),
    ((dict, MappingProxyType), _GuardWalk._visit_mapping),
    ((list, tuple, deque, set, frozenset), _GuardWalk._visit_sequence),
    (FunctionType, _GuardWalk._visit_function),
    (WRAPPERS, _GuardWalk._visit_wrapper),
    (LRU_CACHE, _GuardWalk._visit_cache),
    ((ContextVar, ReferenceType), _GuardWalk._visit_reference),
    (type, _GuardWalk._visit_class),
    (ModuleType, _GuardWalk._visit_module),
    (LOGGING_CLASSES, _GuardWalk._visit_logger),
    (WeakBox, _GuardWalk._visit_weak),
    (ObjectStandIn, lambda walk, value: walk.walk.left.extend(vars(value).values())),
    (CellType, _GuardWalk._visit_cell),
    (_OPERATORS, lambda walk, value: walk.walk.left.append(find_op_definition(value))),
)


def _choose_visitor(kind: type) -> Callable[[_GuardWalk, Any], None] | None:
    return None if is_constant_class(kind) else _GuardWalk.visit


_visitors = Visitors(_choose_visitor)
