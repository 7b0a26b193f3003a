"""Tests of branches: one bool for all lanes, or the two active sets into which lanes diverge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forall._compat.tensor_subclass import bare, is_posed
from forall._core.levels import stack
from forall._divergence.heap import active
from forall._divergence.join import Parts, merge, within
from forall._divergence.thread_state import (
    Region,
    close_down_to,
    each_world,
    thread,
)
from forall._divergence.varying import Varying
from forall._divergence.vmap_interface import both, either, words

PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), tuple})


class Truth:
    """A test that differs between lanes: those for which it is true, and those for which not."""

    __slots__ = ("no", "yes")

    def __init__(self, yes: Any, no: Any) -> None:
        self.yes, self.no = yes, no

    def value(self) -> Any:
        """Return the test as a bool of each lane."""
        return merge([(self.yes, True), (self.no, False)])


def ask(test: Any, again: bool = False) -> Any:
    """Return ``bool(test)`` for the running lanes: one bool, or (lanes with True, with False)."""
    kind = type(test)
    if kind is bool:
        return test
    if kind is Truth:
        return _restricted(test.yes, test.no)
    if kind in PLAIN:
        return bool(test)
    if is_posed(test):
        if hasattr(kind.__bool__, "__code__"):  # the class overrides it
            from forall._divergence.converted_call import call  # which asks

            return ask(call(kind.__bool__, test))
        test = bare(test)
    if isinstance(test, words.Tensor) or kind is words.Number:
        if stack.late is not None:
            stack.late()
        return words.again(test) if again else words.asked(test)
    if kind is Varying:
        return _by_part(test.now())
    if thread.mixed and id(test) in thread.mixed:
        return _by_part([(w, len(c)) for w, c in active(thread.mixed[id(test)][1])])
    own = getattr(kind, "__bool__", None) or getattr(kind, "__len__", None)
    if hasattr(own, "__code__"):
        from forall._divergence.converted_call import call  # which asks

        return ask(call(own, test))
    return bool(test)


def _restricted(yes: Any, no: Any) -> Any:
    now = words.now()
    yes, no = both(yes, now), both(no, now)
    if yes is None or no is None:
        return no is None
    return yes, no


def _by_part(parts: Parts) -> Any:
    yes, no = [], []
    for world, value in parts:
        running = words.running(world)
        with running:
            answer = ask(value)
        if type(answer) is bool:
            (yes if answer else no).append(world)
        else:
            yes.append(answer[0])
            no.append(answer[1])
    if not yes or not no:
        return not no
    return either(yes), either(no)


def chosen(test: Any, a: Callable[[], Any], b: Callable[[], Any]) -> Any:
    """Evaluate ``a() if test else b()``: each lane runs its own side."""
    answer = ask(test)
    if type(answer) is bool:
        return a() if answer else b()
    thread.saw("if else", (answer[0].size, answer[1].size), 3)
    return each_world([(answer[0], a), (answer[1], b)], lambda run: run())


def shortcut(first: Any, rest: Callable[[], Any], *, stop: bool) -> Any:
    """Evaluate ``first or rest()`` (stop: True) or ``first and rest()``."""
    answer = ask(first)
    if type(answer) is bool:
        return first if answer is stop else rest()
    thread.saw("or" if stop else "and", (answer[0].size, answer[1].size), 3)
    sides = [(answer[0], lambda: first), (answer[1], rest)]
    if not stop:
        sides = [(answer[0], rest), (answer[1], lambda: first)]
    return each_world(sides, lambda run: run())


def shortcut_test(first: Any, rest: Callable[[], Any], *, stop: bool) -> Any:
    """Evaluate ``or`` / ``and`` where only the truth value matters: no values are joined."""
    answer = ask(first)
    if type(answer) is bool:
        return stop if answer is stop else rest()
    done, on = (answer[0], answer[1]) if stop else (answer[1], answer[0])
    found: list[Any] = []
    each_world([(done, None), (on, rest)], lambda run: found.append(run and _asked(run)))
    inner = found[1]
    if type(inner) is bool:
        if inner is stop:
            return stop
        return Truth(done, on) if stop else Truth(on, done)
    yes, no = inner
    return Truth(done | yes, no) if stop else Truth(yes, done | no)


def _asked(run: Callable[[], Any]) -> Any:
    return ask(run(), again=True)  # the operands of one test count as one test


def negated(test: Any) -> Any:
    answer = ask(test)
    if type(answer) is bool:
        return not answer
    return Truth(answer[1], answer[0])


def is_any(items: Any, *, stop: bool) -> Any:
    """Evaluate ``any(items)`` (stop: True) or ``all(items)``; a lane stops once it is decided."""
    found = stop
    t = thread
    region, depth, before = Region(t), len(t.entered), t.parted
    done: list[tuple[Any, dict]] = []
    t.parted += 1
    try:
        for item in items:
            answer = ask(item)
            if type(answer) is bool:
                if answer is stop:
                    break
                continue
            stopped, on = answer if stop else answer[::-1]
            done.append((stopped, region.captured()))
            t.back(depth)
            t.go(on)
        else:
            stop = not stop
        rest = words.now(), region.captured()
        t.back(depth)
        if done:
            region.meet([*done, rest])
    except Exception:
        if done:
            region.undo()
        raise
    finally:
        t.back(depth)
        t.parted = before
        close_down_to(t, region.up)
    if not done:
        return stop
    return merge([*((w, found) for w, _ in done), (rest[0], stop)])


__all__ = [
    "Truth",
    "ask",
    "chosen",
    "is_any",
    "negated",
    "shortcut",
    "shortcut_test",
    "within",
]
