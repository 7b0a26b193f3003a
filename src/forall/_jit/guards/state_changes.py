"""The words for a change of Python's state: what changed, by the names of the user's code.

Objects are compared as the guards compare them, and told of by name or by class: no `repr` of the
user's runs.
"""

from __future__ import annotations

from types import FunctionType, MappingProxyType
from typing import TYPE_CHECKING, Any

from forall._core.python_state import UNSET, WeakBox
from forall._core.reachable import RawContainer
from forall._jit.guards.codegen import are_all_same
from forall._jit.guards.leaves import read_buffer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from forall._jit.guards.codegen import WatchedState

_MOST_STEPS = 8  # from an object to the name that leads to it


def describe_change(state: WatchedState) -> str | None:
    """Return what changed first, as in "the list log"; None if nothing is found.

    This compares all that is watched, row by row, so it is for guards that do not hold.
    """
    try:
        return next(_iter_changes(state, _Paths(state)), None)
    except Exception:  # noqa: BLE001 - an attribute of the user's may raise
        return None


def _iter_changes(state: WatchedState, paths: _Paths) -> Iterator[str]:
    for entries, known in state.lists:
        if not _holds_as_before(entries, known):
            yield paths.describe_container(entries)
    for names, keys, values in state.dicts:
        if not _holds_as_before([*names, *names.values()], (*keys, *values)):
            yield paths.describe_container(names)
    for names, name, value in state.names:
        if not _holds_as_before([names.get(name, UNSET)], [value]):
            yield paths.describe_name(names, name)
    for names, missing in state.missing:
        for name in sorted(missing & names.keys()):
            yield paths.describe_name(names, name)
    for thing, name, value in state.attributes:
        if not _holds_as_before([_get_attribute(thing, name)], [value]):
            yield paths.describe_attribute(thing, name)
    for thing, name, value in state.of_weakly:
        if not _holds_as_before([vars(thing.of()).get(name, UNSET)], [value]):
            yield paths.describe_attribute(thing.of(), name)
    for value, known in state.data:
        if read_buffer(value) != known:
            yield paths.describe_container(value)


class _Paths:
    """The ways from names of the user's to the objects that are watched, as code writes them."""

    def __init__(self, state: WatchedState) -> None:
        # By an object's id: its holder (None for a global or a variable) and the step from there.
        self._holders: dict[int, tuple[Any, str]] = {}
        self._states = {
            id(value): thing for thing, name, value in state.attributes if name == "__dict__"
        }
        for thing, name, value in state.attributes:
            if name == "__code__" and isinstance(thing, FunctionType):
                cells = zip(value.co_freevars, thing.__closure__ or (), strict=True)
                self._holders |= {id(cell): (None, variable) for variable, cell in cells}
        self._holders |= {key: (thing, "") for key, thing in self._states.items()}
        for names, name, value in state.names:
            self._holders.setdefault(id(value), self._find_step(names, name))
        for thing, name, value in state.attributes:
            if name == "cell_contents" or name[:2] != "__":
                step = "" if name == "cell_contents" else f".{name}"
                self._holders.setdefault(id(value), (thing, step))
        for thing, name, value in state.of_weakly:
            self._holders.setdefault(id(value), (thing.of(), f".{name}"))
        for names, keys, values in state.dicts:
            for key, value in zip(keys, values, strict=True):
                step = f"[{key!r}]" if type(key) in (str, int) else "[..]"
                self._holders.setdefault(id(value), (_get_container(names), step))
        for entries, known in state.lists:
            for i, value in enumerate(known):
                self._holders.setdefault(id(value), (_get_container(entries), f"[{i}]"))

    def _find_step(self, names: Any, name: str) -> tuple[Any, str]:
        """Return what a namespace belongs to, with the step to a name in it."""
        return (names, f".{name}") if id(names) in self._holders else (None, name)

    def _find_path(self, value: Any, path: str = "") -> str:
        """Return the way to an object, or to what ``path`` leads to from there; "" if unknown."""
        for _ in range(_MOST_STEPS):
            if value is None or id(value) not in self._holders:
                break
            value, step = self._holders[id(value)]
            path = step + path
        if value is None or not path:
            return path
        return f"{path} of a {type(value).__name__}"

    def describe_container(self, container: Any) -> str:
        value = _get_container(container)
        if type(value) is MappingProxyType:
            return "an attribute of a class"
        path = self._find_path(value)
        if id(value) in self._states:
            return f"an attribute of {path or f'a {type(self._states[id(value)]).__name__}'}"
        return f"the {type(value).__name__} {path}" if path else f"a {type(value).__name__}"

    def describe_name(self, names: Any, name: str) -> str:
        holder, step = self._find_step(names, name)
        if holder is None:
            return f"the global {name}"
        return f"the attribute {self._find_path(holder, step)}"

    def describe_attribute(self, thing: Any, name: str) -> str:
        if name != "cell_contents":
            return f"the attribute {self._find_path(thing, f'.{name}')}"
        return f"the variable {self._find_path(thing)}".rstrip()


def _holds_as_before(now: Iterable[Any], known: Sequence[Any]) -> bool:
    now = [*now]
    return len(now) == len(known) and are_all_same(now, known)


def _get_container(value: Any) -> Any:
    return value.value if type(value) is RawContainer else value


def _get_attribute(thing: Any, name: str) -> Any:
    """Return an attribute, UNSET if there is none: the content of an empty cell, for example."""
    try:
        return getattr(thing.of() if type(thing) is WeakBox else thing, name)
    except (AttributeError, ValueError):
        return UNSET
