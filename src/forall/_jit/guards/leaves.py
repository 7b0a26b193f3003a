"""Questions of the guards about single objects: arrays, caches, type hints, torch's state."""

from __future__ import annotations

import functools
import gc
import io
import logging
import os
from types import (
    FunctionType,
    GenericAlias,
    MethodDescriptorType,
    WrapperDescriptorType,
)
from typing import TYPE_CHECKING, Any

from torch.utils.hooks import RemovableHandle

from forall._compat.ambient_settings import get_allowed_kernels
from forall._compat.device_mesh import is_mesh_class, is_placement_class
from forall._compat.pure_functions import WORDS
from forall._core.python_state import WeakBox, is_not_users
from forall._core.reachable import CONTAINERS, WRAPPERS, is_buffer, is_ndarray, iterate_held

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from weakref import ReferenceType


_MOST = 10_000  # objects that are followed
LOGGING_CLASSES = (
    logging.Logger,
    logging.Handler,
    logging.LoggerAdapter,
)  # do not influence results
HEAP_TYPE_FLAG = 1 << 9  # the flag of a class that is not defined in C
LRU_CACHE = functools._lru_cache_wrapper
LEAVES = (*WORDS, RemovableHandle)  # hooks are visited in the object that has them


_HOMES_OF_HINTS = frozenset({"typing", "annotationlib"})


def is_type_hint(value: Any) -> bool:
    """True for a type hint."""
    return type(value).__module__ in _HOMES_OF_HINTS or isinstance(value, GenericAlias)


_ITERATOR_METHODS = ("__next__", "__anext__", "send")
_IN_C = (WrapperDescriptorType, MethodDescriptorType)


def is_c_iterator(value: Any) -> bool:
    """True for an iterator in C, whose position cannot be seen: to read from it would advance it.

    The process's own input, to which libraries lead, and files open for writing are left out. So
    are iterators over a sequence, which tell their position.
    """
    if type(value) in SEQUENCE_ITERATORS:
        return False
    is_in_memory = isinstance(value, (io.StringIO, io.BytesIO))
    if (
        isinstance(value, io.IOBase)
        and not is_in_memory
        and (getattr(value, "name", None) in ("<stdin>", 0) or value.closed or value.writable())
    ):
        return False
    kinds = type(value).__mro__
    return any(
        isinstance(vars(kind).get(name), _IN_C) for kind in kinds for name in _ITERATOR_METHODS
    )


# Iterators that tell by `__reduce__` of what they are, and how much of it is left.
SEQUENCE_ITERATORS = frozenset(map(type, (iter([]), iter(()), iter(range(0)), reversed([]))))


def count_remaining(iterator: Any) -> int:
    """Return how many items of its sequence are left to an iterator in `SEQUENCE_ITERATORS`.

    The sequence is watched, so this tells the position. `__reduce__` does not in each Python: from
    3.12 on that of a range has no position but the range that is left.
    """
    return iterator.__length_hint__()


def get_hint_parts(value: Any) -> dict[str, Any]:
    """The parts of a type hint, by the names with which code asks for them."""
    parts = {name: getattr(value, name, ()) for name in ("__args__", "__metadata__")}
    return {**parts, "get_args": (*parts.values(),)}


def is_environment(value: Any) -> bool:
    """True for `os.environ` and `os.getenv`, whose variables are watched."""
    return value is os.environ or value is os.getenv


def ask_safely(question: Callable[[], Any]) -> Any:
    try:
        return question()
    except Exception as error:  # noqa: BLE001 - of a torch without such devices
        return type(error)


def allows_same_kernels(kernels: tuple) -> bool:
    return get_allowed_kernels() == kernels


def lacks_names(weakly: WeakBox, names: frozenset[str]) -> bool:
    return names.isdisjoint(vars(weakly.of()))


def has_state(weakly: WeakBox, state: dict[str, Any]) -> bool:
    return vars(weakly.of()) is state


def can_reach_ids(wanted: set[int], held: Mapping[int, Any]) -> bool:
    """True if the garbage collector's graph leads from what is held to one of these ids."""
    roots = [x for x in held.values() if not isinstance(x, WeakBox)]
    found = enumerate(iterate_held(roots, lambda x: False))
    return any(id(x) in wanted or n > _MOST for n, x in found)


def read_buffer(value: Any) -> tuple:
    """The data of an array or buffer as bytes, with an array's shape, dtype and strides."""
    if isinstance(value, bytearray):
        return (bytes(value),)
    how = (value.shape, value.dtype, value.strides) if is_ndarray(value) else ()
    return (value.tobytes(), *how)


def list_cached(func: Any) -> list[Any]:
    """The objects in an `lru_cache`, without its own classes and its dict of links."""
    found = gc.get_referents(func)
    found = [x for x in found if not (isinstance(x, type) and is_not_users(x))]
    return [x for x in found if not (type(x) is dict and any(map(_is_cache_link, x.values())))]


def make_cache_test(func: Any) -> Callable[[], bool]:
    """Return a test that an `lru_cache` holds what it holds now; if so, it calls no function."""
    info, held = func.cache_info(), {*map(id, list_cached(func))}

    def is_unchanged() -> bool:
        now = func.cache_info()  # an entry may have been dropped and computed again
        counts = (now.misses, now.currsize) == (info.misses, info.currsize)
        return counts and {*map(id, list_cached(func))} == held

    return is_unchanged


def _is_cache_link(value: Any) -> bool:
    return type(value).__name__ == "_lru_list_elem"


def is_alive(reference: ReferenceType, *, wanted: bool = True) -> bool:
    return (reference() is not None) is wanted


def is_method_def(func: FunctionType) -> bool:
    """True if a function is defined in a class body."""
    home = func.__qualname__.rpartition(".")[0]
    return bool(home) and not home.endswith("<locals>")


def is_constant_class(kind: type) -> bool:
    """True for a built-in class of constants; a user's subclass may have attributes."""
    if kind in LEAVES or is_mesh_class(kind) or is_placement_class(kind):
        return True
    return issubclass(kind, LEAVES) and is_not_users(kind)


def may_have_attributes(value: Any) -> bool:
    """True for a container, wrapper or array of a subclass, which may have attributes too."""
    kind = type(value)
    if isinstance(value, CONTAINERS):
        return kind not in CONTAINERS
    return (isinstance(value, WRAPPERS) or is_buffer(value)) and not is_not_users(kind)
