"""Sets of examples of one root level, with their positions in the wider sets they are part of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch

from forall._compat.bitset import to_flags
from forall._compat.dispatch_state import functions_off, no_dispatch

if TYPE_CHECKING:
    from forall._compat.call_site import SourceLine

Tensor = torch.Tensor


class ExampleSet:
    """Some of the examples of a root level: ``members`` has a bit for each (`bitset`).

    ``whole`` is the set of all of the root's examples, None for that set itself. Tensors that tell
    which examples these are get computed when they are first asked for.
    """

    def __init__(self, members: int, size: int, whole: ExampleSet | None) -> None:
        self.members, self.size, self.whole = members, size, whole
        # The level that was split into two, in a tuple that both halves share.
        self.split_from: tuple[ref[Any]] | None = None
        self.split_at: SourceLine | None = None  # the user's test, if the axis has a name
        self.part_order: tuple[list[int], Tensor] | None = None  # see `merge`
        # A wider set and a test of its examples: these are where the test does not hold.
        self._rest_of: tuple[ExampleSet, Tensor] | None = None
        self._in_wider: tuple[ref[ExampleSet], Tensor] | None = None  # `_rest_of`, once evaluated
        self._in_others: WeakKeyDictionary[ExampleSet, Tensor] | None = None
        self._flags = self._rows = None

    @property
    def flags(self) -> Tensor:
        """(root size,): True for the examples of the root that are among these."""
        if self._flags is None:
            with no_dispatch(), functions_off():
                self._flags = to_flags(self.members, (self.whole or self).size)
        return self._flags

    @property
    def rows(self) -> Tensor:
        """The numbers in the root of these examples, ascending."""
        if self._rows is None:
            self._rows = self._find_rows()
        return self._rows

    def _find_rows(self) -> Tensor:
        if self.whole is None:
            with no_dispatch(), functions_off():
                return torch.arange(self.size)
        wider = self._rest_of[0] if self._rest_of is not None else None
        if wider is None and self._in_wider is not None:
            wider = self._in_wider[0]()
        if wider is None:
            flags = self.flags
            with no_dispatch(), functions_off():
                return flags.nonzero().view(-1)
        positions = self.find_positions_in(wider)
        if wider.whole is None:
            return positions
        rows = wider.rows
        with no_dispatch(), functions_off():
            return rows.index_select(0, positions)

    def find_positions_in(self, wider: ExampleSet) -> Tensor:
        """Return the positions of these examples in ``wider``, which has all of them."""
        if self._rest_of is not None and self._rest_of[0] is wider:
            test, self._rest_of = self._rest_of[1], None
            with no_dispatch(), functions_off():
                self._in_wider = ref(wider), (~test).nonzero().view(-1)
        if self._in_wider is not None and self._in_wider[0]() is wider:
            return self._in_wider[1]
        if wider.whole is None:
            return self.rows
        if self._in_others is None:
            self._in_others = WeakKeyDictionary()
        found = self._in_others.get(wider)
        if found is None:
            flags, rows = self.flags, wider.rows
            with no_dispatch(), functions_off():
                found = self._in_others[wider] = flags.index_select(0, rows).nonzero().view(-1)
        return found

    def covers(self, other: ExampleSet) -> bool:
        """Return True if all examples of ``other`` are among these."""
        if other._rest_of is not None and other._rest_of[0] is self:
            return True
        return not other.members & ~self.members

    def note_positions(self, wider: ExampleSet, positions: Tensor) -> None:
        """Note the positions of these examples in ``wider``, unless such a set is known."""
        if self._has_unknown_rows():
            self._in_wider = ref(wider), positions

    def note_rest(self, wider: ExampleSet, test: Tensor) -> None:
        """Note that these are the examples of ``wider`` for which a test (n,) does not hold."""
        if self._has_unknown_rows():
            self._rest_of = wider, test

    def _has_unknown_rows(self) -> bool:
        return self._rest_of is None and self._in_wider is None and self._rows is None
