"""What a function imports while it runs: modules that are there already, under names of its own."""

from __future__ import annotations

import dis
import sys
from importlib.util import resolve_name
from types import ModuleType
from typing import TYPE_CHECKING, Any

from forall._core.python_state import is_library

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import CodeType, FunctionType

    from forall._jit.tracing.coverage import Everything

_IMPORT = dis.opmap["IMPORT_NAME"]
_BETWEEN = frozenset({"SWAP", "POP_TOP"})  # of `import a.b as c`, and behind what is taken


def imported(func: FunctionType, ran: Everything) -> dict[CodeType, Imports]:
    """What the code of a function imports, and what is written inside it, where any does."""
    return {
        code: Imports(ran.instructions(code), func.__globals__, libraries=False)
        for code in ran.inner(func.__code__)
        if has_imports(code)
    }


def has_imports(code: CodeType) -> bool:
    """True if code imports anything, without what is written inside it."""
    return _IMPORT in code.co_code[::2]


class Imports:
    """Those of a function's instructions; ``why`` tells what of them is not certain.

    ``modules`` are those that its variables hold, and ``taken`` what it takes out of modules. With
    ``libraries`` no others are certain: nobody looks at what modules of the user's hold.
    """

    def __init__(
        self, instructions: Iterable[dis.Instruction], home: dict[str, Any], *, libraries: bool
    ) -> None:
        self._package, self._libraries = home.get("__package__") or "", libraries
        self.modules: dict[str, ModuleType] = {}
        self.taken: list[tuple[ModuleType, str]] = []
        self.found: list[tuple[str, ModuleType]] = []  # by their full names
        self.why: str | None = None
        others = set()  # variables that hold something else at times
        constant = level = wanted = module = found = None
        for i in instructions:
            if i.opname == "IMPORT_NAME":
                wanted = constant
                name = self._absolute(i.argval, level)
                module = found = self._module(name, whole=bool(wanted or level))
            elif i.opname == "IMPORT_FROM" and isinstance(module, ModuleType):
                found = self._taken(module, i.argval)
                module = module if wanted else found
            elif i.opname == "STORE_FAST" and isinstance(found, ModuleType):
                if self.modules.setdefault(i.argval, found) is not found:
                    others.add(i.argval)
                found = None
            elif i.opname.startswith("STORE_FAST"):
                others.update(i.argval if isinstance(i.argval, tuple) else (i.argval,))
            elif i.opname not in _BETWEEN:
                if isinstance(found, ModuleType):
                    self.why = f"imports {found.__name__}"  # to where it is not looked for
                module = found = None
            level, constant = constant, i.argval
        if not others.isdisjoint(self.modules):
            self.why = f"gives {', '.join(others & self.modules.keys())} other values than a module"

    def _absolute(self, name: str, level: Any) -> str:
        return resolve_name("." * level + name, self._package) if level and self._package else name

    def _module(self, name: str, *, whole: bool) -> Any:
        there = sys.modules.get(name)
        if there is None or (self._libraries and not is_library(name)):
            self.why = f"uses import {name}"
            return None
        self.found.append((name, there))
        return there if whole else sys.modules.get(name.partition(".")[0])

    def _taken(self, module: ModuleType, name: str) -> Any:
        self.taken.append((module, name))
        return getattr(module, name, None)
