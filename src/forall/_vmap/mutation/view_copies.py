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
from forall._compat.private_api import get_version
from forall._compat.wrapper_tensor import Wrapper
from forall._vmap.batched_tensor import (
    AliasFamily,
    BatchedTensor,
    get_alias_family,
    may_be_partial_view,
    wrap_stack,
)
from forall._vmap.mutation.mutation_log import write_counts

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten
_FEW = 64


class _ViewCopies(threading.local):
    """The copies that live; None where there are none, which is quick to ask."""

    found: list[weakref.ref[ViewCopy]] | None = None
    seen = -1  # `written.times`, when they were last looked at
    followed = False  # whether other names of what was written are updated now
    prune_at = _FEW


view_copies = _ViewCopies()
exception_safety.PUT_BACK.append(lambda *_: setattr(view_copies, "followed", False))
ALIAS_UPDATES: list[
    Callable[[], None]
] = []  # functions that update other names of what was written


def find_alias_family(x: torch.Tensor) -> AliasFamily | None:
    """The alias family of ``x``, which counts the writes into its memory."""
    found = _find_batched(x)
    return None if found is None else get_alias_family(found)


def _find_batched(x: torch.Tensor) -> BatchedTensor | None:
    """The value of a vmap level that x is, or has a tangent for."""
    while isinstance(x, Wrapper) and type(x) is not BatchedTensor:
        x = x.value
    return x if type(x) is BatchedTensor else None


def is_partial_name(x: torch.Tensor) -> bool:
    """True if ``x`` may be a part of its memory, or be laid out otherwise."""
    found = _find_batched(x)
    return found is not None and may_be_partial_view(found)


class ViewCopy:
    """A copy of x at some indices that emulates a view of it, and lives as long as its memory."""

    __slots__ = (
        "__weakref__", "level", "memory", "node", "others", "picked", "places", "seen", "x",
        "x_memory", "x_seen",
    )  # fmt: skip

    def __init__(self, picked: Wrapper, x: torch.Tensor, places: list) -> None:
        memory = find_alias_family(picked)
        assert memory is not None  # noqa: S101 - it differs between examples
        memory.stands = self
        self.memory, self.picked = weakref.ref(memory), weakref.ref(picked)
        self.level = picked.level
        self.node = picked.grad_fn
        self.x, self.places = x, places
        self.x_memory = find_alias_family(x)
        self.remember_counts()

    def remember_counts(self) -> None:
        """Remember how often the copy and x have been written into by now."""
        self.others: list[tuple[int, list[ViewCopy]]] = []  # writes that put back copies of this
        memory = self.memory()
        self.seen = 0 if memory is None else memory.times
        self.x_seen = self.count_base_writes()

    def count_base_writes(self) -> int:
        return get_version(self.x) if self.x_memory is None else self.x_memory.times

    def sync_base(self, alive: list[ViewCopy]) -> None:
        """Put back into x what has been written into the copy."""
        memory = self.memory()
        if memory is None or (memory.times == self.seen and not self._has_new_history()):
            return
        before, writers = self.count_base_writes(), self._find_writers(memory.times - self.seen)
        picked = self.picked()
        if picked is None:  # only a name without history is left
            picked = wrap_stack(memory.value, memory.axis, self.level)
        self.seen = memory.times
        if self.x.requires_grad and picked.grad_fn is self.node:  # written behind autograd's back
            with torch.no_grad():
                self.write_to_base(picked)
        else:
            self.write_to_base(picked)
            self.node = picked.grad_fn
        self.remember_counts()
        if self.x_memory is None:
            return
        if self.x_memory.stands is not None:
            self.x_memory.stands.others.append((self.x_seen - before, writers))
        for other in alive:
            if other.x_memory is self.x_memory and other.x_seen == before:
                other.note_written_back(writers, self.x_seen)

    def _has_new_history(self) -> bool:
        """True if a Function that wrote into the copy has given it a history after it had run."""
        picked = self.picked()
        return picked is not None and picked.grad_fn is not self.node

    def _find_writers(self, times: int) -> list[ViewCopy]:
        """The copies that were written into: this one, or copies of it."""
        if times and sum(n for n, _ in self.others) == times:
            return [w for _, writers in self.others for w in writers]
        return [self]

    def sync_copy(self) -> None:
        """Let the copy hold what x holds by now."""
        picked = self.picked()
        if picked is not None and self.count_base_writes() != self.x_seen:
            self.x_seen = self.count_base_writes()
            self.copy_from_base(picked)
            self.node = picked.grad_fn
            self.remember_counts()

    def note_written_back(self, writers: list[ViewCopy], times: int) -> None:
        """Take notice that writes into these copies have been put back into x."""

    def write_to_base(self, picked: torch.Tensor) -> None:
        aten.index_put_.default(self.x, self.places, picked)

    def copy_from_base(self, picked: torch.Tensor) -> None:
        aten.copy_.default(picked, aten.index.Tensor(self.x, self.places))


def make_view_copy(picked: torch.Tensor, x: torch.Tensor, places: list) -> torch.Tensor:
    """Let ``picked``, a copy of ``x`` at these indices, emulate the view that the loop has."""
    if isinstance(picked, Wrapper):
        with functions_off():
            register_view_copy(ViewCopy(picked, x, places))
    return picked


def register_view_copy(standing: ViewCopy) -> None:
    found = view_copies.found
    if found is None:
        view_copies.found, view_copies.seen, view_copies.prune_at = [], write_counts.times, _FEW
        found = view_copies.found
    elif len(found) > view_copies.prune_at:
        found[:] = [reference for reference in found if _is_alive(reference())]
        view_copies.prune_at = 2 * len(found) + _FEW
    found.append(weakref.ref(standing))


def _is_alive(standing: ViewCopy | None) -> bool:
    return standing is not None and standing.level.active


def sync_aliases() -> None:
    """Bring together again what is one memory in the loop, after a write."""
    _sync_view_copies()
    if write_counts.named and not view_copies.followed:
        view_copies.followed = True
        try:
            for follow in ALIAS_UPDATES:
                follow()
        finally:
            view_copies.followed = False
            write_counts.named.clear()


def _sync_view_copies() -> None:
    found, view_copies.found = view_copies.found or [], None  # the writes that follow are our own
    try:
        with functions_off():
            alive = [s for s in (reference() for reference in found) if _is_alive(s)]
            for s in reversed(alive):  # a copy may be one of a copy
                s.sync_base(alive)
            for s in alive:
                s.sync_copy()
    finally:
        view_copies.found = [r for r in found if _is_alive(r())] or None
        view_copies.seen = write_counts.times
