"""Copies that emulate views: ``x[i]`` with an i of each example, which is a view in the loop.

What an API call has written into the copy, or into a view of it, is put back into x. Where x
changes under another name, the copy follows. Both happen after the call that wrote and in its grad
mode, so a derivative is that of what x holds by then. A backward pass that needs what x held before
meets torch's own version check.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

import torch

from forall._compat import exception_safety
from forall._compat.dispatch_state import functions_off
from forall._compat.private_api import version
from forall._compat.wrapper_tensor import Wrapper
from forall._vmap.batched_tensor import (
    Batched,
    Family,
    family_of,
    is_view,
    wrap,
)
from forall._vmap.mutation.mutation_log import written

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten
_FEW = 64


class _Copies(threading.local):
    """The copies that live; None where there are none, which is quick to ask."""

    found: list[weakref.ref[Standing]] | None = None
    seen = -1  # `written.times`, when they were last looked at
    followed = False  # whether other names of what was written are updated now
    prune_at = _FEW


copies = _Copies()
exception_safety.PUT_BACK.append(lambda *_: setattr(copies, "followed", False))
FOLLOWING: list[Callable[[], None]] = []  # functions that update other names of what was written


def memory_of(x: torch.Tensor) -> Family | None:
    """The alias family of ``x``, which counts the writes into its memory."""
    found = _mapped(x)
    return None if found is None else family_of(found)


def _mapped(x: torch.Tensor) -> Batched | None:
    """The value of a vmap level that x is, or has a tangent for."""
    while isinstance(x, Wrapper) and type(x) is not Batched:
        x = x.value
    return x if type(x) is Batched else None


def views(x: torch.Tensor) -> bool:
    """True if ``x`` may be a part of its memory, or be laid out otherwise."""
    found = _mapped(x)
    return found is not None and is_view(found)


class Standing:
    """A copy of x at some indices that emulates a view of it, and lives as long as its memory."""

    __slots__ = (
        "__weakref__", "level", "memory", "node", "others", "picked", "places", "seen", "x",
        "x_memory", "x_seen",
    )  # fmt: skip

    def __init__(self, picked: Wrapper, x: torch.Tensor, places: list) -> None:
        memory = memory_of(picked)
        assert memory is not None  # noqa: S101 - it differs between examples
        memory.stands = self
        self.memory, self.picked = weakref.ref(memory), weakref.ref(picked)
        self.level = picked.level
        self.node = picked.grad_fn
        self.x, self.places = x, places
        self.x_memory = memory_of(x)
        self.look()

    def look(self) -> None:
        """Remember how often the copy and x have been written into by now."""
        self.others: list[tuple[int, list[Standing]]] = []  # writes that put back copies of this
        memory = self.memory()
        self.seen = 0 if memory is None else memory.times
        self.x_seen = self.x_times()

    def x_times(self) -> int:
        return version(self.x) if self.x_memory is None else self.x_memory.times

    def settle_copy(self, alive: list[Standing]) -> None:
        """Put back into x what has been written into the copy."""
        memory = self.memory()
        if memory is None or (memory.times == self.seen and not self._has_new_history()):
            return
        before, writers = self.x_times(), self._writers(memory.times - self.seen)
        picked = self.picked()
        if picked is None:  # only a name without history is left
            picked = wrap(memory.value, memory.axis, self.level)
        self.seen = memory.times
        if self.x.requires_grad and picked.grad_fn is self.node:  # written behind autograd's back
            with torch.no_grad():
                self.put_back(picked)
        else:
            self.put_back(picked)
            self.node = picked.grad_fn
        self.look()
        if self.x_memory is None:
            return
        if self.x_memory.stands is not None:
            self.x_memory.stands.others.append((self.x_seen - before, writers))
        for other in alive:
            if other.x_memory is self.x_memory and other.x_seen == before:
                other.heard(writers, self.x_seen)

    def _has_new_history(self) -> bool:
        """True if a Function that wrote into the copy has given it a history after it had run."""
        picked = self.picked()
        return picked is not None and picked.grad_fn is not self.node

    def _writers(self, times: int) -> list[Standing]:
        """The copies that were written into: this one, or copies of it."""
        if times and sum(n for n, _ in self.others) == times:
            return [w for _, writers in self.others for w in writers]
        return [self]

    def settle_x(self) -> None:
        """Let the copy hold what x holds by now."""
        picked = self.picked()
        if picked is not None and self.x_times() != self.x_seen:
            self.x_seen = self.x_times()
            self.follow(picked)
            self.node = picked.grad_fn
            self.look()

    def heard(self, writers: list[Standing], times: int) -> None:
        """Take notice that writes into these copies have been put back into x."""

    def put_back(self, picked: torch.Tensor) -> None:
        aten.index_put_.default(self.x, self.places, picked)

    def follow(self, picked: torch.Tensor) -> None:
        aten.copy_.default(picked, aten.index.Tensor(self.x, self.places))


def stand(picked: torch.Tensor, x: torch.Tensor, places: list) -> torch.Tensor:
    """Let ``picked``, a copy of ``x`` at these indices, emulate the view that the loop has."""
    if isinstance(picked, Wrapper):
        with functions_off():
            enlist(Standing(picked, x, places))
    return picked


def enlist(standing: Standing) -> None:
    found = copies.found
    if found is None:
        copies.found, copies.seen, copies.prune_at = [], written.times, _FEW
        found = copies.found
    elif len(found) > copies.prune_at:
        found[:] = [reference for reference in found if _lives(reference())]
        copies.prune_at = 2 * len(found) + _FEW
    found.append(weakref.ref(standing))


def _lives(standing: Standing | None) -> bool:
    return standing is not None and standing.level.active


def settle() -> None:
    """Bring together again what is one memory in the loop, after a write."""
    _settle_copies()
    if written.named and not copies.followed:
        copies.followed = True
        try:
            for follow in FOLLOWING:
                follow()
        finally:
            copies.followed = False
            written.named.clear()


def _settle_copies() -> None:
    found, copies.found = copies.found or [], None  # the writes that follow are our own
    try:
        with functions_off():
            alive = [s for s in (reference() for reference in found) if _lives(s)]
            for s in reversed(alive):  # a copy may be one of a copy
                s.settle_copy(alive)
            for s in alive:
                s.settle_x()
    finally:
        copies.found = [r for r in found if _lives(r())] or None
        copies.seen = written.times
