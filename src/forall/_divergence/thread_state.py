"""The state of a thread that runs converted code: open regions and the running lanes.

A *region* is a part of the code in which lanes have diverged: a branch, a loop, a function from
which some lanes have returned. Only regions change which lanes run.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, ClassVar
from weakref import WeakSet

from forall._compat import exception_safety
from forall._compat.call_site import OURS, SourceLine, find_users_frame
from forall._core.levels import stack
from forall._divergence.heap import HeapSlot, Split, Unsplittable
from forall._divergence.join import Parts, merge
from forall._divergence.report import Report
from forall._divergence.vmap_interface import interface


class LibraryUse:
    """The use that converted code makes of other libraries than torch."""

    __slots__ = ("are_converted", "were_called")

    def __init__(self, *, are_converted: bool) -> None:
        self.are_converted = are_converted  # True if their functions are converted too
        self.were_called = False


class ContainerCopies:
    """Copies of containers through which converted code steps, as ``zip`` makes them.

    Python would step through the containers themselves, and would see that these have changed.
    """

    def __init__(self) -> None:
        # By the id of a copy: the copy, which keeps the id its own, and the copied containers.
        self.sources: dict[int, list[Any]] = {}
        # Iterations under way, which have to hear of joins: see `subscripts`.
        self.iterations: WeakSet[Any] = WeakSet()

    def note_copy(self, copy: Any, sources: list[Any]) -> None:
        """Note the containers that a copy was made of."""
        self.sources[id(copy)] = [copy, *sources]

    def find_sources(self, value: Any) -> list[Any]:
        """Return the containers that a value was made of; none if it is no copy."""
        return self.sources.get(id(value), [])[1:]


class ThreadState(threading.local):
    """The state of one thread.

    The two class attributes are functions of `converted_call`, which sets them: modules below it
    call functions of the user's, as for ``x[key]`` with a ``__getitem__`` of the user's own.
    """

    call: ClassVar[Callable]
    find_template: ClassVar[Callable]

    def __init__(self) -> None:
        self.top: Region | None = None  # the innermost region that is open
        self.entered: list[Any] = []  # the active sets that were entered and not yet left
        self.diverged = 0  # in how many regions lanes have diverged; if 0, writes are not logged
        self.mixed: dict[int, tuple[HeapSlot, Split]] = {}  # see `heap`
        self.loose = False  # True if a varying value was ever made
        self.report: Report | None = None
        self.failed: Any = None  # the lanes that ran when an error was raised that may be caught
        self.runs = 0  # the depth of converted calls that were entered from outside
        self.libraries = LibraryUse(are_converted=False)
        self.ran_again: dict[Any, Any] = {}  # unconverted functions in which lanes diverged: why
        self.copies = ContainerCopies()
        self.loosened: dict[Any, HeapSlot] = {}  # slots in which varying values were left

    def run_only(self, world: Any) -> None:
        """Let only these lanes run from here on."""
        running = interface.run_active_set(world)
        running.__enter__()
        self.entered.append(running)
        if self.loose:
            self.restrict_objects(world)

    def restrict_objects(self, world: Any) -> None:
        """Restrict the contents of objects to the lanes of this active set, which run now."""
        for slot, split in list(self.mixed.values()):
            self.note(slot)
            slot.store_content(self, split.restrict_to(world))
        for slot in self.loosened.values():
            if slot.varies(self):
                self.note(slot)
                slot.narrow(self)

    def find_varying(self) -> list[Any]:
        """Return the varying contents of all slots, which unconverted code may see."""
        found = [slot.owner for slot, _ in self.mixed.values()]
        for slot in self.loosened.values():
            if slot.key not in self.mixed and slot.varies(self):
                content = slot.get(self)
                found += content.values() if isinstance(content, dict) else [content]
        return found

    def leave_sets(self, depth: int) -> None:
        """Leave active sets until ``depth`` of them are entered, so that their lanes run again."""
        entered = self.entered
        while len(entered) > depth:
            entered.pop().__exit__(None, None, None)

    def note(self, slot: HeapSlot) -> None:
        """Log the content of a slot before it changes."""
        top = self.top
        if top is not None:
            if top.heap is None:
                top.heap = {}
            if slot.key not in top.heap:
                top.heap[slot.key] = (slot, slot.get(self))

    def join_slot(self, slot: HeapSlot, parts: Parts) -> None:
        """Join the contents of a slot for the lanes that reconverge."""
        slot.join_contents(self, parts)
        if self.loose and slot.varies(self):
            self.loosened[slot.key] = slot

    def report_divergence(self, construct: str, answer: Any) -> None:
        """Add a divergence to the report, at the innermost line of the user's.

        The answer is a pair: the active sets for which the test is true, and false.
        """
        if self.report is not None:
            frame = find_users_frame(sys._getframe(1), (OURS,))
            place = SourceLine(frame.f_code.co_filename, frame.f_lineno)
            self.report.note_test(construct, place, *answer)


class InnerReports(threading.local):
    """The reports of the vmaps inside an explained call of another transform."""

    reports: list[Report] | None = None


thread = ThreadState()
inner = InnerReports()


def _reset_thread(_left: list, _level: int) -> None:
    """Reset the thread after an exception between two instructions ended the outermost call."""
    report = thread.report
    thread.__init__()
    thread.report = report


exception_safety.PUT_BACK.append(_reset_thread)


class Region:
    """Code in which lanes may diverge, and the log of its writes."""

    __slots__ = ("depth", "heap", "t", "up")

    def __init__(self, t: ThreadState) -> None:
        self.t = t
        self.up = t.top
        self.heap: dict[Any, tuple[HeapSlot, Any]] | None = None
        self.depth = len(t.entered)
        t.top = self

    def capture_writes(self) -> dict[Any, Any]:
        """Return the writes since the region began of the lanes that leave it now."""
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
        """Restore the contents from before the region, for the next lanes."""
        for slot, old in (self.heap or {}).values():
            slot.store_content(self.t, old)

    def undo(self) -> None:
        """Restore everything after an error, since a caller may catch it and go on."""
        self.t.leave_sets(self.depth)
        self.reset()

    def join_writes(self, parts: list[tuple[Any, dict[Any, Any]]]) -> None:
        """Join the writes of the lanes that reconverge."""
        for key, (slot, old) in (self.heap or {}).items():
            self.t.join_slot(slot, [(w, written.get(key, old)) for w, written in parts])

    def close(self) -> None:
        """Close the region, and pass its log of writes to the region around it.

        Objects without other references are left out: the log would keep them alive in a loop.
        """
        up = self.t.top = self.up
        if self.heap and self.t.diverged and up is not None:
            if up.heap is None:
                up.heap = {}
            for key, noted in self.heap.items():
                if noted[0].has_other_references():
                    up.heap.setdefault(key, noted)


def close_down_to(t: ThreadState, top: Region | None) -> None:
    """Close the regions that a return has left open."""
    while t.top is not top and t.top is not None:
        t.top.close()


def run_each_set(parts: Parts, run: Callable[[Any], Any]) -> Any:
    """Call ``run`` on each value for the lanes that have it, and join the results."""
    t = thread
    if len(parts) == 1:
        if t.loose:
            t.restrict_objects(interface.get_active_set())
        return run(parts[0][1])
    region, depth, before = Region(t), len(t.entered), t.diverged
    results: Parts = []
    written = []
    t.diverged += 1
    try:
        for n, (world, value) in enumerate(parts):
            if stack.late is not None:
                stack.late()
            if n:
                region.reset()
            t.run_only(world)
            results.append((world, run(value)))
            written.append((world, region.capture_writes()))
            t.leave_sets(depth)
        region.join_writes(written)
    except Exception:
        t.failed = t.failed or interface.get_active_set()
        region.undo()
        raise
    finally:
        t.leave_sets(depth)
        t.diverged = before
        close_down_to(t, region.up)
    return merge(results)


class ConvertedRun:
    """Context in which a function runs converted. Its exit restores the state of the thread."""

    __slots__ = ("sources", "strict", "t", "was")

    def __init__(self, *, strict: bool) -> None:
        self.strict = strict

    def __enter__(self) -> None:
        t = self.t = thread
        self.was = (t.top, len(t.entered), t.diverged, t.loose, dict(t.mixed), t.loosened)
        self.sources = t.copies.sources
        t.copies.sources = dict(self.sources)
        t.loosened, t.failed = {}, None
        t.runs += 1

    def __exit__(self, kind: object, *_: object) -> None:
        t = self.t
        top, depth, diverged, loose, mixed, loosened = self.was
        left = [*t.loosened.values(), *(s for s, split in t.mixed.values() if s.key not in mixed)]
        t.loosened = {}
        t.copies.sources = self.sources  # this run's hold lists, which need not outlive it
        try:
            if kind is None and left and self.strict:
                refuse_to_leave(t, left)
        finally:
            t.runs -= 1
            if kind is not None or not t.runs:
                interface.take_written_families()  # the aliases to be updated are gone
            t.leave_sets(depth)
            t.top, t.diverged, t.loosened = top, diverged, loosened
            if self.strict or kind is not None:
                t.mixed.clear()
                for slot, split in mixed.values():
                    slot.store_content(t, split)
                t.loose = loose


def refuse_to_leave(t: ThreadState, left: list[HeapSlot]) -> None:
    """Raise if an object that outlives the run holds a varying value.

    Empties ``left``: objects that nothing else refers to are let go, then those that only they
    held, and so on.
    """
    while dead := {slot.key for slot in left if not slot.has_other_references()}:
        left[:] = [slot for slot in left if slot.key not in dead]
        for key in dead:
            t.mixed.pop(key, None)
    if any(slot.varies(t) for slot in left):
        raise Unsplittable("an object that outlives the call holds what varies")
