"""Listeners that are told when Python asks examples for a value: `max_steps`, `explain`, a tracer.

Without any of these `stack.listening` is empty.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import torch

from forall._compat import trace_modes
from forall._compat.call_site import (
    OURS,
    TORCH,
    SourceLine,
    find_users_frame,
    find_users_line,
)
from forall._compat.dispatch_state import functions_off, no_dispatch
from forall._compat.documented_error import documented_error
from forall._compat.exception_safety import contextmanager
from forall._core.divergence import Diverged
from forall._core.errors import TransformCall, format_columns
from forall._core.levels import stack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import CodeType, FrameType

    Truths = Callable[[], torch.Tensor]  # of all examples


class Listener(Protocol):
    """An object that is told of each question, and of the runs that were undone."""

    writes: bool  # for a program of the call, in which numbers that Python keeps count as questions

    @property
    def is_idle(self) -> bool: ...

    def give_up(self, why: str) -> None: ...

    def on_concretize(self, frame: FrameType, truths: Truths | None = None) -> None: ...

    def split(self, place: SourceLine, sizes: tuple[int, ...]) -> None: ...

    def take_snapshot(self) -> Any: ...

    def restore_snapshot(self, mark: Any) -> None: ...


def notify_listeners(truths: Truths | None = None) -> None:
    """Tell the listeners that Python asks the examples that run.

    ``truths`` reads the answers of yes or no, if these can be read.
    """
    frame = find_users_frame(sys._getframe(1), (OURS,))
    for listener in stack.listening:
        listener.on_concretize(frame, truths)


def end_recordings(why: str) -> None:
    """End recordings of the call that runs: it runs eagerly, for the reason ``why``."""
    for listener in stack.listening:
        listener.give_up(why)


def notify_if_traced() -> None:
    """Tell the listeners, only if a tracer is on, that numbers of each example are kept."""
    if trace_modes.is_tracer_on():
        notify_listeners()


def get_code_position(frame: FrameType) -> tuple[CodeType, Any]:
    """The code of a frame and its position there; Python may have one test twice in its code."""
    code = frame.f_code
    return code, _get_code_positions(code)[frame.f_lasti // 2]


@lru_cache(maxsize=64)
def _get_code_positions(code: CodeType) -> list[Any]:
    return [*code.co_positions()]


@contextmanager
def add_listeners(listeners: list[Listener]) -> Iterator[None]:
    before = stack.listening
    stack.listening = (*before, *listeners)
    try:
        yield
    finally:
        stack.listening = before


def run_repeatably(run: Callable[[], Any]) -> Any:
    """Return ``run()``; if its examples diverge, forget its questions: it is made again."""
    if stack.late is not None:
        stack.late()
    if not stack.listening:
        return run()
    marks = [(listener, listener.take_snapshot()) for listener in stack.listening]
    try:
        return run()
    except Diverged as diverged:
        for listener, mark in marks:
            listener.restore_snapshot(mark)
            listener.split(diverged.place, tuple(map(len, diverged.groups)))
        raise


class TracerListener:
    """A listener that raises, while a tracer of torch runs: its program would fix the answer."""

    writes = True
    is_idle = False

    def __init__(self, call: TransformCall) -> None:
        self.call = call

    def give_up(self, why: str) -> None: ...

    def on_concretize(self, frame: FrameType, truths: Truths | None = None) -> None:
        place = find_users_line()
        raise documented_error(RuntimeError, "data-dependent")(
            f"{self.call}: traced (by make_fx, or on fake tensors), and asks for an example's "
            "numbers.\n"
            f"{format_columns([('at', str(place), place.text())])}\n"
            "A trace is one line of operators for all inputs. Use torch.where, and a tensor in the "
            "place of the number."
        )

    def split(self, place: SourceLine, sizes: tuple[int, ...]) -> None: ...

    def take_snapshot(self) -> Any: ...

    def restore_snapshot(self, mark: Any) -> None: ...


class StepLimit:
    """A limit of how often each example may ask one question in a run of a level."""

    writes = False
    is_idle = False

    def give_up(self, why: str) -> None: ...

    def __init__(self, call: TransformCall, level: Any, steps: int) -> None:
        self.call, self.level, self.steps = call, level, steps
        self.counts: dict[Any, torch.Tensor] = {}
        self.reached: RuntimeError | None = None

    def on_concretize(self, frame: FrameType, truths: Truths | None = None) -> None:
        level = self.level.acting_level
        if frame.f_code.co_filename.startswith(TORCH):
            return  # torch's code may go through a list of its own
        key = get_code_position(frame)
        with functions_off(), no_dispatch():
            counts = self.counts.get(key)
            if counts is None:
                counts = self.counts[key] = torch.zeros(self.level.size, dtype=torch.int64)
            rows = slice(None) if level is self.level else level.examples.rows
            counts[rows] += 1
            if int(counts.max()) > self.steps + 1:
                late = (counts > self.steps + 1).nonzero()[:, 0].tolist()
                self.reached = self._make_limit_error(
                    SourceLine(frame.f_code.co_filename, frame.f_lineno), late, len(counts[rows])
                )
                raise self.reached

    def _make_limit_error(self, place: SourceLine, late: list[int], running: int) -> RuntimeError:
        """Return the error; ``running`` examples were asked, of which ``late`` are at the limit.

        The others of these came to the loop later, or have been there less often.
        """
        origin, size = self.level.origin, self.level.size
        who = format_examples([origin.numbers[n] for n in late])
        whole = f"{size} example{'s' * (size != 1)}"
        if size != origin.size:  # a chunk, or a group that agrees so far
            whole = f"the {size} that run together, of {origin.size} examples in all"
        rows = [
            ("at", f"{place}   {place.text()}".rstrip()),
            ("goes on", who),
            ("running", f"{running} of {whole}"),
        ]
        return documented_error(RuntimeError, "max-steps")(
            f"{self.call}: the loop goes on after max_steps={self.steps} steps.\n"
            f"{format_columns(rows)}\n"
            "Allow more steps, or let the test end the loop sooner."
        )

    def split(self, place: SourceLine, sizes: tuple[int, ...]) -> None:
        pass

    def take_snapshot(self) -> Any:
        with functions_off(), no_dispatch():
            return {key: counts.clone() for key, counts in self.counts.items()}

    def restore_snapshot(self, mark: Any) -> None:
        self.counts = mark


def format_examples(numbers: Sequence[int]) -> str:
    """The numbers of examples, the first few of them."""
    more = ", ..." if len(numbers) > 8 else ""
    count = f" ({len(numbers)} of them)" if more else ""
    return f"example{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers[:8]))}{more}{count}"
