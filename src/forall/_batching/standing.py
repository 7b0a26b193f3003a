"""What the loop has as a view and we as a copy: ``x[i]`` with an i of each example.

Written to, the copy is put back into x. Where x changes under another name, the copy follows,
after the call that changed it and in that call's grad mode, so its derivative is that of what x
holds by then; a backward pass that needs what it held before meets torch's own version check.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch

from forall._batching.batched import Batched, Family
from forall._torch.dispatch import functions_off
from forall._torch.names import version
from forall._torch.wrapper import Wrapper

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten


class _Rows(threading.local):
    """The holders of copies that live; None where there are none, to be quick to ask."""

    found: list[weakref.ref] | None = None


rows = _Rows()


def _holder(x: Any) -> Any:
    """What knows whether x, or what x is a view of, stands for a view of something else."""
    if type(x) is Batched:
        return x.family
    if not isinstance(x, Wrapper):
        return None
    with functions_off():
        base = x._base
    return x if base is None else base


def stands(x: Any) -> Standing | None:
    """The copy that x is a part of, if it is one that stands for a view."""
    holder = _holder(x)
    return None if holder is None else holder.stands


class Standing:
    """One copy, and the places of x that it is of."""

    __slots__ = ("picked", "places", "version", "x")

    def __init__(self, picked: Wrapper, x: torch.Tensor, places: list) -> None:
        self.picked = picked
        self.places = places
        self.x = x
        self.version = version(x)

    def put_back(self) -> None:
        reach(self.x, lambda: aten.index_put_.default(self.x, self.places, self.picked))
        self.version = version(self.x)

    def follow(self) -> None:
        now = version(self.x)
        if (now == self.version and now >= 0) or not self.follows():
            return
        self.version = now
        self.alone(lambda: aten.copy_.default(self.picked, self.current()))

    def follows(self) -> bool:
        """Whether the examples that run are those of the copy."""
        return True

    def current(self) -> torch.Tensor:
        """What x holds at these places."""
        return aten.index.Tensor(self.x, self.places)

    def alone(self, write: Callable[[], object]) -> object:
        """A write into the copy, not into what it is of."""
        holder = _holder(self.picked)
        holder.stands = None
        try:
            return write()
        finally:
            holder.stands = self


def stand(picked: torch.Tensor, x: torch.Tensor, places: list) -> torch.Tensor:
    """Let ``picked``, which is x at these places, be what the loop has: a view of x."""
    if isinstance(picked, Wrapper):
        stand_for(picked, Standing(picked, x, places))
    return picked


def stand_for(picked: Wrapper, of: Standing) -> None:
    """Let ``picked`` stand for what ``of`` says."""
    if type(picked) is Batched:
        picked.family = Family(picked.value, picked.axis, picked.older)
        picked.family.add(picked)
    holder = _holder(picked)
    holder.stands = of
    rows.found = [*filter(_lives, rows.found or ()), weakref.ref(holder)]


def reach(x: torch.Tensor, write: Callable[[], object]) -> object:
    """A write into x, and where x is a copy that stands for a view, into what it is of."""
    copy = stands(x)
    if copy is None:
        return write()
    out = copy.alone(write)
    copy.put_back()
    return out


def _lives(reference: weakref.ref) -> bool:
    holder = reference()
    # None while its copy is written to: that is for a moment.
    return holder is not None and (holder.stands is None or holder.stands.picked.level.active)


def follow() -> None:
    """Let the copies hold what the tensors that they are of hold by now."""
    found, rows.found = rows.found or [], None  # what follows is our own doing
    try:
        for reference in found:
            holder = reference()
            if holder is not None and holder.stands is not None and _lives(reference):
                holder.stands.follow()
    finally:
        rows.found = [r for r in found if _lives(r)] or None
