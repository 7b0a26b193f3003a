"""The values of a program that is being recorded, and the tensors that they stand for."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forall._compat.lazy_bits import is_zero_tensor
from forall._compat.private_api import StorageWeakRef
from forall._compat.storage import get_storage_id, has_memory
from forall._jit.graph import Layout, Value

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


@dataclass(slots=True)
class TraceNotes:
    """The notes on a recorded call besides its operators."""

    writes_unsaid: bool = False  # True after a write that no version counter or schema shows
    makes_leaves: bool = False  # a result's history may end in a tensor of the function's own
    makes_hooks: bool = False  # True after the call has registered hooks for backward
    tells: bool = False  # True after Python read more of a tensor than the cache key has
    chooses: bool = False  # True after an operator for which torch chooses among kernels
    communicates: bool = False  # True after a message between ranks


class TracedValues:
    """The values so far by number; a tensor is found by identity, or by storage and layout.

    ``known`` are tensors that the function captures in sight of the guards.
    """

    def __init__(self, known: dict[int, torch.Tensor]) -> None:
        self.known = known
        self.values: list[Value] = []
        self.inputs: list[int] = []  # these come first
        self.captured: dict[int, torch.Tensor] = {}
        self.constants: dict[int, torch.Tensor] = {}  # made of Python's numbers
        self.aliases: set[int] = set()  # results that were given a value of their own
        self._numbers: dict[int, int] = {}  # values by the id of a tensor, while that lives
        self._tensors: list[weakref.ref] = []
        # The first value of each layout in a storage, as long as the storage lives.
        self._in_memory: dict[int, tuple[Any, dict[Layout, int]]] = {}
        self._known_at: dict[tuple[int, Layout], list[torch.Tensor]] = {}
        for t in known.values():
            if has_memory(t):
                self._known_at.setdefault((get_storage_id(t), Layout.from_tensor(t)), []).append(t)

    def add_inputs(self, inputs: Sequence[torch.Tensor]) -> None:
        """Enter the arguments of the call."""
        self.inputs += [self.add(t) for t in inputs]

    def add_constant(self, t: torch.Tensor) -> None:
        """Enter a tensor that is the same in each call."""
        self.constants[self.add(t)] = t.clone()

    def is_from_outside(self, t: torch.Tensor) -> bool:
        """True if a tensor was there before the call, or its origin is unknown."""
        n = self.find(t) if has_memory(t) else -1
        return n is None or 0 <= n < len(self.inputs) or n in self.captured

    def get_tensor(self, n: int) -> torch.Tensor | None:
        """The tensor of a value, None if it does not live any more."""
        return self._tensors[n]()

    def find(self, t: torch.Tensor) -> int | None:
        """The number of a tensor's value, None if the tensor's origin is unknown."""
        n = self._numbers.get(id(t))
        if n is not None and self._tensors[n]() is t:
            return n
        return self._add_captured(t) if id(t) in self.known else self._find_alias(t)

    def _find_alias(self, t: torch.Tensor) -> int | None:
        """The value of a tensor that torch or a level made as an alias, which no mode sees.

        Several tensors may have that storage and layout. To the program they are one value, but not
        to autograd: the alias may be of any captured tensor that requires grad. So all of these are
        entered in the program.
        """
        place, layout = get_storage_id(t), Layout.from_tensor(t)
        found = self.find_in_storage(place).get(layout)
        for known in self._known_at.get((place, layout), ()):
            if found is None or known.requires_grad:
                n = self._add_captured(known)
                found = n if found is None else found
        return found

    def find_in_storage(self, place: int) -> dict[Layout, int]:
        """The values in a storage by layout, none if the storage was freed."""
        held, numbers = self._in_memory.get(place, (None, {}))
        return {} if held is None or held.expired() else numbers

    def _add_captured(self, t: torch.Tensor) -> int:
        n = self._numbers.get(id(t))
        if n is None or self._tensors[n]() is not t:
            n = self.add(t)
            self.captured[n] = t
        return n

    def add(self, t: torch.Tensor, root: int | None = None) -> int:
        """Enter a tensor as a value; ``root`` is the value whose memory it has, if not its own."""
        n = len(self.values)
        layout = Layout.from_tensor(t)
        self.values.append(Value(layout, n if root is None else root, is_zero_tensor(t)))
        self._numbers[id(t)] = n
        self._tensors.append(weakref.ref(t))
        place = get_storage_id(t)
        held, numbers = self._in_memory.get(place, (None, {}))
        if held is None or held.expired():
            held, numbers = StorageWeakRef(t.untyped_storage()), {}
            self._in_memory[place] = held, numbers
        numbers.setdefault(layout, n)
        return n
