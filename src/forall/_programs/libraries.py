"""What a library's functions find by the names in their code, which others may give anew.

Such a function does the same with each call as long as its names stand for the same. Code may give
a module another function (`unittest.mock.patch`), or register one of its own in a dict that the
library asks (`torch.distributions.kl.register_kl`).
"""

from __future__ import annotations

import dis
import functools
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

from forall._core.remembering import contents, home_of, is_no_users, is_none_by_name
from forall._programs.namespaces import ways
from forall._programs.naming import SKIPPED, codes_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType

# Where functions of torch's lead to others that bear on what they give. What torch has around them
# (its dispatch to subclasses, its compilers) is left out: it only looks on.
_HOMES = ("torch",)
_AROUND = (
    "torch.overrides",
    "torch._dynamo",
    "torch.fx",
    "torch.jit",
    "torch._jit_internal",
    "torch._logging",
    "torch.distributed",
    "torch.compiler",
    "torch._compile",
    "torch.onnx",
    "torch._higher_order_ops",
    "torch._ops",
    "torch._library",
    "torch.library",
    "torch._subclasses",
)


def is_followed(func: FunctionType) -> bool:
    """Whether the names of a library's function are followed."""
    home = home_of(func)
    return home.partition(".")[0] in _HOMES and not home.startswith(_AROUND)


def asked_names(func: FunctionType) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Where a library's function finds what, by which name."""
    home = func.__globals__
    for way in _ways(func.__code__):
        names = home
        for name in way:
            if name not in names:
                break
            value = names[name]
            yield names, name, value
            if not isinstance(value, ModuleType) or not is_none_by_name(value.__name__):
                break
            names = vars(value)


def inner_functions(func: FunctionType) -> Iterator[FunctionType]:
    """The functions that a library's function has in its closure, or wraps."""
    held = [*map(contents, func.__closure__ or ()), vars(func).get("__wrapped__")]
    yield from (value for value in held if isinstance(value, FunctionType))


def of_users(entries: Any) -> list[Any]:
    """What is not the library's own among the values of a dict that it asks."""
    values = entries.values() if isinstance(entries, dict) else entries
    return [value for value in values if not _is_librarys(value)]


def _is_librarys(value: Any) -> bool:
    if isinstance(value, (FunctionType, type)):
        return is_no_users(value)
    if isinstance(value, tuple):
        return all(map(_is_librarys, value))
    if isinstance(value, ModuleType):
        return is_none_by_name(value.__name__)
    if isinstance(value, (MethodType, functools.partial)):
        return all(map(_is_librarys, _made_of(value)))
    return is_no_users(type(value))


def _made_of(value: MethodType | functools.partial) -> tuple:
    if isinstance(value, MethodType):
        return value.__func__, value.__self__
    return value.func, *value.args, *value.keywords.values()


@functools.lru_cache(maxsize=4096)
def _ways(code: CodeType) -> tuple[tuple[str, ...], ...]:
    found = {}
    for inner in codes_of(code):
        instructions = [i for i in dis.get_instructions(inner) if i.opname not in SKIPPED]
        found.update(dict.fromkeys(tuple(way) for way in ways(instructions, ()) if way[0]))
    return (*found,)
