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
    UnguardedState,
    WeakBox,
    cell_contents_of,
    is_library_module,
    is_library_object,
    is_not_users,
    is_ours,
    names_of,
)
from forall._core.raw_containers import view_raw_container
from forall._core.reachable import (
    FUNCTION_ATTRIBUTES,
    WRAPPERS,
    is_buffer,
    list_inner_functions,
    list_parts,
    list_slots,
)
from forall._jit.deadline import (
    NO_DEADLINE,
    STEPS_PER_CLOCK_READ,
    TOO_LONG,
    Deadline,
    clock,
)
from forall._jit.guards.attribute_names import NAMES_TORCH_CALLS, AttributeNames
from forall._jit.guards.conditions import GuardConditions
from forall._jit.guards.import_sources import find_imports
from forall._jit.guards.leaves import (
    LOGGING_CLASSES,
    LRU_CACHE,
    can_reach_ids,
    get_hint_parts,
    is_alive,
    is_c_iterator,
    is_environment,
    is_method_def,
    is_plain_constant,
    is_type_hint,
    lacks_names,
    list_cached,
    make_cache_test,
    may_have_attributes,
)
from forall._jit.guards.library_globals import (
    find_key_classes,
    find_named_globals,
    is_followed,
    is_in_order_of_optree,
    namespaces_in,
    registered_with_optree,
    registry_of_optree,
    select_users_entries,
)
from forall._jit.guards.module_names import find_held_modules, find_open_namespaces, is_users_module
from forall._jit.tracing.coverage import FULL_COVERAGE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from types import CodeType

    from forall._jit.tracing.coverage import FullCoverage

TOO_MUCH = "the function reaches too much of Python's state to watch"
_FUNCTION_ATTRIBUTES = (
    *FUNCTION_ATTRIBUTES,
    "__name__",
    "__qualname__",
    "__doc__",
    "__module__",
    "__annotations__",
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
        self._modules: set[tuple[int, frozenset[str]]] = set()
        self._asked = AttributeNames(ran)
        # The `__dict__`s of objects of which code asks some names, with weak holders of these.
        self._states: list[tuple[dict[str, Any], WeakBox | None]] = []
        self._functions: list[FunctionType] = []  # the user's, and those that do not run
        self._aside: list[Mapping[str, Any]] = []  # entries are visited only if code names them
        self._kinds: dict[int, type] = {}  # the classes of objects, and their bases
        self._left_of_libraries: list[FunctionType] = []
        # Values that others have registered with a library, and the user's classes they are for.
        self._registered: list[tuple[list[type], Any]] = []
        self._kinds_of_libraries: list[type] = []
        self._library_names: frozenset[str] = frozenset()
        self._asks_optree = False
        self._followed: set[CodeType] = set()
        self._followed_methods: set[CodeType] = set()
        # All visited objects, kept alive so that no other gets the same id. `sys.modules` counts as
        # visited: code names the modules that it asks for.
        self._held: dict[int, Any] = {id(sys.modules): sys.modules}
        self._weakly: list[WeakBox] = []
        self.given = [*given]  # arguments that a cache key may know by identity
        self._left = [func, *self.given]  # to be visited: a list, as objects nest without limit
        self.watch_class(torch.Tensor)  # code may ask it for any name
        self._visit_all()
        while self._left and self.why is None:
            self._visit_all()
        self._watch_states()
        if self._asks_optree:
            self._watch_optree()
        # They hold objects that nothing asks for, which may lead anywhere.
        del self._asked, self._states, self._registered

    def list_visited(self) -> Iterable[Any]:
        """All visited objects, except the modules that code names."""
        return [*self._held.values(), *self._kinds.values()]

    def collect_ids(self) -> frozenset[int]:
        """The ids of all visited objects, tensors too: an argument may be one of these."""
        return frozenset((*self._held, *self.tensors))

    def leads_to_weak(self) -> bool:
        """True if an object that is to be held weakly can be reached from what is held here."""
        return bool(self._weakly) and can_reach_ids({id(w.of()) for w in self._weakly}, self._held)

    def _visit_all(self) -> None:
        while self._left and self.why is None:
            value = self._left.pop()
            try:
                if id(value) not in self._held and not is_plain_constant(value):
                    self._held[id(value)] = value
                    self._visit(value)
            except Exception as error:  # noqa: BLE001 - of the user's own `__class__`, `__dict__`
                self.why = f"an object that it reaches raises {type(error).__name__} when looked at"
        self._visit_libraries()
        late = [*self._left]
        late += [
            getattr(f, name) for f in self._functions for name in self._list_named_attributes()
        ]
        late += [
            x for names in self._aside for n, x in names.items() if self._asked.contains_name(n)
        ]
        late += [value for kinds, value in self._registered if self._has_visited(kinds)]
        self._left = [x for x in late if id(x) not in self._held and not is_plain_constant(x)]

    def _list_named_attributes(self) -> list[str]:
        made_of = FUNCTION_ATTRIBUTES if self._asked.contains_name("signature") else ()
        return [
            name
            for name in _FUNCTION_ATTRIBUTES
            if name in made_of or self._asked.contains_name(name)
        ]

    def _visit(self, value: Any) -> None:
        look = next((look for kinds, look in _VISITORS if isinstance(value, kinds)), None)
        if len(self._held) > self.ran.most:
            self.why = TOO_MUCH
        elif not len(self._held) % STEPS_PER_CLOCK_READ and clock() > self.until.call:
            self.why = TOO_LONG
        elif is_c_iterator(value):
            self.why = "the function reaches an iterator, and nothing tells how far that has come"
        elif is_environment(value):
            self._watch_entries(os.environ._data)
        elif is_buffer(value):
            self._watch_buffer(value)
        elif look is not None:
            look(self, value)
        elif is_type_hint(value):
            self._visit_hint(value)
        elif (parts := list_parts(value)) is not None:
            self._left += parts
        elif not isinstance(value, UnguardedState):
            self._visit_object(value)
        if may_have_attributes(value):
            self._visit_object(
                value
            )  # an object of a user's class with entries: a NamedTuple, a dict

    def _visit_tensor(self, value: torch.Tensor) -> None:
        self.tensors[id(value)] = value
        self._left.append(vars(value))  # attributes of the user's

    def _visit_script(self, value: Any) -> None:
        if has_tolist(value):
            self.why = "a function in TorchScript that it reaches makes a list of a tensor"
        self._visit_object(value)

    def _visit_mapping(self, value: Mapping) -> None:
        self._watch_entries(value)
        self._left += [*view_raw_container(value), *view_raw_container(value).values()]

    def _visit_sequence(self, value: Any) -> None:
        value, kind = view_raw_container(value), type(value)
        if not issubclass(kind, (tuple, frozenset)):
            self._lists.append((value, tuple(value)))  # sets have an order too
        self._left += value

    def _visit_hint(self, value: Any) -> None:
        origin = getattr(value, "__origin__", None)
        if not (isinstance(origin, type) and is_not_users(origin)):  # a call of the hint calls it
            self._left.append(origin)
        self._aside.append(get_hint_parts(value))

    def _visit_cell(self, cell: CellType) -> None:
        value = cell_contents_of(cell)
        self._attributes.append((cell, "cell_contents", value))
        self._left.append(value)

    def _visit_weak(self, value: WeakBox) -> None:
        self._weakly.append(value)
        self._visit_object(value.of(), value)

    def _visit_reference(self, value: ContextVar | ReferenceType) -> None:
        if isinstance(value, ReferenceType):
            self._others.append(functools.partial(is_alive, value, wanted=is_alive(value)))
            self._left += [WeakBox(value)] if type(value()) not in (type(None), *PLAIN) else []
            return
        now = value.get(UNSET)
        self._others.append(lambda: value.get(UNSET) is now)
        self._left += [now, *gc.get_referents(value)]  # the default of the variable among these

    def _visit_logger(self, value: Any) -> None:
        self._attributes.append((value, "__class__", type(value)))
        self._aside.append(vars(value))
        self._states.append((vars(value), None))

    def _visit_wrapper(self, value: Any) -> None:
        if isinstance(value, functools.cached_property):  # the others are as they were made
            self._attributes.append((value, "func", value.func))
        if is_of_optree(value) and not self._asks_optree:
            self._asks_optree = True
            self._left += registered_with_optree()
        if value is pickle.dumps:  # it calls functions that are registered for a class
            self._left.append(copyreg.dispatch_table)
        if isinstance(value, BuiltinFunctionType):
            self._left += self._asked.release_for_value(value)
        if type(value) is classmethod:
            self._left += self._asked.release_makers()
        if isinstance(value, functools.partial):
            self._left.append(vars(value))
        if not is_of_optree(value):
            self._left += list_parts(value) or ()

    def _watch_optree(self) -> None:
        """Watch what others may tell optree: the classes it takes apart, and its order of dicts."""
        registry = registry_of_optree()
        self._held[id(registry)] = registry
        self._watch_entries(registry)
        texts = {key[0] for key in registry if isinstance(key, tuple)}
        texts |= {x for *_, x in self._names + self._attributes if isinstance(x, str)}
        for names, keys, values in self._dicts:
            if names is not registry and "namespace" in keys:
                texts |= {x for x in values if isinstance(x, str)}
        for func in self._functions:
            texts.update(namespaces_in(func.__code__))
            texts |= {x for x in func.__defaults__ or () if isinstance(x, str)}
        names = tuple(sorted(name for name in texts if name.isprintable() and " " not in name))
        self.watch_answer(functools.partial(is_in_order_of_optree, ("", *names)))

    def _visit_cache(self, func: Any) -> None:
        self._others.append(make_cache_test(func))
        self._left.append((*list_cached(func),))

    def _visit_library_function(self, func: FunctionType) -> None:
        """Visit what a library's function leads to, by the names in its code."""
        if func.__code__ in self._followed or not is_followed(func):
            return
        if not self.ran.may_have_run(func.__code__):
            self.ran.did_not_run(func)
            return
        self._followed.add(func.__code__)
        self._library_names |= names_of(func.__code__)
        for names, name, value in find_named_globals(func):
            self._of_libraries.append((names, name, value))
            if isinstance(value, FunctionType):
                self._left_of_libraries.append(value)
            elif isinstance(value, (dict, list)) and id(value) not in self._held:
                self._held[id(value)] = value
                self._watch_registry(value)
        self._left_of_libraries += list_inner_functions(func)

    def _watch_registry(self, value: Any) -> None:
        """Watch a library's registry: a dict or list that others may add entries to."""
        if isinstance(value, dict):
            self._watch_entries(value)
            entries = value.items()
        else:
            self._lists.append((value, tuple(value)))
            entries = enumerate(value)
        self._registered += [(find_key_classes(key), x) for key, x in select_users_entries(entries)]

    def _has_visited(self, kinds: list[type]) -> bool:
        """True if each class was visited, itself or as the class or base of an object."""
        return all(id(kind) in self._kinds or id(kind) in self._held for kind in kinds)

    def _visit_libraries(self) -> None:
        """Visit the libraries' functions that can be reached, and methods that code names."""
        while self._left_of_libraries or self._queue_methods():
            while self._left_of_libraries:
                func = self._left_of_libraries.pop()
                if is_not_users(func):
                    self._visit_library_function(func)
                else:
                    self._left.append(func)

    def _queue_methods(self) -> bool:
        asks = self._asked.contains_name
        for kind in self._kinds_of_libraries:
            for name, found in vars(kind).items():
                func = getattr(found, "fget", None) or getattr(found, "__func__", found)
                if isinstance(func, FunctionType) and func.__code__ not in self._followed_methods:
                    dunder = name[:2] == "__" or name in NAMES_TORCH_CALLS
                    if self.ran.seen or dunder or asks(name) or name in self._library_names:
                        self._followed_methods.add(func.__code__)
                        self._left_of_libraries.append(func)
        return bool(self._left_of_libraries)

    def _visit_function(self, func: FunctionType) -> None:
        if is_not_users(func) and not is_ours(func):
            self._left_of_libraries.append(func)
        if is_known_function(func):
            return
        if is_ours(func):
            # Our own functions never change, nor do their globals and defaults.
            self._left += [*map(cell_contents_of, func.__closure__ or ()), *func.__dict__.values()]
            return
        self._functions.append(func)
        if not self.ran.may_have_run(func.__code__):
            if func.__dict__ or not (is_not_users(func) or is_method_def(func)):
                self._visit_state(func.__dict__)
            return
        written = self.ran.list_written_names(func.__code__) | _MODULE_HOOKS
        self._left += [*self._asked.release_for_value(func), *self._asked.release_for_code(func)]
        for name in FUNCTION_ATTRIBUTES:
            value = getattr(func, name)
            self._attributes.append((func, name, value))
            self._left.append(value)
        asked = self.ran.list_free_vars(func.__code__)
        for name, cell in zip(func.__code__.co_freevars, func.__closure__ or (), strict=True):
            if name in asked:
                value = cell_contents_of(cell)
                self._attributes.append((cell, "cell_contents", value))
                self._visit_named_value(value, written)
        if not is_not_users(func):
            names, given = func.__globals__, vars(func).get("__forall_given__", ())
            wanted = [n for n in self.ran.list_globals(func.__code__) if n not in given]
            missing = [n for n in wanted if n not in names]
            self._names += [(names, n, UNSET) for n in missing]
            self._names += [(_BUILTINS, n, _BUILTINS.get(n, UNSET)) for n in missing]
            self._watch_names(names, wanted, written)
            self._visit_modules_of(func)

    def _visit_modules_of(self, func: FunctionType) -> None:
        """Visit the user's modules that a function imports, or has whole in a variable."""
        imports = find_imports(func, self.ran)
        self._left += find_held_modules(func, self.ran, imports)
        for name, home in find_open_namespaces(func, self.ran):
            self._names.append((sys.modules, name, sys.modules.get(name, UNSET)))
            self._watch_namespace(home)
        for code, found in imports.items():
            inner = self.ran.list_written_names(code)
            self._names += [(sys.modules, name, module) for name, module in found.found]
            for module in found.modules.values():
                self._visit_named_value(module, inner)
            for inside, name in found.taken:
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
            self._names.append((names, name, value))
            self._visit_named_value(value, inner)

    def _visit_named_value(self, value: Any, inner: frozenset[str]) -> None:
        if not isinstance(value, ModuleType):
            self._left.append(value)
            return
        if is_library_module(value.__name__):
            self._watch_library_module(value, inner)
        self._left += self._asked.release_for_value(value)
        if type(value) is not ModuleType:  # then its class has a say too
            self._left.append(value)
        if not is_library_module(value.__name__) and (id(value), inner) not in self._modules:
            self._modules.add((id(value), inner))
            self._attributes.append((value, "__class__", type(value)))
            self._missing.append((vars(value), inner - vars(value).keys()))
            self._watch_names(vars(value), inner, inner)

    def _watch_library_module(self, module: ModuleType, inner: frozenset[str]) -> None:
        """Watch the names of a library's module that code may ask for: those that it contains."""
        if (id(module), inner) in self._modules:
            return
        self._modules.add((id(module), inner))
        for name in inner & vars(module).keys():
            value = vars(module)[name]
            self._of_libraries.append((vars(module), name, value))
            if isinstance(value, FunctionType):
                self._left_of_libraries.append(value)
            elif isinstance(value, _OPERATORS):
                self._left.append(value)
            elif isinstance(value, type):
                self._kinds_of_libraries += value.__mro__[:-1]
            elif isinstance(value, ModuleType) and is_library_module(value.__name__):
                self._watch_library_module(value, inner)

    def _visit_module(self, module: ModuleType) -> None:
        if is_users_module(module):
            self._attributes.append((module, "__class__", type(module)))
            self._watch_namespace(vars(module))
            if type(module) is not ModuleType:
                self._visit_class_attributes(type(module))

    def _watch_namespace(self, names: dict[str, Any]) -> None:
        """Watch a module's names that code can reach in any way: each name that code contains."""
        if id(names) not in self._held:
            self._held[id(names)] = names
            own = {n: x for n, x in names.items() if n == "__getattr__" or n[:2] != "__"}
            modules = {n: x for n, x in own.items() if isinstance(x, ModuleType)}
            self._states.append((names, None))
            self._aside.append(modules)  # modules lead everywhere
            self._left += self._asked.release_in_object({n: own[n] for n in own.keys() - modules})

    def _visit_class(self, kind: type) -> None:
        if not is_not_users(type(kind)):  # a metaclass of the user's defines what the class does
            self._attributes.append((kind, "__class__", type(kind)))
            self._left.append(type(kind))
        self._left += [*self._asked.list_makers(kind), *self._asked.release_for_value(kind)]
        self._visit_class_attributes(kind)

    def _visit_class_attributes(self, kind: type) -> None:
        if id(kind) in self._kinds:
            return
        self._kinds[id(kind)] = kind
        if kind.__module__ == parametrize.__name__:
            self._names.append((vars(parametrize), "_cache_enabled", 0))
            if parametrize._cache_enabled:
                self.why = "it is within torch.nn.utils.parametrize.cached()"
        if isinstance(kind, abc.ABCMeta):  # others may be registered as its subclasses
            self.watch_answer(abc.get_cache_token)
        names = vars(kind)
        if is_not_users(kind):
            for base in kind.__mro__:
                if is_library_object(base) and base.__module__ != "builtins":
                    self._kinds_of_libraries.append(base)
            known = is_trusted_value(kind)
            put = ((n, f) for n, f in names.items() if type(f) is FunctionType)
            self._aside.append({n: f for n, f in put if not is_not_users(f)} if known else names)
            self.watch_class(kind)  # it and its bases may be given other methods
            return
        self._attributes.append((kind, "__mro__", kind.__mro__))
        self._watch_entries(names)
        self._left += self._asked.release_in_class(kind)
        for base in kind.__mro__:
            self._visit_class_attributes(base)

    def _visit_object(self, thing: Any, weakly: WeakBox | None = None) -> None:
        state = getattr(thing, "__dict__", None)
        if state is None and is_library_object(type(thing)):
            return
        held = thing if weakly is None else weakly
        self._attributes.append((held, "__class__", type(thing)))
        self._visit_class_attributes(type(thing))
        for name in list_slots(type(thing)):
            value = getattr(thing, name, UNSET)
            self._attributes.append((held, name, value))
            self._left.append(value)
        if type(state) is dict:
            if weakly is None:
                self._attributes.append((thing, "__dict__", state))
            kind = type(thing)
            if is_registered(kind) or any(map(is_not_users, kind.__mro__[:-1])):
                self._left.append(state)  # a library may read it by any name
            else:
                self._visit_state(state, weakly)

    def _visit_state(self, state: dict[str, Any], weakly: WeakBox | None = None) -> None:
        self._states.append((state, weakly))
        self._left += self._asked.release_in_object(state)

    def _watch_states(self) -> None:
        self._attributes += [
            (f, n, getattr(f, n)) for f in self._functions for n in self._list_named_attributes()
        ]
        for state, weakly in self._states:
            if self._asked.any:
                self._watch_entries(state)
                continue
            asked, missing = self._asked.match_names(state)
            if weakly is None:
                self._names += [(state, name, state[name]) for name in asked]
                self._missing.append((state, missing))
            else:  # the state may hold what leads back to the object, under other names
                self._of_weakly += [(weakly, name, state[name]) for name in asked]
                self._others.append(functools.partial(lacks_names, weakly, missing))


# In this order: an object may be an instance of several.
_VISITORS: tuple[tuple[Any, Callable[[Guards, Any], None]], ...] = (
    (torch.Tensor, Guards._visit_tensor),
    (SCRIPTS, Guards._visit_script),
    (torch.Generator, lambda guards, value: guards.generators.append(value)),
    ((dict, MappingProxyType), Guards._visit_mapping),
    ((list, tuple, deque, set, frozenset), Guards._visit_sequence),
    (FunctionType, Guards._visit_function),
    (WRAPPERS, Guards._visit_wrapper),
    (LRU_CACHE, Guards._visit_cache),
    ((ContextVar, ReferenceType), Guards._visit_reference),
    (type, Guards._visit_class),
    (ModuleType, Guards._visit_module),
    (LOGGING_CLASSES, Guards._visit_logger),
    (WeakBox, Guards._visit_weak),
    (CellType, Guards._visit_cell),
    (_OPERATORS, lambda guards, value: guards._left.append(find_op_definition(value))),
)
