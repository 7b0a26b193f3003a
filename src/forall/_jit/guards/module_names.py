"""Guards of modules: the names that code looks up in its own module or in one that it holds."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from forall._core.python_state import (
    SETTERS,
    cell_contents_of,
    find_line,
    is_not_users_module,
    module_name_of,
)
from forall._jit.guards.attribute_names import LOAD_GLOBAL_OPS, NAMES_OF_TEXT_LOOKUP, SKIPPED_OPS

if TYPE_CHECKING:
    import dis
    from collections.abc import Collection, Iterable, Iterator, Mapping
    from types import CodeType, FunctionType

    from forall._jit.guards.import_sources import ImportReader
    from forall._jit.tracing.coverage import FullCoverage

ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"})
_ASKERS = NAMES_OF_TEXT_LOOKUP - SETTERS
_LOCALS = frozenset({"LOAD_FAST", "LOAD_DEREF"})
# By these functions and attributes code gets all names of its module, or of one named by a text.
_FUNCTIONS = frozenset({"globals", "eval", "exec", "__import__", "import_module"})
_OF_OTHERS = frozenset({"__globals__", "f_globals", "import_module"})
_MODULES = frozenset({"sys", "modules"})  # and by these together


class DottedName(NamedTuple):
    """A dotted name in code: a global or a variable, then attributes, and its line if known.

    A name that begins with "" is an attribute of something else.
    """

    names: list[str]
    line: int | None


def is_users_module(value: Any) -> TypeGuard[ModuleType]:
    """True for a module of the user's."""
    return isinstance(value, ModuleType) and not is_not_users_module(value.__name__)


def find_open_namespaces(
    func: FunctionType, ran: FullCoverage
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield modules, by name and namespace, whose names a function may reach in any way.

    Its code may call `globals` or `eval`, for example, or look into `sys.modules`.
    """
    names = ran.list_names(func.__code__)
    asked = not _FUNCTIONS.isdisjoint(names) and not _FUNCTIONS.isdisjoint(
        ran.list_globals(func.__code__)
    )
    if not asked and _OF_OTHERS.isdisjoint(names) and not names >= _MODULES:
        return
    yield module_name_of(func), func.__globals__
    texts = [
        c
        for code in ran.walk_inner_codes(func.__code__)
        for c in code.co_consts
        if isinstance(c, str)
    ]
    found = [(text, sys.modules.get(text)) for text in texts]
    yield from ((text, vars(module)) for text, module in found if is_users_module(module))


def find_held_modules(
    func: FunctionType, ran: FullCoverage, imports: Mapping[CodeType, ImportReader]
) -> Iterator[ModuleType]:
    """Yield the user's modules that a function uses as a whole, not only by an attribute."""
    home = func.__globals__
    cells = zip(func.__code__.co_freevars, func.__closure__ or (), strict=True)
    held = {n: cell_contents_of(c) for n, c in cells if isinstance(cell_contents_of(c), ModuleType)}
    named = {n: home[n] for n in ran.list_globals(func.__code__) if n in home}
    some = any(map(is_users_module, (*held.values(), *named.values())))
    for code in ran.walk_inner_codes(func.__code__):
        if some or code in imports:
            instructions = [i for i in ran.list_instructions(code) if i.opname not in SKIPPED_OPS]
            modules = {**held, **imports[code].modules} if code in imports else held
            for (first, *names), _ in find_dotted_names(instructions, modules):
                value = modules.get(first, named.get(first))
                for name in names:
                    value = vars(value).get(name) if isinstance(value, ModuleType) else None
                if is_users_module(value):
                    yield value


def find_dotted_names(
    instructions: Iterable[dis.Instruction], modules: Collection[str]
) -> Iterator[DottedName]:
    """Yield the dotted names in code, which begin with a global or with one of ``modules``.

    ["", name] is an attribute of something else.
    """
    way: list[str] = []
    line: int | None = None  # where the dotted name begins
    named = False  # True within a call such as getattr, which takes the next name from a text
    for i in instructions:
        if way and way[0] and i.opname in ATTRIBUTES:
            way.append(i.argval)
            continue
        if named and i.opname == "LOAD_CONST" and isinstance(i.argval, str):
            way = [*(way or [""]), i.argval]
            continue
        if way and named and i.opname == "CALL":
            named = False
            continue
        if way:
            named = way[0] in _ASKERS and len(way) == 1
            yield DottedName(way, line)
            way = []
        line = find_line(i)
        if i.opname in LOAD_GLOBAL_OPS:
            way = [i.argval]
        elif i.opname in _LOCALS:
            way = [i.argval] if i.argval in modules else []
        elif i.opname in ATTRIBUTES:
            yield DottedName(["", i.argval], line)
    if way:
        yield DottedName(way, line)
