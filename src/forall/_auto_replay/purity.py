"""Purity analysis: proof from bytecode that a function does nothing that guards cannot see.

The user of `jit` promises that the function is pure. Without a promise, a call may be replayed only
if its purity is certain. Each function that it can reach is read, name by name. Each name has to
lead to something that does the same with each call and has no side effect (`pure_functions`), or to
state that the guards compare. A function that is not certain to be pure runs eagerly.

Where a call was observed (`coverage`), code that did not run is not read. In return, all code that
ran must be code that the guards have reached.

Writes to state that the guards see (a counter, a list of results) need no care here: the recording
finds the state changed. The analysis looks for what guards cannot see: the clock, Python's random
numbers, files, the screen, a tensor's version.
"""

from __future__ import annotations

import functools
import sys
from collections import OrderedDict
from contextvars import ContextVar
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodWrapperType,
    ModuleType,
)
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ReferenceType

import torch

from forall._auto_replay.identity_keys import uses_ids_as_keys
from forall._auto_replay.named_values import (
    METHODS_IN_C,
    describe_value,
    find_named_value,
    iterate_named_values,
)
from forall._compat import pure_functions, tensordict
from forall._compat.call_site import SourceLine
from forall._compat.private_api import PLAIN
from forall._core.python_state import (
    SETTERS,
    UNSET,
    ObjectStandIn,
    UnguardedState,
    cell_contents_of,
    find_home,
    find_rebound_names,
    is_library_module,
    is_not_users,
    is_ours,
    may_rebind,
    may_rebind_by,
    may_write_attributes,
)
from forall._core.reachable import CONTAINERS, DICT_VIEWS, WRAPPERS, is_ndarray
from forall._jit.deadline import STEPS_PER_CLOCK_READ, TOO_LONG, clock
from forall._jit.guards.attribute_names import NAMES_OF_ANY_LOOKUP, SKIPPED_OPS, find_text_lookups
from forall._jit.guards.import_sources import ImportReader, has_imports
from forall._jit.guards.leaves import LOGGING_CLASSES, LRU_CACHE, SEQUENCE_ITERATORS, is_environment
from forall._jit.guards.module_names import ATTRIBUTES, find_dotted_names, is_users_module

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from forall._jit.guards.build import Guards
    from forall._jit.tracing.coverage import FullCoverage

_WRAPPERS = {MappingProxyType, *WRAPPERS} - {BuiltinFunctionType, MethodWrapperType}
_OPS_WITH_ATTRIBUTE = ATTRIBUTES | {
    "STORE_ATTR",
    "DELETE_ATTR",
    "IMPORT_FROM",
}  # with an attribute's name
_NAMES_OF_ALL = frozenset({"__dict__", "__dir__", "__getattribute__"})  # give all names of a module
_REGISTRIES = frozenset({dict, OrderedDict, list, tuple, set, frozenset})
_WATCHED = frozenset({"__code__", "__dict__"})  # guarded where code names them


def find_impurity(guards: Guards, *, stands_in: bool = False) -> str | None:
    """The reason why a function may be impure, None if it is certainly pure.

    Names of torch's that its code contains are guarded from now on. With ``stands_in``, the
    function has cells and globals of its own in place of another's, and does not see the other's
    rebound. So no code may rebind names of other functions, or of modules. Nor may code write the
    attributes of objects that others stand in for.
    """
    if guards.why is not None or guards.ran.why is not None:
        return guards.why or guards.ran.why
    reading, ran = _CodeReader(guards), guards.ran
    reached = [*guards.list_visited()]
    why = _find_effect_of_tensordict(ran, reached)
    if why is not None:
        return why
    attributes = frozenset(n for x in reached if type(x) is ObjectStandIn for n in vars(x))
    for i, value in enumerate(reached):
        if not i % STEPS_PER_CLOCK_READ and clock() > guards.until.call:
            return TOO_LONG
        is_read = reading.has_to_be_read(value)
        is_pure = (
            reading.read_function(value) is None if is_read else not reading.is_doubtful(value)
        )
        if not is_pure:
            return _describe_doubt(reading, reached, value)
        if is_read and stands_in and _may_rebind(ran, value.__code__):
            return f"{value.__qualname__} rebinds names of another function's"
        if is_read and attributes and may_write_attributes(value.__code__, attributes):
            return f"{value.__qualname__} may write an attribute that the function reads"
    return _find_unreached_code(ran, reached)


def _find_effect_of_tensordict(ran: FullCoverage, reached: Iterable[Any]) -> str | None:
    """The reason if a function of tensordict's may do more than make collections of others.

    Which of its many functions run is known for observed calls alone: methods that its own code
    calls are not reached.
    """
    if not tensordict.is_loaded():
        return None
    if not ran.seen:
        if any(tensordict.is_of_tensordict(find_home(value)) for value in reached):
            return "uses tensordict, and was not watched while it ran"
        return None
    codes = ran.list_library_codes()
    odd = next(
        (f"{home}.{c.co_qualname}" for c, home in codes if tensordict.has_effects(c, home)), None
    )
    return odd and f"it runs {odd}"


def _describe_doubt(reading: _CodeReader, reached: list[Any], found: Any) -> str:
    """Return which function uses something impure, what, and where, for a value that is in doubt.

    The function is the first one, in the order of their visit, whose own code names something in
    doubt: a function that calls it names nothing but that function.
    """
    functions = [f for f in reached if reading.has_to_be_read(f)]
    ids = {*map(id, reached)}
    for func in functions:
        why = reading.read_function(func)
        if why is not None:
            return why
        for named in iterate_named_values(func, reading.ran):
            if id(named.value) in ids and reading.is_doubtful(named.value):
                return named.describe_use(named.value)
    named = find_named_value(functions, reading.ran, found, reached)
    return f"it reaches {describe_value(found)}" if named is None else named.describe_use(found)


def _may_rebind(ran: FullCoverage, code: CodeType) -> bool:
    """True if code may rebind names of other functions or modules.

    Where the call was observed, only the instructions that ran count.
    """
    return may_rebind(code) and (
        not ran.seen or may_rebind_by(code, ran.list_names(code) - SETTERS)
    )


def _find_unreached_code(ran: FullCoverage, reached: Iterable[Any]) -> str | None:
    """The reason if code ran that no reached function has or makes, None if there is none."""
    if not ran.seen:
        return None
    known = set()
    left = [f.__code__ for f in reached if isinstance(f, FunctionType)]
    while left:
        code = left.pop()
        if code not in known:
            known.add(code)
            made = [i.argval for i in ran.list_instructions(code)]
            left += [c for c in made if isinstance(c, CodeType)]
    odd = next((code for code in ran.list_codes() if code not in known), None)
    if odd is None:
        return None
    if SourceLine.from_code(odd) in map(SourceLine.from_code, known):  # converted, of a known one
        return f"examples diverge in {odd.co_qualname} ({SourceLine.from_code(odd)})"
    return f"nothing leads to {odd.co_qualname}, which runs ({SourceLine.from_code(odd)})"


class _Doubt(NamedTuple):
    """The thing in a function's code that may be impure, and its line if that is known."""

    why: str
    line: int | None


class _CodeReader:
    """A reader of functions' code, name by name."""

    def __init__(self, guards: Guards) -> None:
        self.guards, self.ran = guards, guards.ran
        self._modules: set[ModuleType] = set()  # modules that were checked
        # Libraries' containers, with True for those of constants and trusted values.
        self._registries: dict[int, tuple[Any, bool]] = {}
        # Names of attributes in all code that ran, and whether it may look up any name:
        self._names, self._by_any = set[str](), False
        for code in self.ran.list_codes():
            instructions = self.ran.list_instructions(code)
            names, by_others = find_text_lookups(instructions)
            self._names |= names.union(
                i.argval for i in instructions if i.opname in _OPS_WITH_ATTRIBUTE
            )
            self._by_any = self._by_any or by_others or not _NAMES_OF_ALL.isdisjoint(self._names)

    def is_doubtful(self, value: Any) -> bool:
        """True if a value may be impure: all but certain values and functions of the user's."""
        if isinstance(value, FunctionType) and not is_ours(value):
            return self._runs_in_doubt(value) and is_not_users(value)
        return not self.is_certain(value)

    def has_to_be_read(self, value: Any) -> bool:
        """True for a function of the user's that may have run, whose code tells if it is pure."""
        is_foreign = isinstance(value, FunctionType) and not is_ours(value)
        return is_foreign and self._runs_in_doubt(value) and not is_not_users(value)

    def _runs_in_doubt(self, func: FunctionType) -> bool:
        return not self.is_certain(func) and self.ran.may_have_run(func.__code__)

    def read_function(self, func: FunctionType) -> str | None:
        """The reason why a function's own code may be impure, with its place; None if it is not."""
        home = func.__globals__
        cells = zip(func.__code__.co_freevars, func.__closure__ or (), strict=True)
        found = {
            n: cell_contents_of(c) for n, c in cells if isinstance(cell_contents_of(c), ModuleType)
        }
        for code, modules in _walk_with_modules(func.__code__, found):
            found = self._read_code(code, home, modules)
            if found is not None:
                place = SourceLine(code.co_filename, found.line or code.co_firstlineno)
                return f"{func.__qualname__} {found.why} ({place})"
        return None

    def _read_code(
        self, code: CodeType, home: dict[str, Any], modules: dict[str, ModuleType]
    ) -> _Doubt | None:
        instructions = [i for i in self.ran.list_instructions(code) if i.opname not in SKIPPED_OPS]
        importing = instructions if has_imports(code) else ()
        imports = ImportReader(importing, home, libraries=not self.ran.seen)
        if imports.why is not None:
            return _Doubt(imports.why, imports.line)
        for name, module in imports.found:
            self.guards.watch_name(sys.modules, name, module)
        for inside, name, line in imports.taken:
            value = vars(inside).get(name)
            if isinstance(value, ModuleType) or not is_library_module(inside.__name__):
                self.guards.watch_name(vars(inside), name, value)
            elif not self._may_use(value, inside, name):
                return _Doubt(f"uses {inside.__name__}.{name}", line)
        modules = {**modules, **imports.modules}
        for way, line in find_dotted_names(instructions, modules):
            why = self._check_dotted_name(way, modules if way[0] in modules else home)
            if why is not None:
                return _Doubt(why, line)
        return None

    def _check_dotted_name(self, way: list[str], home: dict[str, Any]) -> str | None:
        """The reason if a dotted name may lead to something impure, None if it does not.

        ["", name] is an attribute of something unknown; other names begin with a global.
        """
        first = way[0]
        if not first:
            return self._check_attributes(way[1:])
        if first not in home:
            is_trusted = self._is_trusted_builtin(first) or (first == "id" and self._has_only_keys)
            return None if is_trusted else f"uses {first}"
        value = home[first]
        for i, name in enumerate(way[1:], 1):
            if not isinstance(value, ModuleType):
                if isinstance(value, type) and is_not_users(value):  # users may set its attributes
                    self.guards.watch_class(value)
                return self._check_attributes(way[i:])
            inside, value = value, getattr(value, name, None)
            if isinstance(value, ModuleType) and name in vars(inside):
                self.guards.watch_name(vars(inside), name, value)
            from_library = is_library_module(inside.__name__) and not isinstance(value, ModuleType)
            if from_library and not self._may_use(value, inside, name):
                return f"uses {inside.__name__}.{name}"
        if isinstance(value, ModuleType) and not is_users_module(value):
            return f"names the module {value.__name__}"
        return None

    def _check_attributes(self, names: Iterable[str]) -> str | None:
        telling = pure_functions.TELLING - _WATCHED if self.ran.seen else pure_functions.TELLING
        return next((f"asks for .{name}" for name in names if name in telling), None)

    @functools.cached_property
    def _has_only_keys(self) -> bool:
        """True if the ids that an observed call asks for are seen by nobody."""
        if not self.ran.seen:
            return False
        functions = [f for f in self.guards.list_visited() if self.has_to_be_read(f)]
        return uses_ids_as_keys(functions, self.ran)

    def _is_trusted_builtin(self, name: str) -> bool:
        """True if a built-in function is trusted.

        Those that look up any name are trusted in observed calls: the recorder sees what they read.
        """
        return name in pure_functions.BUILTINS or (self.ran.seen and name in pure_functions.BY_NAME)

    def _may_use(self, value: Any, inside: ModuleType, name: str) -> bool:
        """True if code may use the value of a library module's name, which is guarded from now."""
        self.guards.watch_name(vars(inside), name, value)
        return self._is_trusted(value) or self._is_idle(value) or self._is_registry(value)

    def is_certain(self, value: Any) -> bool:
        """True if the guards see all of an object's state, or the object never changes.

        A function of the user's is not certain by itself: its code has to be read.
        """
        if isinstance(value, FunctionType) and not is_ours(value):
            return self._is_trusted(value) or self._is_idle(value) or self._copies_containers(value)
        if is_environment(value):
            return True
        if isinstance(value, ModuleType):
            return self._is_certain_module(value)
        if pure_functions.is_state_query(value):  # in C: those in Python are trusted above
            return self._is_trusted(value)
        what = type(value) if isinstance(value, LOGGING_CLASSES) else value
        return _is_certain(value) or self._is_idle(what) or self._is_uninstantiated(value)

    def _is_certain_module(self, module: ModuleType) -> bool:
        """True for a user's module, and a held library module whose names in use are all safe.

        Each attribute name in the code that ran may be looked up in the module.
        """
        if is_users_module(module) or module in self._modules:
            return True
        self._modules.add(module)
        if not self.ran.seen or self._by_any or not is_library_module(module.__name__):
            return False
        for name in self._names - vars(module).keys():
            self.guards.watch_name(vars(module), name, UNSET)
        found = [(name, vars(module)[name]) for name in self._names & vars(module).keys()]
        return all(
            self._is_certain_module(value)
            if isinstance(value, ModuleType)
            else self._may_use(value, module, name)
            for name, value in found
        )

    def _is_registry(self, value: Any) -> bool:
        """True for a library's container of constants and trusted values, guarded from now on.

        Most are empty: the hooks of all modules, for example.
        """
        if type(value) not in _REGISTRIES:
            return False
        known = self._registries.get(id(value))
        if known is not None:
            return known[1]
        self._registries[id(value)] = value, True  # while it is looked at; it may hold itself
        self.guards.watch_entries(value)
        entries = [*value, *(value.values() if isinstance(value, dict) else ())]
        is_known = all(self._is_trusted(x) or self._is_registry(x) for x in entries)
        self._registries[id(value)] = value, is_known
        return is_known

    def _is_trusted(self, value: Any) -> bool:
        if pure_functions.is_state_query(value):
            self.guards.watch_answer(value)
        return pure_functions.is_trusted_value(value)

    def _copies_containers(self, value: Any) -> bool:
        """True for `copy.copy` if the call was seen to copy nothing by an object's own reducer.

        The copiers that Python keeps for its classes are compared from now on.
        """
        if not pure_functions.is_shallow_copy(value) or not self.ran.seen:
            return False
        if any(map(self.ran.may_have_run, pure_functions.REBUILDING)):
            return False
        self.guards.watch_answer(pure_functions.list_copiers)
        return True

    def _is_uninstantiated(self, value: Any) -> bool:
        """True for a class of tensors whose methods did not run, as in an `isinstance` test."""
        return (
            isinstance(value, type)
            and issubclass(value, torch.Tensor)
            and self.ran.did_not_run(value)
        )

    def _is_idle(self, value: Any) -> bool:
        return self.ran.did_not_run(value) and is_not_users(value)


def _walk_with_modules(
    code: CodeType, modules: dict[str, ModuleType]
) -> Iterator[tuple[CodeType, dict[str, ModuleType]]]:
    """Yield a function's code and that of nested functions, with the modules in the closure."""
    rebound = {*code.co_cellvars, *find_rebound_names(code)}
    modules = {n: m for n, m in modules.items() if n not in rebound}
    yield code, modules
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _walk_with_modules(constant, modules)


def _is_certain(value: Any) -> bool:
    kind: Any = type(value)
    if kind in CONTAINERS or kind in _WRAPPERS or kind in DICT_VIEWS or kind in SEQUENCE_ITERATORS:
        return True
    if pure_functions.is_inert(value) or is_ndarray(value):
        return True
    if isinstance(value, (super, BaseException)):
        return False  # the guards do not look into them
    if value is ReferenceType:  # the class itself; its objects are judged by their referents
        return True
    if isinstance(value, (FunctionType, UnguardedState, LRU_CACHE, CellType, ContextVar)):
        return True  # ours, or looked at by the guards
    if isinstance(value, torch.Tensor):
        return kind in PLAIN
    if isinstance(value, type):
        if is_not_users(value):
            return pure_functions.is_trusted_value(value)
        bases = [b for b in (*kind.__mro__, *value.__mro__) if is_not_users(b)]
        return all(b is type or pure_functions.is_trusted_base(b) for b in bases)
    if isinstance(value, BuiltinFunctionType):
        return pure_functions.is_trusted_value(value) or type(value.__self__) in CONTAINERS
    if isinstance(value, METHODS_IN_C):
        known = pure_functions.is_trusted_base(getattr(value, "__objclass__", object))
        return known and value.__name__ not in NAMES_OF_ANY_LOOKUP | pure_functions.TELLING
    if isinstance(value, ReferenceType):
        return type(value()) in PLAIN or _is_certain(value())
    if pure_functions.is_trusted_value(value):
        return True
    return pure_functions.is_trusted_base(kind) if is_not_users(kind) else True
