"""One recorded kind of call: its program, the guards that it stands on, and how it is run."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forall._core.levels import stack
from forall._programs.guards import Guards
from forall._programs.passes import clean
from forall._programs.recorder import Recorder, Watch
from forall._programs.writing import function
from forall._torch import trees
from forall._torch.dispatch import made_aside

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forall._programs.program import Program

# What a result may be besides a tensor: it comes back as it is with each call.
_WORDS = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


class Recording(NamedTuple):
    """A first call: what it gave, and its program; or why it has none."""

    result: Any
    recorded: Recorded | None
    why: str | None


class Recorded:
    """A program, and what tells whether it still stands."""

    def __init__(
        self, program: Program, guards: Guards, leaves: list, spec: Any, places: list[int | None]
    ) -> None:
        self.program = program
        self.guards = guards
        self._spec = spec
        self._leaves = [None if p is not None else x for x, p in zip(leaves, places, strict=True)]
        self._places = places
        self._captured = [*program.captured.values()]
        self.run = function(
            program, program.nodes, [*program.inputs, *program.captured], program.outputs
        )

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Any:
        found = self.run(*tensors, *self._captured)
        leaves = [
            x if p is None else found[p] for x, p in zip(self._leaves, self._places, strict=True)
        ]
        return trees.unflatten(leaves, self._spec)


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


def record(
    func: Callable, call: Callable[[], Any], tensors: Sequence[torch.Tensor], given: Sequence[Any]
) -> Recording:
    """Make a call and its program. ``tensors`` are those of its arguments that it varies with."""
    guards = Guards(func, given)
    recorder = Recorder(tensors, guards.tensors)
    if guards.too_many:
        recorder.fails("the function reaches too much of Python's state to watch")
    before = stack.listening
    with ExitStack() as during:
        during.enter_context(recorder)
        during.enter_context(Watch(recorder))
        made_aside.append(recorder.made_aside)
        during.callback(made_aside.remove, recorder.made_aside)
        during.callback(setattr, stack, "listening", before)
        stack.listening = (*before, _Questions(recorder))
        result = call()
    leaves, spec = trees.flatten(result)
    odd = next((x for x in leaves if not isinstance(x, (torch.Tensor, *_WORDS))), None)
    if odd is not None:
        recorder.fails(f"a result of class {type(odd).__name__}")
    if not guards.hold():
        recorder.fails("it changes Python's state: a list, an attribute, a global")
    results = [x for x in leaves if isinstance(x, torch.Tensor)]
    program = recorder.program(results)
    if program is None:
        return Recording(result, None, recorder.why)
    guards.watch(program.captured.values())
    counted = iter(range(len(results)))
    places = [next(counted) if isinstance(x, torch.Tensor) else None for x in leaves]
    return Recording(result, Recorded(clean(program), guards, leaves, spec, places), None)
