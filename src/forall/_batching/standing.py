"""What the loop has as a view and we as a copy: ``x[i]`` with an i of each example.

Written to, the copy is put back into x. Where x changes under another name, the copy follows,
after the call that changed it and in that call's grad mode, so its derivative is that of what x
holds by then; a backward pass that needs what it held before meets torch's own version check.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

import torch

from forall._batching.batched import Batched, Family

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten


class _Rows(threading.local):
    """The families of copies that live; None where there are none, to be quick to ask."""

    found: list[weakref.ref[Family]] | None = None


rows = _Rows()


def _version(x: torch.Tensor) -> int:
    return -1 if x.is_inference() else x._version


class Standing:
    """One copy, and the places of x that it is of."""

    __slots__ = ("picked", "places", "version", "x")

    def __init__(self, picked: Batched, x: torch.Tensor, places: list) -> None:
        self.picked = picked
        self.places = places
        self.x = x
        self.version = _version(x)

    def put_back(self) -> None:
        reach(self.x, lambda: aten.index_put_.default(self.x, self.places, self.picked))
        self.version = _version(self.x)

    def follow(self) -> None:
        version = _version(self.x)
        if version == self.version and version >= 0:
            return
        self.version = version
        self.alone(lambda: aten.copy_.default(self.picked, aten.index.Tensor(self.x, self.places)))

    def alone(self, write: Callable[[], object]) -> object:
        """A write into the copy, not into what it is of."""
        family = self.picked.family
        family.stands = None
        try:
            return write()
        finally:
            family.stands = self


def stand(picked: torch.Tensor, x: torch.Tensor, places: list) -> torch.Tensor:
    """Let ``picked``, which is x at these places, be what the loop has: a view of x."""
    if type(picked) is Batched:
        family = picked.family = Family(picked.value, picked.axis, picked.older)
        family.add(picked)
        family.stands = Standing(picked, x, places)
        rows.found = [*filter(_lives, rows.found or ()), weakref.ref(family)]
    return picked


def reach(x: torch.Tensor, write: Callable[[], object]) -> object:
    """A write into x, and where x is a copy that stands for a view, into what it is of."""
    stands = x.family.stands if type(x) is Batched and x.family is not None else None
    if stands is None:
        return write()
    out = stands.alone(write)
    stands.put_back()
    return out


def _lives(reference: weakref.ref[Family]) -> bool:
    family = reference()
    # None while its copy is written to: that is for a moment.
    return family is not None and (family.stands is None or family.stands.picked.level.active)


def follow() -> None:
    """Let the copies hold what the tensors that they are of hold by now."""
    found, rows.found = rows.found or [], None  # what follows is our own doing
    try:
        for reference in found:
            family = reference()
            if family is not None and family.stands is not None and _lives(reference):
                family.stands.follow()
    finally:
        rows.found = [r for r in found if _lives(r)] or None
