"""Which methods of a user's classes can be called: those whose names are met in what can be.

A class may have methods that a call never comes to (one that trains it, one that draws it), and
what these reach has no say in what the call gives. So they wait until their name is met in the
code of a function that can be called, or among those that Python and torch call unasked. Where
something is named that may call by a name that is written nowhere (getattr, most of what lies
outside Python's core and torch), none of them waits.
"""

from __future__ import annotations

import functools
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from forall._core.remembering import is_no_users
from forall._torch import trusted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# What torch calls of a class without its name being written anywhere.
_BY_TORCH = frozenset({"forward", "backward", "setup_context", "vmap", "jvp"})
# What Python calls of a class without a say in what a function gives.
_ASIDE = frozenset({"__hash__", "__del__", "__reduce__", "__reduce_ex__", "__getstate__"})
# By these an attribute is found whose name may be any, and by these built-in functions.
_BY_ANY_NAME = frozenset({"__getattribute__", "__dict__", "__mro__", "mro"})
_BUILT_IN = frozenset(
    {"getattr", "vars", "globals", "locals", "eval", "exec", "compile", "__import__", "print"}
)
_MODULES_BY_ANY_NAME = frozenset({"builtins", "numpy"})


class Methods:
    """Methods, by the names under which they can be called."""

    def __init__(self) -> None:
        self._met = {*_BY_TORCH}
        self._by_any = False
        self._waiting: dict[str, list[Any]] = {}

    def of(self, kind: type) -> Iterator[Any]:
        """What a class of the user's holds that can be come to now; its other methods wait."""
        for base in kind.__mro__:
            if is_no_users(base) and base is not object:  # which may call what it has itself
                yield from self._meet(vars(base))
        for name, value in vars(kind).items():
            if self._by_any or not _is_method(value) or self._is_met(name):
                yield value
            else:
                self._waiting.setdefault(name, []).append(value)

    def called_in(self, func: FunctionType) -> Iterator[Any]:
        """The waiting ones that a function may call."""
        names = _written(func.__code__)
        if not self._by_any and any(_finds_any(name, func.__globals__) for name in names):
            yield from self.called_by_any_name()
        yield from self._meet(names)

    def called_by(self, value: Any) -> Iterator[Any]:
        """The waiting ones that something of a library's may call."""
        if isinstance(value, ModuleType):
            certain = value.__name__.partition(".")[0] not in _MODULES_BY_ANY_NAME
        else:
            certain = not is_no_users(value) or trusted.is_trusted(value)
        if not certain:
            yield from self.called_by_any_name()

    def called_by_any_name(self) -> Iterator[Any]:
        self._by_any = True
        yield from self._meet([*self._waiting])

    def _meet(self, names: Iterable[str]) -> Iterator[Any]:
        self._met.update(names)
        for name in self._waiting.keys() & names:
            yield from self._waiting.pop(name)

    def _is_met(self, name: str) -> bool:
        return name in self._met or (name.startswith("__") and name not in _ASIDE)


def _is_method(value: Any) -> bool:
    if isinstance(value, property):
        return True
    return isinstance(getattr(value, "__func__", value), FunctionType)


def _finds_any(name: str, names: dict[str, Any]) -> bool:
    return name in _BY_ANY_NAME or (name in _BUILT_IN and name not in names)


@functools.lru_cache(maxsize=4096)
def _written(code: CodeType) -> frozenset[str]:
    """All names that stand in a function, or in one inside it, as such or as text."""
    return frozenset(code.co_names).union(*map(_in_constant, code.co_consts))


def _in_constant(constant: Any) -> Iterable[str]:
    if isinstance(constant, CodeType):
        return _written(constant)
    if isinstance(constant, (tuple, frozenset)):
        return [name for c in constant for name in _in_constant(c)]
    return [constant] if isinstance(constant, str) and constant.isidentifier() else ()
