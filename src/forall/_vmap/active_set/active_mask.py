"""The active set: which examples run now, for code that lets them diverge and reconverge."""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, Any

import torch

from forall._compat.dispatch_state import (
    dispatch_modes,
    forward_mode_runs,
    functions_off,
    no_dispatch,
)
from forall._compat.wrapper_tensor import Wrapper
from forall._core.divergence import Apart
from forall._core.errors import data_dependent
from forall._core.levels import act, stack, top
from forall._vmap.active_set.merge import (
    Undefined,
    cut,
    in_place_of,
    is_stale,
    layers,
    merged,
    narrow,
    two_united,
    united,
)
from forall._vmap.active_set.restrict_args import for_reading, forget, kept
from forall._vmap.active_set.sub_level import (
    common,
    covers,
    halves,
    union,
    without,
)
from forall._vmap.batched_tensor import Batched, Family, wrap
from forall._vmap.concretize import answers, number, truths
from forall._vmap.concretize_listeners import heard
from forall._vmap.function_mode import SHARING
from forall._vmap.mutation.mutation_log import note_read

if TYPE_CHECKING:
    from collections.abc import Iterator

Tensor = torch.Tensor
_SEVERAL = "a test on which the examples of several vmaps, one inside another, part at once"
__all__ = [
    "Apart",
    "Undefined",
    "World",
    "asked",
    "differs",
    "joined",
    "now",
    "one_of",
    "put",
    "renamed",
    "running",
    "told",
]


class World:
    """The active set: of each level whose examples have diverged, the sub-level that runs."""

    __slots__ = ("parts",)

    def __init__(self, parts: dict[Any, Any]) -> None:
        self.parts = {root: level for root, level in parts.items() if level is not root}

    @classmethod
    def alone(cls, level: Any) -> World:
        """The active set of a level that has no other level around it."""
        made = object.__new__(cls)
        root = level.root
        made.parts = {} if level is root else {root: level}
        return made

    @property
    def size(self) -> int:
        """The number of examples that run, of the levels that have diverged."""
        size = 1
        for level in self.parts.values():
            size *= level.size
        return size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, World) and self.parts == other.parts

    def __hash__(self) -> int:
        return hash(frozenset(self.parts.values()))

    def _one(self, other: World) -> Any:
        """The one root in whose examples two active sets differ; None if they are equal."""
        roots = [r for r in {**self.parts, **other.parts} if self.of(r) is not other.of(r)]
        if len(roots) > 1:
            raise Apart(_SEVERAL)
        return roots[0] if roots else None

    def of(self, root: Any) -> Any:
        return self.parts.get(root, root)

    def __or__(self, other: World) -> World:
        root = self._one(other)
        if root is None:
            return self
        return World({**self.parts, root: union(self.of(root), other.of(root))})

    def united(self, others: list[World]) -> World:
        """The examples of all of these active sets."""
        parts = [world.parts for world in others]
        if len(self.parts) == 1 and all(p.keys() == self.parts.keys() for p in parts):
            ((root, mine),) = self.parts.items()
            return World.alone(union(mine, *[p[root] for p in parts]))
        return functools.reduce(operator.or_, others, self)

    def __and__(self, other: World) -> World | None:
        """The examples of both; None where there are none."""
        root = self._one(other)
        if root is None:
            return self
        both = common(self.of(root), other.of(root))
        return None if both is None else World({**self.parts, root: both})

    def __sub__(self, other: World) -> World | None:
        """The examples that are not in the other; None where there are none."""
        root = self._one(other)
        if root is None:
            return None
        mine, theirs = self.of(root), other.of(root)
        both = common(mine, theirs)
        if both is None:
            return self
        left = without(mine, both)
        return None if left is None else World({**self.parts, root: left})

    def __repr__(self) -> str:
        return f"World({self.size} examples)" if self.parts else "World(all)"


def _roots() -> Iterator[Any]:
    level: Any = top()
    while level is not None:
        yield level.root
        level = level.parent


def now() -> World:
    """The active set of this thread."""
    level: Any = top()
    if not stack.parted:
        return World({})
    if level is not None and level.parent is None:
        return World.alone(level)
    return World({root: root.acting for root in _roots()})


def asked(test: Any) -> bool | tuple[World, World]:
    """Return bool(test), or the active sets of yes and no where the examples that run differ."""
    if not isinstance(test, Tensor):
        test = getattr(test, "tensor", test)  # of the Python numbers of all examples
    if not isinstance(test, Wrapper):
        return bool(test)
    with functions_off():
        if type(test) is Batched:
            sides = _of_one_level(test)
            if sides is not None:
                return _worlds(*sides) if type(sides) is tuple else sides
        found = _asked(test) if test.numel() == 1 else None
    return bool(test) if found is None else found


def _of_one_level(test: Batched) -> Any:
    """Evaluate a test of one level whose examples answer each for itself, a short way.

    Return the two sub-levels, or the one answer of all; None where it is another case.
    """
    level: Any = top()
    if level is None or level.parent is not None or not level.parts or test.axis is None:
        return None
    with no_dispatch():
        values = test.value if test.level is level else for_reading(test, level)
        if type(values) is not Tensor or not values.numel() == level.size > 0:
            return None
        if values.requires_grad:
            values = values.detach()
        if level.size == 1:
            return bool(values)
        if values.dim() != 1:
            values = values.reshape(-1)
        yes, no = halves(level, values if values.dtype is torch.bool else values != 0)
    return no is None if yes is None or no is None else (yes, no)


def _worlds(yes: Any, no: Any) -> tuple[World, World]:
    """The active sets of yes and no, of the one level whose examples run."""
    return World.alone(yes), World.alone(no)


def _asked(test: Any) -> bool | tuple[World, World] | None:
    """Evaluate a test of any tensor; None where the tensor itself has to answer, or to raise."""
    if stack.parted and is_stale(test):
        test = narrow(test)
    if test.dtype is not torch.bool:
        test = test.detach() != 0
    values, levels = answers(test)
    if not values.numel():
        return None
    with no_dispatch():
        values = values.reshape([level.size for level in levels])
        for axis in reversed(range(len(levels))):
            first = values.select(axis, 0)
            if levels[axis].size == 1 or torch.equal(
                values, first.unsqueeze(axis).expand_as(values)
            ):
                values = first
                del levels[axis]
        if not levels:
            return bool(values)
    if not all(level.parts for level in levels):
        return None
    if len(levels) > 1:
        raise Apart(_SEVERAL)
    world, root = now().parts, levels[0].root
    yes, no = halves(levels[0], values)
    return World({**world, root: yes}), World({**world, root: no})


def question(test: Any) -> bool | tuple[World, World]:
    """Evaluate a test of user code, and tell the listeners."""
    stack.asked = True
    if stack.listening:
        numbers = test if isinstance(test, Tensor) else getattr(test, "tensor", test)
        if isinstance(numbers, Wrapper):
            heard(truths(numbers))
    return asked(test)


class running:
    """Run the body for the examples of an active set alone."""

    __slots__ = ("kept", "was", "world")

    def __init__(self, world: World) -> None:
        self.world = world

    def __enter__(self) -> None:
        was = self.was = []
        level: Any = top()
        while level is not None:
            root, level = level.root, level.parent
            some, acting = self.world.parts.get(root, root), root.acting
            if some is not acting:
                was.append((root, acting))
        for root, _ in was:
            act(root, self.world.of(root))
        if was:
            self.kept, kept.found = kept.found, {}

    def __exit__(self, *_: object) -> None:
        for root, level in self.was:
            act(root, level)
        if self.was:
            found, kept.found = kept.found, self.kept
            forget(found or {})


def put(target: Tensor, value: Tensor, world: World) -> None:
    """Write the values that an active set has in one tensor into another, as the user would."""
    with running(world), SHARING:
        target.copy_(value)


def renamed(kind: type, memory: Family) -> Tensor:
    """A new tensor over all of this memory, where the former one is gone."""
    level = next((b.level for b in (known() for known in memory.members) if b is not None), None)
    if kind is not Batched or level is None:
        raise Apart("a tensor with other names was written to, and is no more")
    name = wrap(memory.value, memory.axis, level)
    name.family, name.older = memory, memory.older
    memory.add(name)
    return name


def joined(parts: list[tuple[World, Tensor]]) -> Tensor:
    """Join the tensors of some active sets, one each, into one tensor of their union."""
    with functions_off():
        found = _joined_at_once(parts)
    if found is not None:
        return found
    for _, t in parts:
        _note_read(t)
    while len(parts) > 1:
        alike = _one_level_apart(parts)
        root = alike[0][0]._one(alike[1][0])
        whole = alike[0][0].united([world for world, _ in alike[1:]])
        with running(whole):
            tensors = [(world.of(root), _for(world, t)) for world, t in alike]
            tensor = merged(tensors, whole.of(root))
        done = {id(world) for world, _ in alike}
        parts = [(whole, tensor), *(p for p in parts if id(p[0]) not in done)]
    return parts[0][1]


def _joined_at_once(parts: list[tuple[World, Tensor]]) -> Tensor | None:
    """Join values of one level's examples that have no derivative at stake; None in other cases."""
    level: Any = top()
    if level is None or level.parent is not None or dispatch_modes() != 1 or forward_mode_runs():
        return None
    root, found = level.root, []
    for world, t in parts:
        own = world.parts.get(root)
        if own is None or len(world.parts) > 1 or type(t) is not Batched or t.requires_grad:
            return None
        if t.axis is None or type(t.value) is not Tensor or t.value.requires_grad:
            return None
        if t.level.root is not root or not covers(t.level, own):
            return None
        found.append((own, t))
    whole = union(*(own for own, _ in found))
    with no_dispatch():
        values = [(own, t if t.level is own else cut(t, own)) for own, t in found]
        a, b = values[0][1], values[-1][1]
        if len(values) == 2 and a.dtype is b.dtype and a.shape == b.shape:
            return two_united(values, whole)
        return united(values, whole)


def _note_read(t: Tensor) -> None:
    """Log a read of a tensor from before the call, since the joined copy holds its values."""
    if not isinstance(t, Wrapper):
        note_read("the end of a branch", t)
    for b in layers(t):
        if type(b) is Batched and b.axis is None and b.older and b.level.notes:
            b.level.ledger.reads("the end of a branch", b)


def told(parts: list[tuple[World, Any]], dtype: torch.dtype) -> Tensor:
    """Join the Python numbers of some active sets into one tensor (0-d)."""
    with functions_off():
        level: Any = top()
        alone = level is not None and level.parent is None
        if not alone or any(len(world.parts) != 1 for world, _ in parts):
            with no_dispatch():
                tensors = [torch.tensor(n, dtype=dtype) for _, n in parts]
            return joined([(w, t) for (w, _), t in zip(parts, tensors, strict=True)])
        owners = [world.parts[level.root] for world, _ in parts]
        with no_dispatch():
            numbers = torch.tensor([n for _, n in parts], dtype=dtype)
            counts = torch.tensor([some.size for some in owners])
            return in_place_of(owners, numbers.repeat_interleave(counts), union(*owners))


def _one_level_apart(parts: list[tuple[World, Tensor]]) -> list[tuple[World, Tensor]]:
    """Find at least two active sets that differ in the examples of one level alone."""
    for root in dict.fromkeys(root for world, _ in parts for root in world.parts):
        found: dict[World, list] = {}
        for world, t in parts:
            rest = World({**world.parts, root: root})
            found.setdefault(rest, []).append((world, t))
        for alike in found.values():
            if len(alike) > 1:
                return alike
    raise Apart(_SEVERAL)


def _for(world: World, t: Tensor) -> Tensor:
    """Restrict a tensor, perhaps of more examples, to an active set."""
    with running(world):
        return narrow(t) if is_stale(t) else t


def one_of(t: Tensor) -> Any:
    """The Python number of all examples that run; where they differ, they run again in groups."""
    return number(t, lambda: data_dependent("a number", "Use a tensor instead of the number."))


def differs(value: Any) -> bool:
    """True if a tensor has a value for each of the examples that run."""
    return isinstance(value, Tensor) and bool(answers(value)[1])
