"""Imports inside functions: the modules, already loaded, that a function's code imports."""

from __future__ import annotations

import dis
import sys
from importlib.util import resolve_name
from types import ModuleType
from typing import TYPE_CHECKING, Any

from forall._core.python_state import find_line, is_library_module

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import CodeType, FunctionType

    from forall._jit.tracing.coverage import FullCoverage

_IMPORT = dis.opmap["IMPORT_NAME"]
_BETWEEN = frozenset({"SWAP", "POP_TOP"})  # within `import a.b as c`, and after `from a import b`


def find_imports(func: FunctionType, ran: FullCoverage) -> dict[CodeType, ImportReader]:
    """Return the imports of a function's code, and of functions nested in it, by code object."""
    return {
        code: ImportReader(ran.list_instructions(code), func.__globals__, libraries=False)
        for code in ran.walk_inner_codes(func.__code__)
        if has_imports(code)
    }


def has_imports(code: CodeType) -> bool:
    """True if code imports anything, functions nested in it aside."""
    return _IMPORT in code.co_code[::2]


class ImportReader:
    """The imports in a function's instructions; ``why`` is the reason if any is not certain.

    ``modules`` maps variables to modules, and ``taken`` lists the names imported from modules, with
    their lines. With ``libraries`` only imports of libraries are certain: the user's modules are
    not looked at.
    """

    def __init__(
        self, instructions: Iterable[dis.Instruction], home: dict[str, Any], *, libraries: bool
    ) -> None:
        self._package, self._libraries = home.get("__package__") or "", libraries
        self.modules: dict[str, ModuleType] = {}
        self.taken: list[tuple[ModuleType, str, int | None]] = []
        self.found: list[tuple[str, ModuleType]] = []  # all modules, with their full names
        self.why: str | None = None
        self.line: int | None = None  # of the import for that reason
        others = set()  # variables that are also assigned something else
        constant = level = wanted = module = found = None
        for i in instructions:
            if i.opname == "IMPORT_NAME":
                wanted = constant
                name = self._resolve_module_name(i.argval, level)
                module = found = self._find_module(name, find_line(i), whole=bool(wanted or level))
            elif i.opname == "IMPORT_FROM" and isinstance(module, ModuleType):
                found = self._take_name(module, i.argval, find_line(i))
                module = module if wanted else found
            elif i.opname == "STORE_FAST" and isinstance(found, ModuleType):
                if self.modules.setdefault(i.argval, found) is not found:
                    others.add(i.argval)
                found = None
            elif i.opname == "STORE_FAST":
                others.add(i.argval)
            elif i.opname not in _BETWEEN:
                if isinstance(found, ModuleType):
                    self._refuse(f"imports {found.__name__}", find_line(i))  # not into a local
                module = found = None
            level, constant = constant, i.argval
        if not others.isdisjoint(self.modules):
            names = ", ".join(sorted(others & self.modules.keys()))
            self._refuse(f"gives {names} other values than a module", None)

    def _resolve_module_name(self, name: str, level: Any) -> str:
        return resolve_name("." * level + name, self._package) if level and self._package else name

    def _refuse(self, why: str, line: int | None) -> None:
        self.why, self.line = why, line

    def _find_module(self, name: str, line: int | None, *, whole: bool) -> Any:
        there = sys.modules.get(name)
        if there is None or (self._libraries and not is_library_module(name)):
            self._refuse(f"uses import {name}", line)
            return None
        self.found.append((name, there))
        return there if whole else sys.modules.get(name.partition(".")[0])

    def _take_name(self, module: ModuleType, name: str, line: int | None) -> Any:
        self.taken.append((module, name, line))
        return getattr(module, name, None)
