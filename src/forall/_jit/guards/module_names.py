"""Guards of modules: the names that code looks up in its own module or in one that it holds."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeGuard

from forall._core.python_state import (
    SETTERS,
    contents,
    home_of,
    is_none_by_name,
)
from forall._jit.guards.attribute_names import BY_TEXT, GLOBALS, SKIPPED

if TYPE_CHECKING:
    import dis
    from collections.abc import Collection, Iterable, Iterator, Mapping
    from types import CodeType, FunctionType

    from forall._jit.guards.import_sources import Imports
    from forall._jit.tracing.coverage import Everything

ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"})
_ASKERS = BY_TEXT - SETTERS
_LOCALS = ("LOAD_FAST", "LOAD_DEREF")
# By these functions and attributes code gets all names of its module, or of one named by a text.
_FUNCTIONS = frozenset({"globals", "eval", "exec", "__import__", "import_module"})
_OF_OTHERS = frozenset({"__globals__", "f_globals", "import_module"})
_MODULES = frozenset({"sys", "modules"})  # and by these together


def is_users(value: Any) -> TypeGuard[ModuleType]:
    """True for a module of the user's."""
    return isinstance(value, ModuleType) and not is_none_by_name(value.__name__)


def asked_for(func: FunctionType, ran: Everything) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield modules, by name and namespace, whose names a function may reach in any way.

    Its code may call `globals` or `eval`, for example, or look into `sys.modules`.
    """
    names = ran.names(func.__code__)
    asked = not _FUNCTIONS.isdisjoint(names) and not _FUNCTIONS.isdisjoint(
        ran.globals(func.__code__)
    )
    if not asked and _OF_OTHERS.isdisjoint(names) and not names >= _MODULES:
        return
    yield home_of(func), func.__globals__
    texts = [c for code in ran.inner(func.__code__) for c in code.co_consts if isinstance(c, str)]
    found = [(text, sys.modules.get(text)) for text in texts]
    yield from ((text, vars(module)) for text, module in found if is_users(module))


def in_hand(
    func: FunctionType, ran: Everything, imports: Mapping[CodeType, Imports]
) -> Iterator[ModuleType]:
    """Yield the user's modules that a function uses as a whole, not only by an attribute."""
    home = func.__globals__
    cells = zip(func.__code__.co_freevars, func.__closure__ or (), strict=True)
    held = {n: contents(c) for n, c in cells if isinstance(contents(c), ModuleType)}
    named = {n: home[n] for n in ran.globals(func.__code__) if n in home}
    some = any(map(is_users, (*held.values(), *named.values())))
    for code in ran.inner(func.__code__):
        if some or code in imports:
            instructions = [i for i in ran.instructions(code) if i.opname not in SKIPPED]
            modules = {**held, **imports[code].modules} if code in imports else held
            for first, *names in ways(instructions, modules):
                value = modules.get(first, named.get(first))
                for name in names:
                    value = vars(value).get(name) if isinstance(value, ModuleType) else None
                if is_users(value):
                    yield value


def ways(instructions: Iterable[dis.Instruction], modules: Collection[str]) -> Iterator[list[str]]:
    """Yield the dotted names in code, which begin with a global or with one of ``modules``.

    ["", name] is an attribute of something else.
    """
    way: list[str] = []
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
            yield way
            way = []
        if i.opname in GLOBALS:
            way = [i.argval]
        elif i.opname.startswith(_LOCALS):  # Python 3.13 loads two at once
            *before, last = i.argval if isinstance(i.argval, tuple) else (i.argval,)
            yield from ([name] for name in before if name in modules)
            way = [last] if last in modules else []
        elif i.opname in ATTRIBUTES:
            yield ["", i.argval]
    if way:
        yield way
