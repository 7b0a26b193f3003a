"""What a thread knows while it runs converted code: which regions are open, who runs.

A *region* is a stretch of code that lanes go through apart: a branch, a loop, a function of which
some have returned. Only regions change who runs.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from forall._compat import exception_safety
from forall._core.levels import stack
from forall._divergence.heap import Slot, Split, Unsplittable
from forall._divergence.join import Parts, merge
from forall._divergence.report import Report
from forall._divergence.vmap_interface import words


class Thread(threading.local):
    """The state of one thread."""

    def __init__(self) -> None:
        self.top: Region | None = None  # the innermost region that is open
        self.entered: list[Any] = []  # the worlds that were entered, and are to be left
        self.parted = 0  # how many regions have lanes apart; without any, no write is noted
        self.mixed: dict[int, tuple[Slot, Split]] = {}  # see `heap`
        self.loose = False  # whether anything that varies was ever made
        self.report: Report | None = None
        self.failed: Any = None  # who ran when an error was raised that has not ended the run
        self.runs = 0  # how many functions run converted, one inside another
        self.deeply = False  # whether those of other libraries run converted too
        self.met_others = False  # whether one of them was called that ran as it is
        self.ran_again: dict[Any, Any] = {}  # functions not converted in which lanes parted: why
        self.made_of: dict[
            int, list[Any]
        ] = {}  # containers of copies, by the id of these, and these
        self.loosened: dict[Any, Slot] = {}  # places where what varies was left

    def go(self, world: Any) -> None:
        """From here on only these lanes run."""
        running = words.running(world)
        running.__enter__()
        self.entered.append(running)
        if self.loose:
            self.show(world)

    def show(self, world: Any) -> None:
        """Let objects hold what lanes of this world, which run now, have in them."""
        for slot, split in list(self.mixed.values()):
            self.note(slot)
            slot.put(self, split.within(world))
        for slot in self.loosened.values():
            if slot.varies(self):
                self.note(slot)
                slot.narrow(self)

    def varying(self) -> list[Any]:
        """What differs between the lanes in a place that code which is not converted may see."""
        found = [slot.owner for slot, _ in self.mixed.values()]
        for slot in self.loosened.values():
            if slot.key not in self.mixed and slot.varies(self):
                content = slot.get(self)
                found += content.values() if isinstance(content, dict) else [content]
        return found

    def back(self, depth: int) -> None:
        """Run who ran when so many worlds had been entered."""
        entered = self.entered
        while len(entered) > depth:
            entered.pop().__exit__(None, None, None)

    def note(self, slot: Slot) -> None:
        """This place is about to change."""
        top = self.top
        if top is not None:
            if top.heap is None:
                top.heap = {}
            if slot.key not in top.heap:
                top.heap[slot.key] = (slot, slot.get(self))

    def met(self, slot: Slot, parts: Parts) -> None:
        """What the lanes that meet have in a place is joined."""
        slot.meet(self, parts)
        if self.loose and slot.varies(self):
            self.loosened[slot.key] = slot

    def saw(self, construct: str, sizes: tuple[int, ...], frames: int = 2) -> None:
        """Tell the report that lanes parted in the code so many frames further out."""
        if self.report is not None:
            frame = sys._getframe(frames)
            self.report.parted(construct, sizes, frame.f_code.co_filename, frame.f_lineno)


thread = Thread()


def _begin_anew(_left: list, _level: int) -> None:
    """Forget what ran, where an exception between two instructions has ended the outermost call."""
    report = thread.report
    thread.__init__()
    thread.report = report


exception_safety.PUT_BACK.append(_begin_anew)


class Region:
    """Code that lanes may go through apart, and what was written meanwhile."""

    __slots__ = ("depth", "heap", "t", "up")

    def __init__(self, t: Thread) -> None:
        self.t = t
        self.up = t.top
        self.heap: dict[Any, tuple[Slot, Any]] | None = None
        self.depth = len(t.entered)
        t.top = self

    def captured(self) -> dict[Any, Any]:
        """What lanes that leave this region now have written since it began."""
        t, node, found = self.t, self.t.top, {}
        while node is not None:
            for key, (slot, _) in (node.heap or {}).items():
                if key not in found:
                    found[key] = slot.get(t)
            if node is self:
                break
            node = node.up
        return found

    def reset(self) -> None:
        """Put back what was there before, for the next lanes."""
        for slot, old in (self.heap or {}).values():
            slot.put(self.t, old)

    def undo(self) -> None:
        """Put all back after an error, which may be caught by who goes on in another way."""
        self.t.back(self.depth)
        self.reset()

    def meet(self, parts: list[tuple[Any, dict[Any, Any]]]) -> None:
        """Join what the lanes that meet have written."""
        for key, (slot, old) in (self.heap or {}).items():
            self.t.met(slot, [(w, written.get(key, old)) for w, written in parts])

    def close(self) -> None:
        """Who is further out will have to put back what was written here as well.

        Not into an object that nobody has any more: it would be kept to the end of a loop.
        """
        up = self.t.top = self.up
        if self.heap and self.t.parted and up is not None:
            if up.heap is None:
                up.heap = {}
            for key, noted in self.heap.items():
                if noted[0].is_known_elsewhere():
                    up.heap.setdefault(key, noted)


def close_down_to(t: Thread, top: Region | None) -> None:
    """Close the regions that a return has left open."""
    while t.top is not top and t.top is not None:
        t.top.close()


def each_world(parts: Parts, run: Callable[[Any], Any]) -> Any:
    """``run`` of each value by the lanes that have it; what all get, joined."""
    t = thread
    if len(parts) == 1:
        if t.loose:
            t.show(words.now())
        return run(parts[0][1])
    region, depth, before = Region(t), len(t.entered), t.parted
    results: Parts = []
    written = []
    t.parted += 1
    try:
        for n, (world, value) in enumerate(parts):
            if stack.late is not None:
                stack.late()
            if n:
                region.reset()
            t.go(world)
            results.append((world, run(value)))
            written.append((world, region.captured()))
            t.back(depth)
        region.meet(written)
    except Exception:
        t.failed = t.failed or words.now()
        region.undo()
        raise
    finally:
        t.back(depth)
        t.parted = before
        close_down_to(t, region.up)
    return merge(results)


class converted_run:
    """A function runs converted in the body. Whatever ends it, the thread is as it was before."""

    __slots__ = ("strict", "t", "was")

    def __init__(self, *, strict: bool) -> None:
        self.strict = strict

    def __enter__(self) -> None:
        t = self.t = thread
        self.was = (t.top, len(t.entered), t.parted, t.loose, dict(t.mixed), t.loosened)
        t.loosened, t.failed = {}, None
        t.runs += 1

    def __exit__(self, kind: object, *_: object) -> None:
        t = self.t
        top, depth, parted, loose, mixed, loosened = self.was
        left = [*t.loosened.values(), *(s for s, split in t.mixed.values() if s.key not in mixed)]
        t.loosened = {}
        try:
            if kind is None and left and self.strict:
                refuse_to_leave(t, left)
        finally:
            t.runs -= 1
            if not t.runs:
                t.made_of.clear()
            if kind is not None or not t.runs:
                words.changed()  # who was to follow is no more
            t.back(depth)
            t.top, t.parted, t.loosened = top, parted, loosened
            if self.strict or kind is not None:
                t.mixed.clear()
                for slot, split in mixed.values():
                    slot.put(t, split)
                t.loose = loose


def refuse_to_leave(t: Thread, left: list[Slot]) -> None:
    """Nobody may find what varies in an object that outlives the run."""
    for slot in left:
        if slot.varies(t) and slot.is_known_elsewhere():
            raise Unsplittable("an object that outlives the call holds what varies")
