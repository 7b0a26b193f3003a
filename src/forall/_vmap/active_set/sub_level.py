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

from typing import Any
from weakref import ref

import torch

from forall._compat.bitset import to_int
from forall._compat.call_site import find_users_line
from forall._compat.dispatch_state import functions_off, no_dispatch
from forall._vmap.active_set.example_set import ExampleSet
from forall._vmap.vmap_level import VmapLevel

Tensor = torch.Tensor


class SubLevel(VmapLevel):
    """A sub-level, of some of a root's examples. See NOTE [parts].

    `merge` defines ``restrict_value``, and sets it here.
    """

    root: Any = None  # pyright: ignore[reportIncompatibleMethodOverride]

    def __init__(self, root: VmapLevel, members: int, size: int) -> None:
        # Never a mode of its own: the root's mode asks who acts.
        self.root = root
        self.size = size
        self.examples = ExampleSet(members, size, root.examples)
        self.entry, self.lift_cache = root.entry, root.lift_cache
        self.config, self.state = root.config, root.state

    @property
    def acting_level(self) -> Any:
        return self.root.acting_level

    @property
    def parent(self) -> Any:
        return self.root.parent

    @property
    def axis(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.root.axis

    @property
    def active(self) -> bool:
        return self.root.active

    @property
    def origin(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        whole = self.root.origin
        numbers = whole.numbers
        return whole._replace(numbers=[numbers[n] for n in self.examples.rows.tolist()])


def get_sub_level(root: Any, members: int, size: int | None = None) -> Any:
    """The level of these examples: the root itself for all, None for none, else a sub-level."""
    if members == root.examples.members:
        return root
    if not members:
        return None
    found = root.sub_levels.get(members)
    if found is None:
        size = members.bit_count() if size is None else size
        found = root.sub_levels[members] = SubLevel(root, members, size)
    return found


def split_by_test(level: Any, test: Tensor) -> tuple[Any, Any]:
    """Sub-levels of the examples for which a test (n,) holds and does not; None for none."""
    root, own = level.root, level.examples
    with no_dispatch(), functions_off():
        if not test.is_cpu:
            test = test.cpu()
        places = test.nonzero().view(-1)
        count = len(places)
        if not count:
            return None, level
        if count == level.size:
            return level, None
        flags = test
        if level is not root:
            flags = torch.zeros(root.size, dtype=torch.bool).index_copy_(0, own.rows, test)
        members = to_int(flags)
    yes = get_sub_level(root, members, count)
    no = get_sub_level(root, own.members ^ members, level.size - count)
    yes.examples.split_from = no.examples.split_from = (ref(level),)
    yes.examples.note_positions(own, places)
    no.examples.note_rest(own, test)
    if root.axis is not None:
        yes.examples.split_at = no.examples.split_at = find_users_line()
    return yes, no


def select_sub_level(level: Any, numbers: list[int]) -> Any:
    """The sub-level of the examples that have these numbers in ``level``."""
    with no_dispatch(), functions_off():
        flags = torch.zeros(level.root.size, dtype=torch.bool)
        flags[level.examples.rows[numbers]] = True
        return get_sub_level(level.root, to_int(flags))


def covers_examples(level: Any, some: Any) -> bool:
    """True if all examples of ``some`` are among those of ``level``."""
    return level is some or level is level.root or level.examples.covers(some.examples)


def unite_examples(first: Any, *others: Any) -> Any:
    """The sub-level with the examples of all of these."""
    if all(other is first for other in others):
        return first
    sets = [other.examples for other in others]
    split_from = first.examples.split_from
    if len(sets) == 1 and split_from is not None and sets[0].split_from is split_from:
        whole = split_from[0]()
        if whole is not None:
            return whole
    members = first.examples.members
    for other in sets:
        members |= other.members
    return get_sub_level(first.root, members)


def subtract_examples(level: Any, some: Any) -> Any | None:
    """The sub-level with the examples of ``level`` that ``some`` lacks; None if there are none."""
    if level is some:
        return None
    return get_sub_level(level.root, level.examples.members & ~some.examples.members)


def intersect_examples(a: Any, b: Any) -> Any | None:
    """The sub-level with the examples that are in both; None where there are none."""
    return a if a is b else get_sub_level(a.root, a.examples.members & b.examples.members)
