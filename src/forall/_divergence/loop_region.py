"""A loop that some lanes leave before others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from forall._core.levels import stack
from forall._divergence.branch_tests import evaluate_lane_test
from forall._divergence.if_region import ONCE, reconverge_lanes
from forall._divergence.join import UNDEFINED
from forall._divergence.subscripts import make_stepper, watch
from forall._divergence.thread_state import Region
from forall._divergence.vmap_interface import interface, unite_sets
from forall._vmap.concretize_listeners import notify_listeners

EMPTY: dict[str, Any] = {}


class BodyExits:
    """The lanes that left the body of a loop, by the way they left it.

    A part is (lanes, values of the names, their writes). There are parts for which the test
    ``failed``, parts that ran ``break``, and parts that wait for the next iteration. If all lanes
    leave together they are no part, and a flag says how.
    """

    __slots__ = ("all_broke", "all_wait", "broken", "failed", "waiting")

    def __init__(self) -> None:
        self.failed: list = []
        self.broken: list = []
        self.waiting: list = []
        self.all_broke = self.all_wait = False

    def take_waiting(self) -> list:
        parts, self.waiting = self.waiting, []
        return parts

    def take_failed(self) -> list:
        parts, self.failed = self.failed, []
        return parts


class LoopRegion(Region):
    """A loop, from before its first test to the point where all lanes that left it reconverge."""

    __slots__ = ("apart", "exits", "frame", "holes", "names", "noted", "split", "varying")

    def __init__(self, frame: Any, names: tuple[str, ...]) -> None:
        self.frame = frame
        self.names = names
        Region.__init__(self, frame.t)
        self.apart = self.varying = self.holes = False
        self.split: Any = None
        self.exits = BodyExits()

    def _begin(self) -> None:
        """Note that lanes have diverged from here on."""
        if not self.apart:
            self.apart = True
            self.frame.apart += 1
            self.t.diverged += 1

    def _leave_loop(self, names: dict[str, Any], world: Any = None) -> Any:
        values = [names.get(name, UNDEFINED) for name in self.names]
        return interface.get_active_set() if world is None else world, values, self.capture_writes()

    # --- the test

    def test(self, test: Any) -> bool:
        if test is True or test is False:
            return test
        answer = evaluate_lane_test(test)
        if type(answer) is bool:
            return answer
        self.t.report_divergence("while", answer)
        self.split = answer
        return False

    def drop_failed(self, names: dict[str, Any]) -> bool:
        """Let the lanes for which the test failed leave, and the others go on."""
        on, out = self.split
        self.split = None
        self._begin()
        self.exits.failed.append(self._leave_loop(names, out))
        self.t.leave_sets(self.depth)
        self.t.run_only(on)
        return True

    def iterate_items(self, iterable: Any) -> Iterable:
        steps = make_stepper(iterable)
        if steps is None:
            return watch(iterable)
        self.varying = True
        return self._steps(steps)

    def note(self, names: dict[str, Any]) -> None:
        """Note the values of the names before the next item is read."""
        self.noted = {name: names[name] for name in self.names if name in names}

    def _steps(self, steps: Any) -> Any:
        """Yield item after item; lanes without further items leave."""
        while True:
            if self.t.report is not None and stack.listening:
                notify_listeners()
            answer, item = steps()
            if answer is False:
                return
            if answer is not True:
                self.t.report_divergence("for", answer)
                self.split = answer
                self.drop_failed(self.noted)
            self.noted = EMPTY
            yield item()

    # --- leaving the body

    def note_break(self, names: dict[str, Any] | None) -> None:
        self.frame.dead = True
        if names is None:
            self.exits.all_broke = True
        else:
            self._begin()
            self.exits.broken.append(self._leave_loop(names))

    def note_continue(self, names: dict[str, Any] | None) -> None:
        self.frame.dead = True
        if names is None:
            self.exits.all_wait = True
        else:
            self._begin()
            self.exits.waiting.append(self._leave_loop(names))

    def rejoin(self, names: dict[str, Any]) -> list[Any]:
        """Join the lanes that wait for the next iteration with those at the end of the body."""
        return self._reconverge(self.exits.take_waiting(), names)

    def has_next_round(self) -> bool:
        """True if any lanes run the next iteration."""
        if self.exits.all_wait:
            self.exits.all_wait = self.frame.dead = False
        return not self.frame.dead

    # --- after the loop

    @property
    def normal(self) -> tuple:
        """A loop of one trip if any lanes run the ``else``, else an empty one."""
        if self.apart:
            return () if self.frame.dead else ONCE
        return () if self.exits.all_broke or self.frame.dead else ONCE

    def finish(self, names: dict[str, Any]) -> list[Any]:
        """Join all lanes that left the loop."""
        values = self._reconverge(self.exits.failed + self.exits.broken, names)
        self._end()
        return values

    def finish_normal(self, names: dict[str, Any]) -> list[Any]:
        """Join the lanes that left because the test failed; they run the ``else``."""
        return self._reconverge(self.exits.take_failed(), names)

    def close_uniform(self) -> None:
        """End a loop in which lanes never diverged."""
        if self.exits.all_broke:
            self.frame.dead = False
        self.close()

    def _end(self) -> None:
        self.frame.apart -= 1
        self.t.diverged -= 1
        self.close()
        self.exits, self.noted = BodyExits(), EMPTY

    def _reconverge(self, parts: list, names: dict[str, Any]) -> list[Any]:
        if not self.frame.dead:
            parts = [*parts, self._leave_loop(names)]
        self.t.leave_sets(self.depth)
        together = unite_sets([w for w, _, _ in parts])
        self.frame.dead = together is None
        if together is None:
            values = [UNDEFINED] * len(self.names)
        else:
            values = reconverge_lanes(self, together, parts)
        self.holes = any(v is UNDEFINED for v in values)
        return values
