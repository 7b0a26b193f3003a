"""The stack of active transforms, and how a tensor from outside is brought up to one.

NOTE [inside and outside]
    A level is *outside* another if it is active and was entered before it. Every other level is
    *inside*: deeper ones, but also those that have ended and act again because a backward pass
    runs through what they recorded. Such a pass carries the running level's values as cotangents
    into the ended level's operators, so there the ended level wraps the running one.
"""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING

import torch

from forall._torch.dispatch import plain_alias
from forall._torch.wrapper import Wrapper

if TYPE_CHECKING:
    from collections.abc import Iterable

_numbers = itertools.count(1)


class Level:
    """One active transform. Subclasses say how a tensor from outside becomes a value of theirs."""

    def __init__(self, parent: Level | None) -> None:
        self.parent = parent
        self.number = next(_numbers)
        self.active = False
        self.lifted: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def share(self, tensor: torch.Tensor) -> torch.Tensor:
        """This level's stand-in for ``tensor``, a value of the level just outside."""
        raise NotImplementedError

    def is_outside(self, other: Level) -> bool:
        """See NOTE [inside and outside]."""
        return self.active and self.number < other.number


class _Stack(threading.local):
    top: Level | None = None


stack = _Stack()


def top() -> Level | None:
    """The innermost active level of this thread."""
    return stack.top


class entered:
    """A level is active while its transform runs the user's function."""

    __slots__ = ("level", "previous")

    def __init__(self, level: Level) -> None:
        self.level = level

    def __enter__(self) -> Level:
        self.previous = stack.top
        self.level.active = True
        stack.top = self.level
        return self.level

    def __exit__(self, *_: object) -> None:
        stack.top = self.previous
        self.level.active = False
        self.level.lifted.clear()


def innermost(levels: Iterable[Level]) -> Level:
    """The level that acts first on an operator that meets values of all of these."""
    it = iter(levels)
    best = next(it)
    for level in it:
        if best.is_outside(level) or (
            best.active == level.active and best.number < level.number
        ):
            best = level
    return best


def level_of(tensor: torch.Tensor) -> Level | None:
    """The level a tensor belongs to; None for an ordinary one."""
    return tensor.level if isinstance(tensor, Wrapper) else None


def is_from_outside(tensor: torch.Tensor, level: Level) -> bool:
    """Whether ``tensor`` was there before ``level``: an ordinary tensor or an outer level's."""
    own = level_of(tensor)
    return own is None or (own is not level and own.is_outside(level))


def lift(tensor: torch.Tensor, level: Level | None) -> torch.Tensor:
    """``tensor`` as a value of ``level``, through every level in between, once per level.

    In between matters: a tensor that requires grad must be recorded by each level's own
    autograd graph on the way, or a derivative taken further out would miss it.
    """
    if level is None or not is_from_outside(tensor, level):
        return tensor
    found = level.lifted.get(id(tensor))
    if found is None:
        lifted = level.share(lift(tensor, level.parent))
        if not level.active:  # acting again after its end: nothing will clear the cache
            return lifted
        found = level.lifted[id(tensor)] = (tensor, lifted)
    return found[1]


def graph_free(tensor: torch.Tensor) -> torch.Tensor:
    """A second name for ``tensor`` without autograd history, tangents kept.

    ``detach`` would cut tangents, and under a level it would run its operators.
    """
    if isinstance(tensor, Wrapper):
        return tensor.graph_free()
    if not tensor.requires_grad and tensor.grad_fn is None:
        return tensor
    return plain_alias(tensor)
