"""While a call is recorded, the recorder sees all that bears on it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from forall._core.levels import stack
from forall._torch.dispatch import aside

if TYPE_CHECKING:
    from collections.abc import Iterator

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


class _Questions:
    """Hears of each question that Python asks of examples: their answers are numbers."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def heard(self, frame: Any) -> None:
        self.recorder.fails(
            f"line {frame.f_lineno} of {frame.f_code.co_name} asks for an example's numbers"
        )

    def split(self, place: Any, sizes: Any) -> None: ...

    def mark(self) -> None: ...

    def back_to(self, mark: Any) -> None: ...
