"""Questions about Python state: whose an object is, and which names its code reads and binds."""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import sys
from types import CellType, CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from forall._compat.private_api import module_of
from forall._core.code_table import walk_codes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from weakref import ref

UNSET = object()  # the content of an empty cell, and the value of an unbound name
# In the arguments of a `functools.partial`, the place of one that comes later; of Python 3.14.
PLACEHOLDER = getattr(functools, "Placeholder", UNSET)


class UnguardedState:
    """Base of objects kept from call to call that have no influence on a call's result."""


class WeakBox(UnguardedState):
    """A weak reference to an object of the user's; ``of()`` is the object, or None."""

    __slots__ = ("of",)

    def __init__(self, of: ref) -> None:
        self.of = of


class ObjectStandIn(UnguardedState):
    """An object with the attributes that a function reads of a captured object of the user's."""

    def __init__(self, attributes: dict[str, Any]) -> None:
        vars(self).update(attributes)


_LIBRARIES = frozenset(
    {"builtins", "torch", "numpy", "forall", "functools", "math", "typing_extensions", "tensordict"}
    | {"pybind11_builtins"}  # the module of base classes of torch's
)

# Programs that run the user's, in whose state other threads write meanwhile.
_RUNNERS = frozenset(
    {"pytest", "_pytest", "pluggy", "xdist", "execnet", "coverage", "debugpy", "pydevd"}
    | {"IPython", "ipykernel", "jupyter_client", "traitlets", "tornado", "zmq"}
)


def is_library_object(thing: Any) -> bool:
    return is_library_module(module_of(thing))


def is_not_users(thing: Any) -> bool:
    """True if a class or function is a library's or Python's own, so that it does not change.

    A class that a library derives from one of the user's counts as the user's. So does a class that
    `torch.fx` makes for a graph, since its ``forward`` is the user's code.
    """
    if isinstance(thing, type):
        if thing.__qualname__.endswith("GraphModuleImpl"):
            return False
        return all(is_not_users_module(module_of(kind)) for kind in thing.__mro__)
    # functools.wraps gives a function the name of another
    name = module_name_of(thing) if isinstance(thing, FunctionType) else module_of(thing)
    return isinstance(name, str) and is_not_users_module(name)


@functools.lru_cache(maxsize=4096)
def is_not_users_module(module: str) -> bool:
    """True if this is the name of a library's module or of one of Python's own."""
    return is_library_module(module) or module.partition(".")[0] in sys.stdlib_module_names


@functools.lru_cache(maxsize=4096)
def is_installed_module(module: str) -> bool:
    """Return True if a module is of an installed package, which users seldom write themselves."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file


@functools.lru_cache(maxsize=4096)
def is_runners_module(module: str) -> bool:
    """Return True if a module is of a program that runs the user's: pytest, Jupyter, a debugger."""
    return module.partition(".")[0] in _RUNNERS


def is_ours(func: FunctionType) -> bool:
    return module_name_of(func).partition(".")[0] == "forall"


def module_name_of(func: FunctionType) -> str:
    """Return the name of the module whose globals a function has; "" if they have no name."""
    return func.__globals__.get("__name__") or ""


def find_home(thing: Any) -> str:
    """Return the name of the module of a function, of a class, or of an object's class."""
    if isinstance(thing, FunctionType):
        return module_name_of(thing)
    return module_of(thing if isinstance(thing, type) else type(thing))


def is_library_module(module: str) -> bool:
    """True if this is the name of a module of torch, numpy and the few others in `_LIBRARIES`.

    Python's own library is not among these; `is_not_users_module` has it too.
    """
    return module.partition(".")[0] in _LIBRARIES


def cell_contents_of(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return UNSET


def read_signature(func: Callable) -> inspect.Signature:
    """Return a function's signature, with its annotations as text if they are not yet evaluated.

    From Python 3.14 on they are code, which may name what is there for a type checker alone.

    Raises:
        TypeError: if it cannot be called.
        ValueError: if it has no signature that Python knows.
    """
    return inspect.signature(func, **_UNEVALUATED)


_UNEVALUATED: dict[str, Any] = {}
if sys.version_info >= (3, 14):
    import annotationlib

    _UNEVALUATED["annotation_format"] = annotationlib.Format.STRING


CALL_OPS = frozenset({"CALL", "CALL_KW", "CALL_FUNCTION_EX"})
GLOBAL_OPS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"})
_REBINDS_GLOBALS = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL"})
_REBINDS = frozenset({"STORE_DEREF", "DELETE_DEREF"})
CONSTRUCTORS = frozenset({"__init__", "__new__", "__post_init__"})  # that a class calls
# By these built-in functions and attributes code can read or bind names without naming them.
SETTERS = frozenset({"setattr", "delattr"})  # of modules too, whose names are global
_NAMESPACE_FUNCTIONS = SETTERS | {"globals", "eval", "exec"}
_NAMESPACE_ATTRIBUTES = frozenset({"__closure__", "__globals__"})


@functools.lru_cache(maxsize=1024)
def instructions_of(code: CodeType) -> tuple[dis.Instruction, ...]:
    """Return the instructions of a function, without those of functions written inside it.

    They have the names of Python 3.12. From 3.13 on, one may load or store two variables: here
    that is two. A cell that a closure gets has an instruction of its own name, `LOAD_CLOSURE`.
    """
    found = [part for i in dis.get_instructions(code) for part in _split_instruction(i)]
    plain = [n for n, i in enumerate(found) if i.opname != "EXTENDED_ARG"]
    for at, n in enumerate(plain):
        inner = found[n].argval
        if isinstance(inner, CodeType) and found[plain[at - 1]].opname == "BUILD_TUPLE":
            cells = plain[at - 1 - len(inner.co_freevars) : at - 1]
            if tuple(found[k].argval for k in cells) == inner.co_freevars:
                for k in cells:
                    found[k] = found[k]._replace(opname="LOAD_CLOSURE")
    return (*found,)


_PARTS = {
    "LOAD_FAST_BORROW": ("LOAD_FAST",),
    "LOAD_FAST_BORROW_LOAD_FAST_BORROW": ("LOAD_FAST", "LOAD_FAST"),
    "LOAD_FAST_CHECK": ("LOAD_FAST",),
    "LOAD_FAST_LOAD_FAST": ("LOAD_FAST", "LOAD_FAST"),
    "LOAD_SMALL_INT": ("LOAD_CONST",),
    "STORE_FAST_LOAD_FAST": ("STORE_FAST", "LOAD_FAST"),
    "STORE_FAST_STORE_FAST": ("STORE_FAST", "STORE_FAST"),
}


def _split_instruction(i: dis.Instruction) -> list[dis.Instruction]:
    """Return an instruction that does the work of several as these, all of them at its place."""
    parts = _PARTS.get(i.opname)
    if parts is None:
        return [i]
    values = i.argval if len(parts) > 1 else (i.argval,)
    return [i._replace(opname=n, argval=v) for n, v in zip(parts, values, strict=True)]


def find_line(instruction: dis.Instruction) -> int | None:
    """Return the line of the source that an instruction is of, None if it is not known."""
    return None if instruction.positions is None else instruction.positions.lineno


@functools.lru_cache(maxsize=4096)
def globals_of(code: CodeType) -> tuple[tuple[str, bool], ...]:
    """Return the globals that a function, or one inside it, names, and whether it rebinds them."""
    found: dict[str, bool] = {}
    for i in instructions_of(code):
        if i.opname in GLOBAL_OPS:
            found[i.argval] = found.get(i.argval, False) or i.opname in _REBINDS_GLOBALS
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            for name, rebound in globals_of(constant):
                found[name] = found.get(name, False) or rebound
    return tuple(found.items())


@functools.lru_cache(maxsize=4096)
def find_rebound_names(code: CodeType) -> frozenset[str]:
    """Return the names of closure variables that a function, or one inside it, rebinds."""
    inner = [find_rebound_names(c) for c in code.co_consts if isinstance(c, CodeType)]
    own = (i.argval for i in instructions_of(code) if i.opname in _REBINDS)
    return frozenset(own).union(*inner)


@functools.lru_cache(maxsize=4096)
def may_rebind(code: CodeType) -> bool:
    """True if a function may rebind names that are not its own."""
    return may_rebind_by(code, names_of(code))


def may_rebind_by(code: CodeType, names: frozenset[str]) -> bool:
    """True if a function rebinds names that are not its own, or may do so by one of ``names``.

    A method that is named as a built-in function is another: ``model.eval()`` evaluates nothing.
    """
    if not find_rebound_names(code).isdisjoint(code.co_freevars):
        return True
    found = globals_of(code)
    called = names if "builtins" in names else {name for name, _ in found if name in names}
    return (
        any(written for _, written in found)
        or not _NAMESPACE_FUNCTIONS.isdisjoint(called)
        or not _NAMESPACE_ATTRIBUTES.isdisjoint(names)
    )


@functools.lru_cache(maxsize=4096)
def find_attributes_read(code: CodeType, variable: str) -> tuple[str, ...] | None:
    """Return the attributes that code reads of a free variable; None if it may do more with it.

    Functions written inside count too.
    """
    if not _READ_BY_OTHERS.isdisjoint(code.co_names):
        return None
    found: dict[str, None] = {}
    instructions = [i for i in instructions_of(code) if i.opname != "EXTENDED_ARG"]
    for i, after in itertools.pairwise([*instructions, None]):
        if i.opname == "LOAD_DEREF" and i.argval == variable:
            if after is None or after.opname not in _READS_OF_ATTRIBUTES:
                return None
            found[after.argval] = None
        elif i.opname not in _PASSES_ON and i.argval == variable:
            return None
    for inner in code.co_consts:
        if isinstance(inner, CodeType) and variable in inner.co_freevars:
            names = find_attributes_read(inner, variable)
            if names is None:
                return None
            found.update(dict.fromkeys(names))
    return (*found,)


_READS_OF_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_PASSES_ON = frozenset({"LOAD_CLOSURE", "COPY_FREE_VARS", "LOAD_CONST"} | GLOBAL_OPS)
# With these built-in functions code finds a variable without its name.
_READ_BY_OTHERS = frozenset({"locals", "vars", "dir", "eval", "exec"})


@functools.lru_cache(maxsize=4096)
def may_write_attributes(code: CodeType, attributes: frozenset[str]) -> bool:
    """True if a function, or one inside it, may write attributes of these names."""
    names = names_of(code)
    if not _WRITES_OF_ATTRIBUTES.isdisjoint(names):
        return True
    return not attributes.isdisjoint(names) and any(
        i.opname in {"STORE_ATTR", "DELETE_ATTR"} and i.argval in attributes
        for inner in walk_codes(code)
        for i in instructions_of(inner)
    )


_WRITES_OF_ATTRIBUTES = SETTERS | {"vars", "__dict__", "__setattr__", "__delattr__"}


@functools.lru_cache(maxsize=4096)
def names_of(code: CodeType) -> frozenset[str]:
    """Return all names of globals and attributes in a function, or in one written inside it."""
    inner = [names_of(c) for c in code.co_consts if isinstance(c, CodeType)]
    return frozenset(code.co_names).union(*inner)


@functools.lru_cache(maxsize=4096)
def find_names_and_text(code: CodeType) -> frozenset[str]:
    """Return all names and string constants in a function, or in one inside it."""
    return frozenset(code.co_names).union(*map(find_names_in_constant, code.co_consts))


def find_names_in_constant(constant: Any) -> Iterable[str]:
    """Return the names and strings in a constant of a code object."""
    if isinstance(constant, CodeType):
        return find_names_and_text(constant)
    if isinstance(constant, (tuple, frozenset)):
        return [name for c in constant for name in find_names_in_constant(c)]
    return [constant] if isinstance(constant, str) else ()  # any text may name an attribute
