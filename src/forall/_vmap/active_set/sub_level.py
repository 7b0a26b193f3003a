"""Sub-levels: levels of some of another's examples, which act while examples diverge.

NOTE [parts]
    Where examples diverge, a `SubLevel` acts in the place of its level, the *root*. It is
    a level of its own with the rows of some examples, so the rules need no change. A tensor made
    for more examples is restricted to those that run where an API call takes it (`narrow`), before
    autograd sees an operator. Tensors of sub-levels become one of their union by `merged`. Both
    are recorded.

    The derivative of `narrow` is the cotangent as it is: of some examples only. It goes on through
    the graph of the wider value, and what its formulas saved there is cut to its examples when
    both meet (`meet`). Where two cotangents add up, their examples unite, zero where one has none.
    So a derivative is computed for the examples that want it, and no inf or nan of another gets
    into it. An operand below autograd is thus either a factor, which is cut, or a summand, which
    is completed with zeros (`backward.SUMS`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch

from forall._compat.bitset import make_full_set, to_flags, to_int
from forall._compat.dispatch_state import functions_off, no_dispatch
from forall._vmap.vmap_level import VmapLevel

if TYPE_CHECKING:
    pass

Tensor = torch.Tensor


class SubLevel(VmapLevel):
    """A sub-level, of some of a root's examples: ``members`` has a bit for each (`bitset`).

    See NOTE [parts]. `merge` defines ``restrict_value``, and sets it here.
    """

    root: Any = None  # pyright: ignore[reportIncompatibleMethodOverride]

    def __init__(self, root: VmapLevel, members: int, size: int) -> None:
        # Never a mode of its own: the root's mode asks who acts.
        self.of = self.root = root
        self.members = members
        self.size = size
        self.number, self.room, self.around = root.number, root.room, root.around
        self.calls, self.applies_updates = root.calls, False
        self.randomness, self.scope, self.mutation_log = (
            root.randomness,
            root.scope,
            root.mutation_log,
        )
        self.records_values = self.records_on_value = False
        self.shares = self.parts = True
        self.outer_grad = root.outer_grad
        self.counted, self.met = None, []
        self.parted = None
        self.order = self._flags = self._rows = None
        self.born: tuple[Any, Tensor] | None = None  # level and test: where that did not hold
        self.half: Any = None  # the level that was split, in a tuple that both halves share
        self._near: tuple[Any, Tensor] | None = None  # `born`, once it was evaluated
        self._places: WeakKeyDictionary[Any, Tensor] | None = None

    @property
    def flags(self) -> Tensor:
        """(root size,): True for the examples of the root that are among these."""
        if self._flags is None:
            with no_dispatch(), functions_off():
                self._flags = to_flags(self.members, self.of.size)
        return self._flags

    @property
    def rows(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The numbers in the root of these examples, ascending."""
        if self._rows is None:
            self._rows = self._find_rows()
        return self._rows

    def _find_rows(self) -> Tensor:
        if self.born is not None:
            level, places = self.born[0], self._find_positions()
            if level is self.of:
                return places
            rows = level.rows
            with no_dispatch(), functions_off():
                return rows.index_select(0, places)
        near = self._near and self._near[0]()
        if self._near is not None and near is not None:
            places = self._near[1]
            if near is self.of:
                return places
            rows = near.rows
            with no_dispatch(), functions_off():
                return rows.index_select(0, places)
        flags = self.flags
        with no_dispatch(), functions_off():
            return flags.nonzero().view(-1)

    def _find_positions(self) -> Tensor:
        """The positions of these examples in the level of `born`, which is held no longer."""
        assert self.born is not None  # noqa: S101 - who asks knows
        level, test = self.born
        self.born = None
        with no_dispatch(), functions_off():
            places = (~test).nonzero().view(-1)
        self._near = ref(level), places
        return places

    def has_unknown_rows(self) -> bool:
        """True if nothing says yet which examples these are in their level."""
        return self.born is None and self._near is None and self._rows is None

    def find_positions_in(self, level: Any) -> Tensor:
        """The positions of these examples in ``level``, which has all of them."""
        if self.born is not None and self.born[0] is level:
            return self._find_positions()
        if self._near is not None and self._near[0]() is level:
            return self._near[1]
        if self._places is None:
            self._places = WeakKeyDictionary()
        found = self._places.get(level)
        if found is None:
            flags, rows = self.flags, level.rows
            with no_dispatch(), functions_off():
                found = self._places[level] = flags.index_select(0, rows).nonzero().view(-1)
        return found

    @property
    def acting_level(self) -> Any:
        return self.of.acting_level

    @property
    def parent(self) -> Any:
        return self.of.parent

    @property
    def active(self) -> bool:
        return self.of.active

    @property
    def lift_cache(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.of.lift_cache

    @property
    def logs_writes(self) -> bool:
        return self.of.logs_writes

    @property
    def origin(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        whole = self.of.origin
        numbers = whole.numbers
        return whole._replace(numbers=[numbers[n] for n in self.rows.tolist()])


def get_sub_level(root: Any, members: int, size: int | None = None) -> Any:
    """The level of these examples: the root itself for all, None for none, else a sub-level."""
    if members == root.members:
        return root
    if not members:
        return None
    found = root.sub_levels.get(members)
    if found is None:
        size = members.bit_count() if size is None else size
        found = root.sub_levels[members] = SubLevel(root, members, size)
    return found


def prepare_root(root: Any) -> None:
    """Give a level the bit set and the row numbers that its sub-levels are found by."""
    if root.members is None:
        with no_dispatch(), functions_off():
            root.rows = torch.arange(root.size)
        root.members, root.order = make_full_set(root.size), None


def split_by_test(level: Any, test: Tensor) -> tuple[Any, Any]:
    """Sub-levels of the examples for which a test (n,) holds and does not; None for none."""
    root = level.root
    with no_dispatch(), functions_off():
        if not test.is_cpu:
            test = test.cpu()
        places = test.nonzero().view(-1)
        count = len(places)
        if not count:
            return None, level
        if count == level.size:
            return level, None
        prepare_root(root)
        flags = test
        if level is not root:
            flags = torch.zeros(root.size, dtype=torch.bool).index_copy_(0, level.rows, test)
        members = to_int(flags)
    yes = get_sub_level(root, members, count)
    no = get_sub_level(root, level.members ^ members, level.size - count)
    yes.half = no.half = (ref(level),)
    if yes.has_unknown_rows():
        yes._near = ref(level), places
    if no.has_unknown_rows():
        no.born = level, test
    return yes, no


def select_sub_level(level: Any, numbers: list[int]) -> Any:
    """The sub-level of the examples that have these numbers in ``level``."""
    prepare_root(level.root)
    with no_dispatch(), functions_off():
        flags = torch.zeros(level.root.size, dtype=torch.bool)
        flags[level.rows[numbers]] = True
        return get_sub_level(level.root, to_int(flags))


def find_positions_in(some: Any, level: Any) -> Tensor:
    """The positions of the examples of ``some`` in ``level``, which has all of them."""
    return some.rows if level is level.root else some.find_positions_in(level)


def covers_examples(level: Any, some: Any) -> bool:
    """True if all examples of ``some`` are among those of ``level``."""
    if level is some or level is level.root:
        return True
    if some is not some.root and some.born is not None and some.born[0] is level:
        return True
    return not some.members & ~level.members


def unite_examples(first: Any, *others: Any) -> Any:
    """The sub-level with the examples of all of these."""
    if all(other is first for other in others):
        return first
    if len(others) == 1 and first is not first.root and first.half is not None:
        whole = first.half[0]()
        if whole is not None and getattr(others[0], "half", None) is first.half:
            return whole
    members = first.members
    for other in others:
        members |= other.members
    return get_sub_level(first.root, members)


def subtract_examples(level: Any, some: Any) -> Any | None:
    """The sub-level with the examples of ``level`` that ``some`` lacks; None if there are none."""
    return None if level is some else get_sub_level(level.root, level.members & ~some.members)


def intersect_examples(a: Any, b: Any) -> Any | None:
    """The sub-level with the examples that are in both; None where there are none."""
    return a if a is b else get_sub_level(a.root, a.members & b.members)
