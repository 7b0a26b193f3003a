"""Which examples run now: the words that code knows who lets examples part and meet again."""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, Any

import torch

from forall._batching.merging import Undefined, is_stale, merged, narrow
from forall._batching.narrowing import forget, kept
from forall._batching.parting import answers, number
from forall._batching.parts import common, halves, union, without
from forall._batching.questions import heard
from forall._core.errors import data_dependent
from forall._core.levels import act, stack, top
from forall._torch.dispatch import functions_off, no_dispatch
from forall._torch.wrapper import Wrapper

if TYPE_CHECKING:
    from collections.abc import Iterator

Tensor = torch.Tensor
__all__ = ["Undefined", "World", "asked", "differs", "joined", "now", "one_of", "running"]


class World:
    """The examples that run: of each level whose examples have parted, which part."""

    __slots__ = ("parts",)

    def __init__(self, parts: dict[Any, Any]) -> None:
        self.parts = {root: level for root, level in parts.items() if level is not root}

    @property
    def size(self) -> int:
        """How many examples run, of the levels that have parted."""
        size = 1
        for level in self.parts.values():
            size *= level.size
        return size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, World) and self.parts == other.parts

    def __hash__(self) -> int:
        return hash(frozenset(self.parts.values()))

    def _one(self, other: World) -> Any:
        """The one root in whose examples two worlds differ."""
        roots = [r for r in {**self.parts, **other.parts} if self.of(r) is not other.of(r)]
        if len(roots) > 1:
            raise Apart
        return roots[0] if roots else None

    def of(self, root: Any) -> Any:
        return self.parts.get(root, root)

    def __or__(self, other: World) -> World:
        root = self._one(other)
        if root is None:
            return self
        return World({**self.parts, root: union(self.of(root), other.of(root))})

    def __sub__(self, other: World) -> World | None:
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


class Apart(BaseException):
    """Examples of two levels have parted in a way that no level's part says."""


def _roots() -> Iterator[Any]:
    level: Any = top()
    while level is not None:
        yield level.root
        level = level.parent


def now() -> World:
    """The examples that run in this thread."""
    if not stack.parted:
        return World({})
    return World({root: root.acting for root in _roots()})


def asked(test: Any) -> bool | tuple[World, World]:
    """bool(test) of the examples that run; where they differ, those that say yes and no."""
    if not isinstance(test, Tensor):
        test = getattr(test, "tensor", test)  # of the Python numbers of all examples
    if not isinstance(test, Wrapper) or test.numel() != 1:
        return bool(test)
    with functions_off():
        if stack.parted and is_stale(test):
            test = narrow(test)
        if test.dtype is not torch.bool:
            test = test.detach() != 0
    values, levels = answers(test)
    if not values.numel():
        return bool(test)
    with no_dispatch(), functions_off():
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
        return bool(test)  # which complains
    if len(levels) > 1:
        raise Apart
    world, root = now().parts, levels[0].root
    yes, no = halves(levels[0], values)
    return World({**world, root: yes}), World({**world, root: no})


def question(test: Any) -> bool | tuple[World, World]:
    """`asked` by code of the user's, which may be heard."""
    if stack.listening and (isinstance(test, Wrapper) or hasattr(test, "tensor")):
        heard()
    return asked(test)


class running:
    """Only the examples of a world run in the body."""

    __slots__ = ("kept", "was", "world")

    def __init__(self, world: World) -> None:
        self.world = world

    def __enter__(self) -> None:
        self.was = [
            (root, root.acting) for root in _roots() if self.world.of(root) is not root.acting
        ]
        for root, _ in self.was:
            act(root, self.world.of(root))
        if self.was:
            self.kept, kept.found = kept.found, {}

    def __exit__(self, *_: object) -> None:
        for root, level in self.was:
            act(root, level)
        if self.was:
            found, kept.found = kept.found, self.kept
            forget(found or {})


def joined(parts: list[tuple[World, Tensor]]) -> Tensor:
    """One tensor of those of some worlds together, who have one each."""
    while len(parts) > 1:
        alike = _one_level_apart(parts)
        root = alike[0][0]._one(alike[1][0])
        whole = functools.reduce(operator.or_, [world for world, _ in alike])
        with running(whole):
            tensors = [(world.of(root), _for(world, t)) for world, t in alike]
            tensor = merged(tensors, whole.of(root))
        done = {id(world) for world, _ in alike}
        parts = [(whole, tensor), *(p for p in parts if id(p[0]) not in done)]
    return parts[0][1]


def _one_level_apart(parts: list[tuple[World, Tensor]]) -> list[tuple[World, Tensor]]:
    """Of some worlds, at least two that differ in the examples of one level alone."""
    for root in dict.fromkeys(root for world, _ in parts for root in world.parts):
        found: dict[World, list] = {}
        for world, t in parts:
            rest = World({**world.parts, root: root})
            found.setdefault(rest, []).append((world, t))
        for alike in found.values():
            if len(alike) > 1:
                return alike
    raise Apart


def _for(world: World, t: Tensor) -> Tensor:
    """A tensor, perhaps of more examples, for those of a world."""
    with running(world):
        return narrow(t) if is_stale(t) else t


def one_of(t: Tensor) -> Any:
    """The Python number of all examples that run; where they differ, they run again in groups."""
    return number(t, lambda: data_dependent("a number", "Use a tensor instead of the number."))


def differs(value: Any) -> bool:
    """Whether a tensor has a value for each of the examples that run."""
    return isinstance(value, Tensor) and bool(answers(value)[1])
