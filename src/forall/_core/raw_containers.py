"""Containers read by the methods of their builtin class, without a subclass's overrides.

An override may have side effects when a container is only inspected: it may count, load, or raise
(a tuple whose length is an error).
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_DICTS = (OrderedDict, defaultdict, dict)
_IN_C = frozenset({*_DICTS, MappingProxyType, list, tuple, deque, bytearray, set, frozenset})


def view_raw_container(value: Any) -> Any:
    """Return a view of a container without overrides: itself if its class is a builtin one."""
    return value if type(value) in _IN_C else RawContainer(value)


class RawContainer:
    """A container of a user's class, read and written by the methods of its builtin base."""

    __slots__ = ("kind", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.kind: Any = next(kind for kind in type(value).__mro__ if kind in _IN_C)

    def __len__(self) -> int:
        return self.kind.__len__(self.value)

    def __iter__(self) -> Iterator[Any]:
        return self.kind.__iter__(self.value)

    def __getitem__(self, key: Any) -> Any:
        return self.kind.__getitem__(self.value, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.kind.__setitem__(self.value, key, value)

    def values(self) -> Iterable[Any]:
        return self.kind.values(self.value)

    def items(self) -> Iterable[tuple[Any, Any]]:
        return self.kind.items(self.value)

    def clear(self) -> None:
        self.kind.clear(self.value)

    def extend(self, values: Iterable[Any]) -> None:
        self.kind.extend(self.value, values)

    def update(self, values: Any) -> None:
        self.kind.update(self.value, values)

    def copy(self) -> Any:
        """Return a builtin container with the same contents."""
        if self.kind in _DICTS:
            return dict(zip(self, self.values(), strict=True))
        return self.kind(self)

    def replace_contents(self, copy: Any) -> None:
        """Replace the contents by those of ``copy``."""
        self.clear()
        (self.extend if hasattr(self.kind, "extend") else self.update)(copy)
