"""Guards of attributes: methods and attributes are guarded once some code names them.

A class may have methods that a call never runs (one that trains, one that plots), and an object may
have attributes that it never reads (a counter, a log). These have no influence on the result. So
each waits until its name is found in the code of a function that can be called, or among the names
that Python and torch look up by themselves. None of them waits where code may look up a name that
it does not contain (getattr, most of what lies outside Python's core and torch).
"""

from __future__ import annotations

import re
from functools import cached_property
from itertools import dropwhile, islice
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from forall._compat import pure_functions
from forall._core.code_table import walk_codes
from forall._core.python_state import CONSTRUCTORS, find_names_in_constant, is_not_users

if TYPE_CHECKING:
    import dis
    from collections.abc import Iterable, Iterator

    from forall._jit.tracing.coverage import FullCoverage

# Methods of a class that torch calls, though no user code names them.
NAMES_TORCH_CALLS = frozenset({"forward", "backward", "setup_context", "vmap", "jvp"})
# Methods that Python calls, with no influence on a function's result.
_NAMES_WITHOUT_INFLUENCE = frozenset({"__hash__", "__reduce__", "__reduce_ex__", "__getstate__"})
# By these names, and by these built-in functions, code may find an attribute of any name.
NAMES_OF_ANY_LOOKUP = frozenset(
    {"__getattribute__", "__dict__", "__dir__", "__mro__", "mro", "format", "format_map"}
    | {"__reduce__", "__reduce_ex__", "__getstate__"}
)
_BUILT_IN = frozenset(
    {"vars", "globals", "locals", "eval", "exec", "compile", "__import__", "print"}
)
_EVALUATING = frozenset({"eval", "exec"})
_WORD = re.compile(r"[^\W\d]\w*")
# By these too, except where the attribute's name is a constant text in the code.
NAMES_OF_TEXT_LOOKUP = frozenset({"getattr", "hasattr", "setattr", "delattr"})
LOAD_GLOBAL_OPS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
SKIPPED_OPS = frozenset(
    {"CACHE", "PUSH_NULL", "PRECALL", "EXTENDED_ARG", "COPY_FREE_VARS", "RESUME", "NOP"}
)
_LOAD_BUILT_IN_OPS = LOAD_GLOBAL_OPS | {"IMPORT_FROM"}  # also `from builtins import eval`
_LOAD_ONE_OPS = frozenset({"LOAD_FAST", "LOAD_DEREF", "LOAD_CONST", *LOAD_GLOBAL_OPS})
_MODULES_BY_ANY_NAME = frozenset({"builtins", "numpy"})
_CLASS = frozenset({"type", "__class__"})  # code with these may make objects of an object's class


class AttributeNames:
    """The names that a call's code can look up, and the values that wait under other names.

    Most methods yield values that need not wait any longer, for the guards to visit.
    """

    def __init__(self, ran: FullCoverage) -> None:
        self.ran = ran
        self.any = False  # True once code can look up any name
        self._met = {*NAMES_TORCH_CALLS}
        self._written: set[str] = set()
        self._waiting: dict[str, list[Any]] = {}

    def release_in_class(self, kind: type) -> Iterator[Any]:
        """Yield a user's class's values that code can look up now; its other methods wait."""
        for base in kind.__mro__:
            if is_not_users(base) and base is not object:  # a library's base calls its own methods
                yield from self._release_names(vars(base))
        yield from self._release_names(find_names_in_constant(vars(kind).get("__match_args__")))
        for name, value in vars(kind).items():
            if not _is_method(value):
                yield value
            else:
                yield from self._release_or_wait(name, value)

    def list_makers(self, kind: type) -> Iterator[Any]:
        """Yield the methods that make an object of a class."""
        for base in kind.__mro__:
            if not is_not_users(base):
                yield from (vars(base)[name] for name in sorted(CONSTRUCTORS & vars(base).keys()))

    def release_in_object(self, state: dict[str, Any]) -> Iterator[Any]:
        """Yield an object's attributes that code can look up now; its other attributes wait."""
        for name, value in state.items():
            yield from self._release_or_wait(name, value)

    def contains_name(self, name: str) -> bool:
        """True if code that a call can run contains this name."""
        return name in self._written

    def match_names(self, state: dict[str, Any]) -> tuple[list[str], frozenset[str]]:
        """The attributes of an object that code can look up, and the names that it lacks."""
        return [n for n in state if self._is_released(n)], frozenset(self._met - state.keys())

    def release_for_code(self, func: FunctionType) -> Iterator[Any]:
        """Add the names in a function's code; yield the values that waited for them."""
        names = self.ran.list_written_names(func.__code__)
        if not names.isdisjoint(_EVALUATING) and self._loads_any(func, _EVALUATING):
            texts = [c for code in walk_codes(func.__code__) for c in code.co_consts]
            names = names.union(*(_WORD.findall(text) for text in texts if isinstance(text, str)))
        if not self.any and self._may_look_up_any(func, names):
            yield from self._release_all()
        self._written |= names
        yield from self._release_names(names)
        if not names.isdisjoint(_CLASS):
            yield from self.release_makers()

    def _may_look_up_any(self, func: FunctionType, names: frozenset[str]) -> bool:
        if not names.isdisjoint(NAMES_OF_ANY_LOOKUP):
            return True
        if self._loads_any(func, names & _BUILT_IN - func.__globals__.keys()):
            return True
        codes = () if names.isdisjoint(NAMES_OF_TEXT_LOOKUP) else walk_codes(func.__code__)
        return any(find_text_lookups(self.ran.list_instructions(code))[1] for code in codes)

    def _loads_any(self, func: FunctionType, built_in: frozenset[str]) -> bool:
        """True if code loads one of these built-in functions; a method may have the same name."""
        return bool(built_in) and any(
            i.opname in _LOAD_BUILT_IN_OPS and i.argval in built_in
            for code in walk_codes(func.__code__)
            for i in self.ran.list_instructions(code)
        )

    def release_for_value(self, value: Any) -> Iterator[Any]:
        """Yield all waiting values if an object, of a library for example, may look up any name."""
        if isinstance(value, ModuleType):
            certain = value.__name__.partition(".")[0] not in _MODULES_BY_ANY_NAME
        else:
            # The code of what is not written in Python cannot be read.
            read = not isinstance(value, BuiltinFunctionType) and not is_not_users(value)
            certain = read or (
                pure_functions.is_trusted_value(value)
                and not (isinstance(value, BuiltinFunctionType) and value in pure_functions.READERS)
            )
            if isinstance(value, FunctionType) and value.__module__ == "dataclasses":
                certain = False  # asdict, replace: all fields
        if not certain:
            yield from self._release_all()

    def release_makers(self) -> Iterator[Any]:
        """Yield the waiting methods that make an object: code asks an object for its class."""
        yield from self._release_names(CONSTRUCTORS)

    def _release_all(self) -> Iterator[Any]:
        self.any = True
        yield from self._release_names([*self._waiting.keys() - _NAMES_WITHOUT_INFLUENCE])

    def _release_names(self, names: Iterable[str]) -> Iterator[Any]:
        self._met.update(names)
        for name in sorted(self._waiting.keys() & names):
            yield from self._waiting.pop(name)

    def _release_or_wait(self, name: str, value: Any) -> Iterator[Any]:
        if self._is_released(name):
            yield value
        else:
            self._waiting.setdefault(name, []).append(value)

    def _is_released(self, name: str) -> bool:
        unasked = self.any or (name.startswith("__") and name not in CONSTRUCTORS)
        return name in self._met or (unasked and name not in _NAMES_WITHOUT_INFLUENCE)


def _is_method(value: Any) -> bool:
    if isinstance(value, (property, cached_property)):
        return True
    return isinstance(getattr(value, "__func__", value), FunctionType)


def find_text_lookups(instructions: Iterable[dis.Instruction]) -> tuple[set[str], bool]:
    """The constant names that code passes to `getattr` and the like, and if it may pass others.

    The name is certain in a call such as ``getattr(x.y, "z", None)``: with a variable, a global or
    an attribute of these, a constant text, and perhaps one default.
    """
    left = [i for i in instructions if i.opname not in SKIPPED_OPS]
    found, others = set(), False
    for n, i in enumerate(left, 1):
        if i.opname in LOAD_GLOBAL_OPS and i.argval in NAMES_OF_TEXT_LOOKUP:
            text = _find_text_argument(left[n : n + 1], dropwhile(_is_attribute, left[n + 1 :]))
            others = others or text is None
            found.add(text)
        elif i.opname in LOAD_GLOBAL_OPS and i.argval in _BUILT_IN:
            others = True
    return found - {None}, others


def _find_text_argument(of: list[dis.Instruction], rest: Iterator[dis.Instruction]) -> str | None:
    """The constant text that is the second argument of a call, None where it is not certain."""
    text, *ends = [*islice(rest, 3), None, None, None][:3]
    fallback = ends[0] is not None and ends[0].opname in _LOAD_ONE_OPS
    call = ends[fallback]
    if not of or of[0].opname not in _LOAD_ONE_OPS or text is None or call is None:
        return None
    fits = text.opname == "LOAD_CONST" and call.opname == "CALL" and call.arg == 2 + fallback
    return text.argval if fits and type(text.argval) is str else None


def _is_attribute(i: dis.Instruction) -> bool:
    return i.opname == "LOAD_ATTR"
