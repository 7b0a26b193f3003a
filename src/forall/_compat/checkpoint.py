"""User code that torch runs in a backward pass, run at the level where it belongs.

Checkpoints record where a function ran, and its draws of stateless random numbers. Hooks on saved
tensors unpack where they packed. While a backward pass runs, function modes stay on, and the
results of a Function's backward belong to the level of its gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Generator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint

from forall._compat import exception_safety, versions
from forall._compat.device_threads import one_thread
from forall._compat.exception_safety import contextmanager

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    Keeps = Callable[[torch.Tensor], bool]

_forward = checkpoint.CheckpointFunction.forward
_engine = torch.autograd._engine_run_backward
_backwards = {name: getattr(BackwardCFunction, name) for name in versions.BACKWARDS}


def _skip_recomputation() -> Iterator[None]:
    """Yield once, as a checkpoint's generator that saves and recomputes nothing."""
    yield


def install_checkpoint_hooks(
    in_place: Callable,
    drawing: Callable,
    tangents: Callable[[], bool],
    modes: Callable[[], AbstractContextManager],
    making: Callable[[Any], AbstractContextManager | None],
    theirs: Callable[[tuple, Any], Any],
    within: Callable[[], Keeps],
    hooks: Callable[[Any, bool], AbstractContextManager],
) -> None:
    """Replace torch's functions that run user code in a backward pass, once.

    ``in_place(function)`` is made where a function first runs, and runs the function again in the
    same context. If draws are to be repeated, it is ``in_place(drawing(function))``. While
    ``tangents()`` is True nothing is recomputed: saved tensors would lose their tangents in the
    hooks of a checkpoint. The numbers are the same, for more memory.

    A backward pass runs in ``modes()``. The user's backward of a node runs in
    ``making(gradients)``, and its result is passed on as ``theirs(gradients, result)``. A
    checkpoint calls ``within()`` when it begins, for a test of the tensors that it keeps. A pass
    from outputs runs in ``hooks(outputs, create_graph)``, in the thread that starts it, see NOTE
    [device threads].
    """
    if checkpoint.CheckpointFunction.forward is not _forward:
        return
    _install_checkpoints(in_place, drawing, tangents, within)
    _install_hooks(in_place, tangents)
    for name, backward in _backwards.items():
        setattr(BackwardCFunction, name, _wrap_backward(backward, making, theirs))

    @functools.wraps(_engine)
    def engine(outputs: Any, given: Any, retain: Any, create_graph: bool, *args: Any, **kw: Any):
        threads = one_thread() if exception_safety.first_call.was_made else nullcontext()
        with threads, modes(), hooks(outputs, create_graph):
            return _engine(outputs, given, retain, create_graph, *args, **kw)

    for caller in ("backward", "grad"):
        versions.require_called("_engine_run_backward", torch.autograd, caller)
    torch.autograd._engine_run_backward = engine


def _wrap_backward(backward: Callable, making: Callable, theirs: Callable) -> Callable:
    @functools.wraps(backward)
    def run(self: Any, *gradients: Any) -> Any:
        if self._forward_cls.__module__.startswith("forall."):
            return backward(self, *gradients)
        place = making(gradients)
        if place is None:
            return theirs(gradients, backward(self, *gradients))
        with place:
            found = backward(self, *gradients)
        return theirs(gradients, found)

    return run


def _install_checkpoints(
    in_place: Callable,
    drawing: Callable,
    tangents: Callable[[], bool],
    within: Callable[[], Keeps],
) -> None:
    @functools.wraps(_forward)
    def forward(ctx: Any, function: Callable, preserve: bool, *args: Any) -> Any:
        again = in_place(drawing(function) if preserve else function)
        out = _forward(ctx, function, preserve, *args)
        ctx.run_function = again
        return out

    def begin(function: Callable, preserve: bool, start: Callable[[Callable], Generator]) -> Any:
        if tangents():
            return _skip_recomputation()
        again = in_place(drawing(function) if preserve else function)
        keeps = within()
        return _StartedCheckpoint(keeps, start(_with_keeps(keeps, again)))

    def apply(cls: Any, function: Callable, preserve: bool, *args: Any) -> Any:
        if tangents():
            return function(*args)
        return super(checkpoint.CheckpointFunction, cls).apply(function, preserve, *args)

    checkpoint.CheckpointFunction.forward = staticmethod(forward)
    checkpoint.CheckpointFunction.apply = classmethod(apply)  # pyright: ignore[reportAttributeAccessIssue]
    versions.wrap_checkpoints(begin)


class _KeptTensor(NamedTuple):
    """A saved tensor that is kept, and not recomputed."""

    tensor: torch.Tensor


class _CurrentCheckpoint(exception_safety.RestoredState):
    """The test of the current checkpoint for tensors that it keeps."""

    keeps: Keeps = staticmethod(lambda _: False)


_now = _CurrentCheckpoint.make_instance()


@contextmanager
def _set_keeps(keeps: Keeps) -> Iterator[None]:
    was, _now.keeps = _now.keeps, keeps
    try:
        yield
    finally:
        _now.keeps = was


class _StartedCheckpoint(Generator):
    """A checkpoint whose hooks find the test for kept tensors when they are entered."""

    def __init__(self, keeps: Keeps, hooks: Generator) -> None:
        self.keeps, self.hooks = keeps, hooks

    def send(self, value: Any) -> Any:
        with _set_keeps(self.keeps):
            return self.hooks.send(value)

    def throw(self, *error: Any) -> Any:
        return self.hooks.throw(*error)


def _with_keeps(keeps: Keeps, function: Callable) -> Callable:
    def run(*args: Any, **kwargs: Any) -> Any:
        with _set_keeps(keeps):
            return function(*args, **kwargs)

    return run


def _install_hooks(
    in_place: Callable,
    tangents: Callable[[], bool],
) -> None:
    def push_checkpoint_hooks(pack: Callable, unpack: Callable, keeps: Keeps | None) -> None:
        """Push a checkpoint's own hooks, which know their context, but keep tensors as tested."""

        def pack_or_keep(tensor: torch.Tensor) -> Any:
            return _KeptTensor(tensor) if (keeps or _now.keeps)(tensor) else pack(tensor)

        def unpack_or_return(x: Any) -> Any:
            return x.tensor if type(x) is _KeptTensor else unpack(x)

        torch._C._autograd._push_saved_tensors_default_hooks(pack_or_keep, unpack_or_return)

    def enter(self: saved_tensors_hooks) -> None:
        pack, unpack = self.pack_hook, self.unpack_hook
        if type(self).__module__ == checkpoint.__name__:
            again = type(self) is checkpoint._recomputation_hook
            push_checkpoint_hooks(pack, unpack, None if again else _now.keeps)
            return

        def pack_with_context(tensor: torch.Tensor) -> Any:
            # torch packs under its own no_grad, which must not cut the user's tangents.
            with torch.set_grad_enabled(tangents()):
                return pack(tensor), in_place(unpack)

        def unpack_with_context(pair: Any) -> Any:
            kept, unpack_there = pair
            return unpack_there(kept)

        torch._C._autograd._push_saved_tensors_default_hooks(pack_with_context, unpack_with_context)

    saved_tensors_hooks.__enter__ = enter
