"""`Varying`: a value that differs between lanes and is no tensor, such as None for some lanes only.

Each operation on it runs once for each of its parts, for the lanes of that part, and the results
are joined. Most results are uniform again at once: ``None if x < 0 else x`` that is then tested.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

from forall._compat import pytree
from forall._core.errors import format_short
from forall._divergence import join
from forall._divergence.heap import Mixed, SeveralKinds, Unsplittable, slot_of
from forall._divergence.join import (
    Parts,
    merge,
    restrict_parts,
    unify_varying,
)
from forall._divergence.thread_state import run_each_set, thread
from forall._divergence.vmap_interface import interface, unite_sets


class Varying:
    """The values of an expression by active set. Lanes outside all of them have no value."""

    __slots__ = ("parts",)
    varies = True
    __array_ufunc__ = None  # so that numpy leaves its operators to the reflected ones here

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        thread.loose = True

    def running_parts(self) -> Parts:
        """Return the parts for the running lanes; raise if some of them have no value."""
        world = interface.get_active_set()
        parts = restrict_parts(self.parts, world)
        covered = unite_sets([w for w, _ in parts])
        if covered is None or world - covered is not None:
            raise UnboundLocalError(
                "a variable was read for examples that have not assigned it: it has a value for "
                f"{0 if covered is None else covered.size} others"
            )
        return parts

    def each(self, run: Callable[[Any], Any]) -> Any:
        """Call ``run`` on each value for the lanes that have it, and join the results."""
        parts = self.running_parts()
        if len(parts) > 1:
            value = merge(parts)
            if type(value) is not Varying:
                return run(value)
        return run_each_set(parts, run)

    def __getattr__(self, name: str) -> Any:
        if name == "__torch_function__":  # torch asks tensors' methods whether they act
            raise AttributeError(name)
        return self.each(lambda value: getattr(value, name))

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "parts":
            object.__setattr__(self, name, value)
        else:
            raise Unsplittable("an attribute of what varies was set by code that is not converted")

    def __iter__(self) -> Iterator[Any]:
        whole = self.each(tuple)
        if type(whole) is Varying:
            raise Unsplittable("what is unpacked has another length for some examples")
        return iter(whole)

    def __bool__(self) -> bool:
        found = {bool(value) for _, value in self.running_parts()}
        if len(found) > 1:
            raise Unsplittable("what varies was tested by code that is not converted")
        return found.pop()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.each(lambda value: thread.call(value, *args, **kwargs))

    def __contains__(self, item: Any) -> bool:
        return bool(self.each(lambda value: item in value))

    def __format__(self, spec: str) -> str:
        return " | ".join(
            format(value, spec)
            for _, value in restrict_parts(self.parts, interface.get_active_set())
        )

    def __repr__(self) -> str:
        shown = ", ".join(f"{value!r} for {w.size}" for w, value in self.parts)
        return f"Varying({shown} examples)"

    def __hash__(self) -> int:
        raise Unsplittable("what varies is a key of a dict or in a set of code not converted")


def _make_forward(name: str, run: Callable) -> Callable:
    def method(self: Varying, *others: Any) -> Any:
        return self.each(lambda value: run(value, *others))

    method.__name__ = name
    return method


def _make_reflected(name: str, run: Callable) -> Callable:
    def method(self: Varying, other: Any) -> Any:
        return self.each(lambda value: run(other, value))

    method.__name__ = name
    return method


_BINARY = [
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "matmul",
    "pow",
    "lshift",
    "rshift",
    "and",
    "or",
    "xor",
]
for _name in _BINARY:
    _run = getattr(operator, f"{_name}_" if _name in ("and", "or") else _name)
    setattr(Varying, f"__{_name}__", _make_forward(f"__{_name}__", _run))
    setattr(Varying, f"__r{_name}__", _make_reflected(f"__r{_name}__", _run))
for _name in ["lt", "le", "eq", "ne", "gt", "ge", "getitem", "neg", "pos", "abs", "invert"]:
    setattr(Varying, f"__{_name}__", _make_forward(f"__{_name}__", getattr(operator, _name)))


def resolve_varying(value: Any) -> Any:
    """Return the value of a `Varying` for the running lanes, for code that does not know it."""
    if type(value) is Varying:
        return merge(value.running_parts())
    return value


def make_kinds_error(result: Any, number: int, leaf: Any) -> SeveralKinds:
    """Return the error for a leaf of a function's results that is of another kind for some lanes.

    It names no lanes: equal texts are warned of once.
    """
    paths = pytree.tree_flatten_with_path(result)[0]
    path = pytree.keystr(paths[number][0]) if number < len(paths) else ""
    values = [v for _, v in leaf.parts] if type(leaf) is Varying else [leaf]
    kinds = sorted({_name_kind(v) for v in values})
    which = f"result{path} is " if path else ""
    found = " or ".join(kinds) if len(kinds) > 1 else f"{kinds[0]} that differ, and are no numbers"
    return SeveralKinds(f"results of several kinds: {which}{found}")


def _name_kind(value: Any) -> str:
    if type(value) is interface.BatchedScalar:
        return value.kind.__name__
    if isinstance(value, interface.Tensor):
        return format_short(value)
    return "None" if value is None else type(value).__name__


def has_varying(value: Any, deep: int = 2) -> bool:
    """True if a value is varying, or contains a varying one at most ``deep`` containers deep."""
    kind = type(value)
    if kind is Varying or kind is Mixed:
        return True
    if thread.mixed and id(value) in thread.mixed:
        return True
    if not deep:
        return False
    if kind is list or _is_tuple(kind):
        return any(has_varying(v, deep - 1) for v in value)
    if kind is dict:
        return any(has_varying(v, deep - 1) for v in value.values())
    return False


def _is_tuple(kind: type) -> bool:
    """Return True for the class of tuples and for named tuples."""
    return kind is tuple or (issubclass(kind, tuple) and hasattr(kind, "_fields"))


def find_uniform_sets(values: Any, deep: int = 2) -> list[Any]:
    """Return the coarsest active sets within each of which none of these values varies."""
    worlds = [interface.get_active_set()]
    for value in values:
        for parts in _find_divergences(value, deep):
            worlds = [piece for world in worlds for piece in _split_set(world, parts)]
    return worlds


def _split_set(world: Any, parts: Parts) -> Iterator[Any]:
    """Split an active set by the lanes of these parts."""
    rest = world
    for w, _ in restrict_parts(parts, world):
        yield w
        rest = rest - w
        if rest is None:
            return
    yield rest


def _find_divergences(value: Any, deep: int) -> Iterator[Parts]:
    kind = type(value)
    if kind is Varying:
        now = restrict_parts(
            value.parts, interface.get_active_set()
        )  # lanes without a value make a set of their own
        if not now or type(merge(now)) is Varying:
            yield now
        for _, v in now:
            yield from _find_divergences(v, deep)
        return
    if kind is Mixed:
        value.refuse()
    mixed = thread.mixed.get(id(value))
    if mixed is not None:
        yield restrict_parts(mixed[1].parts, interface.get_active_set())
    elif deep:
        yield from _find_divergences_in(value, deep)


def _find_divergences_in(value: Any, deep: int) -> Iterator[Parts]:
    kind = type(value)
    if kind is list or _is_tuple(kind):
        for v in value:
            yield from _find_divergences(v, deep - 1)
    elif kind is dict:
        for v in value.values():
            yield from _find_divergences(v, deep - 1)


def resolve_deep(value: Any, deep: int = 2) -> Any:
    """Return the value for the running lanes, with varying items in it resolved in place."""
    kind = type(value)
    if kind is Varying:
        value = resolve_varying(value)
        if type(value) is Varying:
            raise Unsplittable(
                "what varies, deep inside what is given to code that is not converted"
            )
        return resolve_deep(value, deep)
    if deep and has_varying(value, deep):
        if _is_tuple(kind):
            items = (resolve_deep(v, deep - 1) for v in value)
            return tuple(items) if kind is tuple else value._make(items)
        if thread.diverged:
            thread.note(slot_of(value))
        if kind is list:
            value[:] = [resolve_deep(v, deep - 1) for v in value]
        elif kind is dict:
            value.update({k: resolve_deep(v, deep - 1) for k, v in value.items()})
    return value


join._make_varying = Varying
__all__ = [
    "Varying",
    "make_kinds_error",
    "resolve_deep",
    "resolve_varying",
    "unify_varying",
    "has_varying",
    "find_uniform_sets",
]
