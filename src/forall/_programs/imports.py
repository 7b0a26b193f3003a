"""What a function imports while it runs: modules that are there already, under names of its own."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from forall._core.remembering import is_library

if TYPE_CHECKING:
    import dis
    from collections.abc import Iterable

_BETWEEN = frozenset({"SWAP", "POP_TOP"})  # of `import a.b as c`, and behind what is taken


class Imports:
    """Those of a function's instructions; ``why`` tells what of them is not certain.

    ``modules`` are those that its variables hold, and ``taken`` what it takes out of modules.
    """

    def __init__(self, instructions: Iterable[dis.Instruction]) -> None:
        self.modules: dict[str, ModuleType] = {}
        self.taken: list[tuple[ModuleType, str]] = []
        self.found: list[tuple[str, ModuleType]] = []  # by their full names
        self.why: str | None = None
        others = set()  # variables that hold something else at times
        constant = level = wanted = module = found = None
        for i in instructions:
            if i.opname == "IMPORT_NAME":
                wanted = constant
                module = found = self._module(i.argval, whole=bool(wanted))
                if level:
                    self.why = f"uses a module beside its own, {i.argval}"
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

    def _module(self, name: str, *, whole: bool) -> Any:
        there = sys.modules.get(name)
        if there is None or not is_library(name):
            self.why = f"uses import {name}"
            return None
        self.found.append((name, there))
        return there if whole else sys.modules.get(name.partition(".")[0])

    def _taken(self, module: ModuleType, name: str) -> Any:
        self.taken.append((module, name))
        return getattr(module, name, None)
