"""A first call: made as it is, and recorded."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forall._core.levels import stack
from forall._programs.guards import Guards
from forall._programs.passes import clean
from forall._programs.recorder import Recorder, Watch
from forall._programs.replayed import Differentiated, Pullback, Recorded, Results
from forall._programs.statics import unboxed
from forall._programs.writing import function
from forall._torch import handover, trees
from forall._torch.dispatch import aside

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from forall._programs.program import Program

    Tensor = torch.Tensor

# What a result may be besides a tensor: it comes back as it is with each call.
_WORDS = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)

_WRITTEN = "it writes into a tensor from outside, with a derivative at stake"


class Recording(NamedTuple):
    """A first call: what it gave, and its program; or why it has none."""

    result: Any
    recorded: Recorded | None
    why: str | None
    moved: bool = False  # Python's state alone was in the way, which a first call may set up


def guarding(func: Callable, leaves: list) -> Guards:
    """What a call depends on besides its tensors, as it is now."""
    return Guards(func, [x for x in map(unboxed, leaves) if not _is_tensor(x)])


def record(
    func: Callable,
    leaves: list,
    spec: Any,
    write: Callable = function,
    guards: Guards | None = None,
    *,
    given: tuple[tuple, dict] | None = None,
    pulls: bool = True,
) -> Recording:
    """Make a call of these arguments, and its program, which ``write`` makes a function.

    ``given`` are the user's own containers of them, if they are at hand.

    Unless it ``pulls``, a call whose results require grad has none: recording the way back runs
    hooks and backward passes of the user's, once more than the user did.
    """
    leaves = [*map(unboxed, leaves)]
    guards = guards or guarding(func, leaves)
    tensors = [_variable(x) if pulls else x for x in leaves if _is_tensor(x)]
    recorder = Recorder(tensors, guards.tensors, guards.generators)
    if guards.why is not None:
        recorder.fails(guards.why)
    outside = [*filter(_is_tensor, leaves), *guards.tensors.values()]
    with handover.eagerly(), _same_history(recorder, outside), _seen_by(recorder), Watch(recorder):
        result = _called_once(recorder, func, leaves, spec, tensors, given)
    found, tree = trees.flatten(result)
    ends = [*filter(_is_tensor, found)]
    _judge(recorder, found, pulls)
    moved = recorder.why is None and not guards.hold()
    if moved:
        recorder.fails("it changes Python's state: a list, an attribute, a global")
    back = _pulled_back(recorder, tensors, ends) if pulls else None
    program = recorder.program(ends)
    if program is None:
        return Recording(result, None, recorder.why, moved)
    results = Results.of(found, tree)
    if back is None:
        made = Recorded(clean(program), guards, results, tensors, write)
    elif (why := _entangled(program)) is not None:
        return Recording(result, None, why)
    else:
        back, again = _cleaned(program, back), partial(_ends, func, leaves, spec)
        made = Differentiated(program, guards, results, tensors, write, back, again)
    guards.watch(program.captured.values())
    return Recording(result, made, None)


def _judge(recorder: Recorder, found: list, pulls: bool) -> None:
    if not pulls and any(x.requires_grad for x in filter(_is_tensor, found)):
        recorder.fails("a result requires grad")
    odd = next((x for x in found if not isinstance(x, (torch.Tensor, *_WORDS))), None)
    if odd is not None:
        recorder.fails(f"a result of class {type(odd).__name__}")


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def _variable(x: Tensor) -> Tensor:
    """What stands for an argument, so that a pull-back ends there and not in its history."""
    return x.view_as(x) if x.requires_grad and torch.is_grad_enabled() else x


def _filled(leaves: list, tensors: Sequence[Tensor]) -> list:
    """The leaves with these in the place of their tensors."""
    stand_ins = iter(tensors)
    return [next(stand_ins) if _is_tensor(x) else x for x in leaves]


def _called_once(
    recorder: Recorder,
    func: Callable,
    leaves: list,
    spec: Any,
    tensors: Sequence[Tensor],
    given: tuple[tuple, dict] | None,
) -> Any:
    """A call with the user's own lists and dicts, if it can be, which no program changes."""
    leaves = _filled(leaves, tensors)
    if given is not None and all(map(is_, trees.leaves(given), leaves)):
        args, kwargs = given
    else:
        args, kwargs = trees.unflatten(leaves, spec)
    before, was = trees.flatten((args, kwargs))
    result = func(*args, **kwargs)
    after, now = trees.flatten((args, kwargs))
    if now != was or not all(map(is_, after, before)):
        recorder.fails("it changes what it is given: a list, a dict")
    return result


def _ends(func: Callable, leaves: list, spec: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
    args, kwargs = trees.unflatten(_filled(leaves, tensors), spec)
    return [*filter(_is_tensor, trees.leaves(func(*args, **kwargs)))]


@contextmanager
def _same_history(recorder: Recorder, tensors: Sequence[Tensor]) -> Iterator[None]:
    """Nothing is written into these tensors from outside that a derivative would have to know."""
    histories = [t.grad_fn for t in tensors]
    yield
    if any(t.grad_fn is not history for t, history in zip(tensors, histories, strict=True)):
        recorder.fails(_WRITTEN)


@contextmanager
def _seen_by(recorder: Recorder) -> Iterator[None]:
    before = stack.listening, aside.told
    stack.listening = (*stack.listening, _Questions(recorder))
    aside.told = (*aside.told, recorder.made_aside)
    try:
        with recorder:
            yield
    finally:
        stack.listening, aside.told = before


def _pulled_back(
    recorder: Recorder, inputs: Sequence[Tensor], ends: Sequence[Tensor]
) -> Pullback | None:
    """Pull the results back to all that requires grad outside, if anything does."""
    moved = {id(y): i for i, y in reversed([*enumerate(ends)]) if y.requires_grad}
    if not torch.is_grad_enabled():  # what comes back as it came, or as a view, has no new history
        outside = {id(t) for t in (*inputs, *recorder.captured.values())}
        moved = {k: i for k, i in moved.items() if k not in outside and ends[i].grad_fn is not None}
    places = sorted(moved.values())
    if recorder.why is not None or not moved:
        return None
    ways = [*zip(recorder.inputs, inputs, strict=True), *recorder.captured.items()]
    wanted = [(n, t) for n, t in ways if t.requires_grad]
    if any(t._backward_hooks for _, t in wanted):
        recorder.fails("a tensor that it is to be differentiated in has a hook")
        return None
    if recorder.makes_leaves or not wanted:
        recorder.fails("a result's history leads to a tensor that the function has made a leaf")
        return None
    cotangents = [torch.ones_like(ends[i]) for i in places]
    numbers = [recorder.named(c) for c in cotangents]
    first = len(recorder.nodes)
    with _seen_by(recorder):
        found = torch.autograd.grad(
            [ends[i] for i in places],
            [t for _, t in wanted],
            cotangents,
            retain_graph=True,
            allow_unused=True,
        )
    gradients = [None if g is None else recorder.result(g) for g in found]
    if recorder.why is not None:
        return None
    return Pullback(
        recorder.nodes[first:],
        places,
        numbers,
        [n for n, _ in wanted],
        gradients,
    )


def _entangled(program: Program) -> str | None:
    """What of a program with a derivative one node of the graph outside cannot tell of."""
    roots = [v.root for v in program.values]
    outside = {roots[n] for n in (*program.inputs, *program.captured)}
    written = program.written()
    results = {*program.outputs}
    if written & outside:
        return _WRITTEN
    if written & {roots[n] for n in program.constants}:
        return "it writes into a tensor made of numbers, with a derivative at stake"
    if outside & {roots[n] for n in results} or len({roots[n] for n in results}) < len(results):
        return "a result shares memory with another tensor, with a derivative at stake"
    return None


def _cleaned(program: Program, back: Pullback) -> Pullback:
    """Clean both halves as one, which hold on to all that gradients are wanted of."""
    captured = dict(program.captured)
    results = len(program.outputs)
    program.inputs += back.cotangents
    program.outputs += [n for n in back.gradients if n is not None]
    clean(program, back.nodes)
    found = iter(program.outputs[results:])
    del program.outputs[results:]
    del program.inputs[len(program.inputs) - len(back.cotangents) :]
    program.captured.update({n: t for n, t in captured.items() if n in back.wanted})
    return back._replace(gradients=[None if n is None else next(found) for n in back.gradients])


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
