"""Named values: what the names in a function's code lead to, and at which line.

The reason against replays names the function that uses something impure, what it uses, and the
place. The guards see values alone, so the names are read from the code once there is such a value.
"""

from __future__ import annotations

import inspect
from types import (
    BuiltinFunctionType,
    FunctionType,
    MethodDescriptorType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import TYPE_CHECKING, Any, NamedTuple

from forall._compat.call_site import SourceLine
from forall._compat.private_api import module_of
from forall._core.python_state import UNSET, cell_contents_of
from forall._jit.guards.attribute_names import SKIPPED_OPS
from forall._jit.guards.import_sources import ImportReader, has_imports
from forall._jit.guards.leaves import can_reach_ids
from forall._jit.guards.module_names import find_dotted_names

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import CodeType

    from forall._jit.tracing.coverage import FullCoverage

METHODS_IN_C = (MethodDescriptorType, WrapperDescriptorType, MethodWrapperType)


class NamedValue(NamedTuple):
    """A value that a name in a function's code leads to; UNSET if the name alone does not tell."""

    func: FunctionType
    name: str  # as it is written, but for modules, which have their own names
    value: Any
    place: SourceLine

    def describe_use(self, value: Any) -> str:
        """Return that the function uses a value, to which the name leads directly or not."""
        name, told = self.name, describe_value(value)
        last = name.rpartition(".")[2]
        if told.endswith(f".{name}"):
            name = told
        elif self.value is not UNSET and self.value is not value:
            name = f"{name}, which leads to {told}"
        elif told.rpartition(".")[2] != last:
            name = f"{name}, which is {told}"
        return f"{self.func.__qualname__} uses {name} ({self.place})"


def describe_value(value: Any) -> str:
    """Return what a value is: its module and name if it has these, else its class."""
    if isinstance(value, ModuleType):
        return f"the module {value.__name__}"
    name = getattr(value, "__qualname__", None)
    if name is None:
        return f"an object of class {type(value).__module__}.{type(value).__qualname__}"
    return f"{_get_module_name(value)}.{name}".lstrip(".")


def iterate_named_values(func: FunctionType, ran: FullCoverage) -> Iterator[NamedValue]:
    """Yield what the names in a function's code lead to, in the order of the code."""
    for code in ran.walk_inner_codes(func.__code__):
        instructions = [i for i in ran.list_instructions(code) if i.opname not in SKIPPED_OPS]
        names = {**_collect_variables(func)}
        if has_imports(code):
            imports = ImportReader(instructions, func.__globals__, libraries=not ran.seen)
            names.update(imports.modules)
            for inside, name, line in imports.taken:
                value = vars(inside).get(name, UNSET)
                place = _find_place(code, line)
                yield NamedValue(func, f"{inside.__name__}.{name}", value, place)
        for way, line in find_dotted_names(instructions, names):
            found = names if way[0] in names else func.__globals__
            for name, value in _follow_names(way, found):
                yield NamedValue(func, name, value, _find_place(code, line))


def find_named_value(
    functions: Sequence[FunctionType], ran: FullCoverage, wanted: Any, reached: Sequence[Any]
) -> NamedValue | None:
    """Return the name by which one of these functions may come to a value, None if none is found.

    It is the name of an attribute that has this value in a reached object; else a name that leads
    to something which holds the value.
    """
    attributes = {
        name
        for thing in reached
        if not isinstance(thing, ModuleType)
        for name, value in _get_own_attributes(thing).items()
        if value is wanted
    }
    named = [found for func in functions for found in iterate_named_values(func, ran)]
    for found in named if attributes else ():
        if found.value is UNSET and found.name.rpartition(".")[2] in attributes:
            return found
    for found in named:
        held = {id(found.value): found.value}
        if not isinstance(found.value, FunctionType) and can_reach_ids({id(wanted)}, held):
            return found
    return None


def _get_module_name(value: Any) -> str:
    """Return the name of a value's module; for a method in C, which has none, its class's."""
    name = module_of(value)
    if name:
        return name
    if isinstance(value, METHODS_IN_C):
        return module_of(value.__objclass__)
    if isinstance(value, BuiltinFunctionType):
        owner = value.__self__
        return module_of(owner if isinstance(owner, type) else type(owner))
    return ""


def _collect_variables(func: FunctionType) -> dict[str, Any]:
    """Return the values of a function's free variables, and the defaults of its parameters."""
    code, defaults = func.__code__, func.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount]
    cells = zip(code.co_freevars, func.__closure__ or (), strict=True)
    return {
        **dict(zip(names[len(names) - len(defaults) :], defaults, strict=True)),
        **(func.__kwdefaults__ or {}),
        **{name: cell_contents_of(cell) for name, cell in cells},
    }


def _follow_names(way: list[str], names: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield a dotted name and its value, one name after another as far as they have values."""
    text, value = way[0], names.get(way[0], UNSET)
    yield text, value
    for name in way[1:]:
        if isinstance(value, ModuleType):
            text, value = f"{value.__name__}.{name}", vars(value).get(name, UNSET)
        else:
            text, value = f"{text}.{name}", _get_attribute(value, name)
        yield text, value


def _get_attribute(thing: Any, name: str) -> Any:
    """Return an attribute of an object without running its code, UNSET where it is not known."""
    if thing is UNSET:
        return UNSET
    value = inspect.getattr_static(thing, name, UNSET)
    return UNSET if hasattr(type(value), "__get__") and not callable(value) else value


def _get_own_attributes(thing: Any) -> Mapping[str, Any]:
    try:
        return vars(thing)
    except Exception:  # noqa: BLE001 - a `__dict__` of the user's may raise anything
        return {}


def _find_place(code: CodeType, line: int | None) -> SourceLine:
    return SourceLine(code.co_filename, line or code.co_firstlineno)
