"""Tests of branches: one bool for all lanes, or the two active sets into which lanes diverge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forall._compat.tensor_subclass import is_posed, unwrap_posed
from forall._core.levels import stack
from forall._divergence.heap import find_active_contents
from forall._divergence.join import Parts, merge, restrict_parts
from forall._divergence.thread_state import (
    Region,
    close_down_to,
    run_each_set,
    thread,
)
from forall._divergence.varying import Varying
from forall._divergence.vmap_interface import interface, intersect_sets, unite_sets

PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), tuple})


class DivergedTest:
    """A test that differs between lanes: those for which it is true, and those for which not."""

    __slots__ = ("no", "yes")

    def __init__(self, yes: Any, no: Any) -> None:
        self.yes, self.no = yes, no

    def value(self) -> Any:
        """Return the test as a bool of each lane."""
        return merge([(self.yes, True), (self.no, False)])


def evaluate_lane_test(test: Any, again: bool = False) -> Any:
    """Return ``bool(test)`` for the running lanes: one bool, or (lanes with True, with False)."""
    kind = type(test)
    if kind is bool:
        return test
    if kind is DivergedTest:
        return _restrict_test(test.yes, test.no)
    if kind in PLAIN:
        return bool(test)
    if is_posed(test):
        if hasattr(kind.__bool__, "__code__"):  # the class overrides it
            return evaluate_lane_test(thread.call(kind.__bool__, test))
        test = unwrap_posed(test)
    if isinstance(test, interface.Tensor) or kind is interface.BatchedScalar:
        if stack.late is not None:
            stack.late()
        return interface.evaluate_test(test) if again else interface.evaluate_users_test(test)
    if kind is Varying:
        return _evaluate_parts(test.running_parts())
    if thread.mixed and id(test) in thread.mixed:
        return _evaluate_parts(
            [(w, len(c)) for w, c in find_active_contents(thread.mixed[id(test)][1])]
        )
    own = getattr(kind, "__bool__", None) or getattr(kind, "__len__", None)
    if hasattr(own, "__code__"):
        return evaluate_lane_test(thread.call(own, test))
    return bool(test)


def _restrict_test(yes: Any, no: Any) -> Any:
    now = interface.get_active_set()
    yes, no = intersect_sets(yes, now), intersect_sets(no, now)
    if yes is None or no is None:
        return no is None
    return yes, no


def _evaluate_parts(parts: Parts) -> Any:
    yes, no = [], []
    for world, value in parts:
        running = interface.run_active_set(world)
        with running:
            answer = evaluate_lane_test(value)
        if type(answer) is bool:
            (yes if answer else no).append(world)
        else:
            yes.append(answer[0])
            no.append(answer[1])
    if not yes or not no:
        return not no
    return unite_sets(yes), unite_sets(no)


def evaluate_if_exp(test: Any, a: Callable[[], Any], b: Callable[[], Any]) -> Any:
    """Evaluate ``a() if test else b()``: each lane runs its own side."""
    answer = evaluate_lane_test(test)
    if type(answer) is bool:
        return a() if answer else b()
    thread.report_divergence("if else", answer)
    return run_each_set([(answer[0], a), (answer[1], b)], lambda run: run())


def evaluate_bool_op(first: Any, rest: Callable[[], Any], *, stop: bool) -> Any:
    """Evaluate ``first or rest()`` (stop: True) or ``first and rest()``."""
    answer = evaluate_lane_test(first)
    if type(answer) is bool:
        return first if answer is stop else rest()
    thread.report_divergence("or" if stop else "and", answer)
    sides = [(answer[0], lambda: first), (answer[1], rest)]
    if not stop:
        sides = [(answer[0], rest), (answer[1], lambda: first)]
    return run_each_set(sides, lambda run: run())


def evaluate_bool_test(first: Any, rest: Callable[[], Any], *, stop: bool) -> Any:
    """Evaluate ``or`` / ``and`` where only the truth value matters: no values are joined."""
    answer = evaluate_lane_test(first)
    if type(answer) is bool:
        return stop if answer is stop else rest()
    done, on = (answer[0], answer[1]) if stop else (answer[1], answer[0])
    found: list[Any] = []
    run_each_set(
        [(done, None), (on, rest)], lambda run: found.append(run and _evaluate_operand(run))
    )
    inner = found[1]
    if type(inner) is bool:
        if inner is stop:
            return stop
        return DivergedTest(done, on) if stop else DivergedTest(on, done)
    yes, no = inner
    return DivergedTest(done | yes, no) if stop else DivergedTest(yes, done | no)


def _evaluate_operand(run: Callable[[], Any]) -> Any:
    return evaluate_lane_test(run(), again=True)  # the operands of one test count as one test


def negate_test(test: Any) -> Any:
    answer = evaluate_lane_test(test)
    if type(answer) is bool:
        return not answer
    return DivergedTest(answer[1], answer[0])


def evaluate_any_or_all(items: Any, *, stop: bool) -> Any:
    """Evaluate ``any(items)`` (stop: True) or ``all(items)``; a lane stops once it is decided."""
    found = stop
    t = thread
    region, depth, before = Region(t), len(t.entered), t.diverged
    done: list[tuple[Any, dict]] = []
    t.diverged += 1
    try:
        for item in items:
            answer = evaluate_lane_test(item)
            if type(answer) is bool:
                if answer is stop:
                    break
                continue
            stopped, on = answer if stop else answer[::-1]
            done.append((stopped, region.capture_writes()))
            t.leave_sets(depth)
            t.run_only(on)
        else:
            stop = not stop
        rest = interface.get_active_set(), region.capture_writes()
        t.leave_sets(depth)
        if done:
            region.join_writes([*done, rest])
    except Exception:
        if done:
            region.undo()
        raise
    finally:
        t.leave_sets(depth)
        t.diverged = before
        close_down_to(t, region.up)
    if not done:
        return stop
    return merge([*((w, found) for w, _ in done), (rest[0], stop)])


__all__ = [
    "DivergedTest",
    "evaluate_lane_test",
    "evaluate_if_exp",
    "evaluate_any_or_all",
    "negate_test",
    "evaluate_bool_op",
    "evaluate_bool_test",
    "restrict_parts",
]
