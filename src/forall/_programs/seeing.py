"""While a call is recorded, the recorder sees all that bears on it."""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from forall._core.levels import outside, stack
from forall._torch.dispatch import aside, functions_off, no_dispatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from forall._programs.recorder import Recorder


@contextmanager
def seen_by(recorder: Recorder) -> Iterator[None]:
    before = stack.listening, aside.told
    stack.listening = (*stack.listening, _Questions(recorder))
    aside.told = (*aside.told, recorder.made_aside)
    try:
        with recorder:
            yield
    finally:
        stack.listening, aside.told = before


def _outside_all() -> AbstractContextManager:
    """Where the recorder alone sees what is done."""
    level = stack.top
    while level is not None and level.parent is not None:
        level = level.parent
    return nullcontext() if level is None else outside(level)


class _Questions:
    """Hears of each question that Python asks of examples: their answers are numbers.

    A yes or no that is the same for all examples is one that the recorder takes.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def heard(self, frame: Any, truths: Callable[[], torch.Tensor] | None = None) -> None:
        if truths is None or not self._is_one(truths()):
            self.recorder.fails(
                f"line {frame.f_lineno} of {frame.f_code.co_name} asks for an example's numbers"
            )

    def _is_one(self, values: torch.Tensor) -> bool:
        """Whether all examples give one answer; asked of numbers that the recorder knows."""
        if not values.numel():
            return False
        with no_dispatch(), functions_off():
            every, none = bool(values.all()), not bool(values.any())
        if every or none:
            with _outside_all(), functions_off():  # it may be the same for all without being asked
                bool(values.all() if every else values.any())
        return every or none

    def split(self, place: Any, sizes: Any) -> None: ...

    def mark(self) -> None: ...

    def back_to(self, mark: Any) -> None: ...
