"""An ``if`` at which lanes diverge: one side runs, then the other, then the lanes reconverge."""

from __future__ import annotations

from typing import Any

from forall._divergence.join import UNDEFINED, merge
from forall._divergence.thread_state import Region
from forall._divergence.vmap_interface import interface, unite_sets

ONCE = (None,)


class UniformIf:
    """An ``if`` at which all lanes take one side."""

    __slots__ = ("no", "yes")
    diverged = False

    def __init__(self, yes: tuple, no: tuple) -> None:
        self.yes, self.no = yes, no


YES, NO = UniformIf(ONCE, ()), UniformIf((), ONCE)


class IfRegion(Region):
    """An ``if`` at which lanes have diverged, from ``save`` to ``join``."""

    __slots__ = ("base", "first", "frame", "holes", "joins", "worlds")
    diverged = True
    yes = no = ONCE

    def __init__(self, frame: Any, yes: Any, no: Any) -> None:
        self.frame = frame
        self.worlds = (yes, no)
        self.holes = False

    def save(self, names: dict[str, Any], kept: tuple[str, ...], joins: tuple[str, ...]) -> None:
        """Begin the true side. It may change the names ``kept``; ``joins`` are read afterwards."""
        Region.__init__(self, self.frame.t)
        self.base = {name: names.get(name, UNDEFINED) for name in kept}
        self.joins = joins
        self.frame.apart += 1
        self.t.diverged += 1
        self.t.run_only(self.worlds[0])

    def flip(self, names: dict[str, Any]) -> list[Any]:
        """End the true side, begin the false side, and return the values of its names."""
        self.first = self._leave_side(names)
        self.t.leave_sets(self.depth)
        self.reset()
        self.t.run_only(self.worlds[1])
        values = list(self.base.values())
        self.holes = any(v is UNDEFINED for v in values)
        return values

    def join(self, names: dict[str, Any]) -> list[Any]:
        """End both sides, and return the values of the names for the lanes that go on."""
        parts = [part for part in (self.first, self._leave_side(names)) if part is not None]
        return self._reconverge(parts)

    def skip(self, names: dict[str, Any]) -> list[Any]:
        """End an ``if`` without an ``else``, like `join`."""
        self.flip(names)
        return self._reconverge(
            [p for p in (self.first, self._leave_side(self.base)) if p is not None]
        )

    def _leave_side(self, names: dict[str, Any]) -> Any:
        if self.frame.dead:
            self.frame.dead = False
            return None
        values = [names.get(name, UNDEFINED) for name in self.joins]
        return interface.get_active_set(), values, self.capture_writes()

    def _reconverge(self, parts: list) -> list[Any]:
        t = self.t
        t.leave_sets(self.depth)
        self.frame.apart -= 1
        t.diverged -= 1
        together = unite_sets([w for w, _, _ in parts])
        if together is None:
            self.frame.dead = True
            self.close()
            values = [UNDEFINED] * len(self.joins)
        else:
            values = reconverge_lanes(self, together, parts)
            self.close()
        self.holes = any(v is UNDEFINED for v in values)
        self.base = self.first = None
        return values


def reconverge_lanes(region: Region, together: Any, parts: list) -> list[Any]:
    """Let the lanes ``together`` run from here on; join their writes and their names' values."""
    t = region.t
    if interface.get_active_set() - together is not None:
        running = interface.run_active_set(together)
        running.__enter__()
        t.entered.append(running)
    region.join_writes([(w, written) for w, _, written in parts])
    count = len(parts[0][1])
    return [merge([(w, values[n]) for w, values, _ in parts]) for n in range(count)]
