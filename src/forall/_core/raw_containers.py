"""Containers as their classes in C have them, past the methods that a user's class may add.

Those may do anything when they are asked by somebody who only looks: count, load, or give nothing
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


def bare(value: Any) -> Any:
    """A container of any class, to be looked at: itself where nothing can be in the way."""
    return value if type(value) in _IN_C else Bare(value)


class Bare:
    """A container of a class of the user's."""

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
        """What it holds, in a container of Python's own."""
        if self.kind in _DICTS:
            return dict(zip(self, self.values(), strict=True))
        return self.kind(self)

    def become(self, copy: Any) -> None:
        """Hold what a copy holds."""
        self.clear()
        (self.extend if hasattr(self.kind, "extend") else self.update)(copy)
