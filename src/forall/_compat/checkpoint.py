"""Code of the user's that torch runs in a backward pass, told where it belongs.

Checkpoints learn where a function ran, and of draws that are no generator's. Hooks on saved tensors
unpack where they packed. While a backward pass runs, function modes stay on, and what the backward
of a Function makes belongs to the level of its gradients.
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


def _nothing() -> Iterator[None]:
    """Before the function and after it, where checkpoint asks."""
    yield


def install(
    in_place: Callable,
    drawing: Callable,
    tangents: Callable[[], bool],
    modes: Callable[[], AbstractContextManager],
    making: Callable[[Any], AbstractContextManager | None],
    theirs: Callable[[tuple, Any], Any],
    within: Callable[[], Keeps],
    hooks: Callable[[Any, bool], AbstractContextManager],
) -> None:
    """Put all of this in torch's place, once.

    What runs again runs by ``in_place(function)``, made where it is first run; where draws are to
    be repeated, by ``in_place(drawing(function))``. While there may be ``tangents`` nothing is
    recomputed, for what autograd saves loses them on its way through the hooks of a checkpoint: the
    same numbers for more memory. A backward pass runs in ``modes()``, the user's part of a node in
    ``making(gradients)``, and what that gives goes on as ``theirs(gradients, it)``. A checkpoint
    keeps the tensors for which ``within()``, asked where it begins, says so. A pass from outputs,
    which is to be differentiated or not, runs in ``hooks(outputs, create_graph)``, and in the
    thread that asks for it, see NOTE [device threads].
    """
    if checkpoint.CheckpointFunction.forward is not _forward:
        return
    _install_checkpoints(in_place, drawing, tangents, within)
    _install_hooks(in_place, tangents)
    for name, backward in _backwards.items():
        setattr(BackwardCFunction, name, _in_its_place(backward, making, theirs))

    @functools.wraps(_engine)
    def engine(outputs: Any, given: Any, retain: Any, create_graph: bool, *args: Any, **kw: Any):
        threads = one_thread() if exception_safety.has_called() else nullcontext()
        with threads, modes(), hooks(outputs, create_graph):
            return _engine(outputs, given, retain, create_graph, *args, **kw)

    for caller in ("backward", "grad"):
        versions.require_called("_engine_run_backward", torch.autograd, caller)
    torch.autograd._engine_run_backward = engine


def _in_its_place(backward: Callable, making: Callable, theirs: Callable) -> Callable:
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
            return _nothing()
        again = in_place(drawing(function) if preserve else function)
        keeps = within()
        return _Begun(keeps, start(_keeping(keeps, again)))

    def apply(cls: Any, function: Callable, preserve: bool, *args: Any) -> Any:
        if tangents():
            return function(*args)
        return super(checkpoint.CheckpointFunction, cls).apply(function, preserve, *args)

    checkpoint.CheckpointFunction.forward = staticmethod(forward)
    checkpoint.CheckpointFunction.apply = classmethod(apply)  # pyright: ignore[reportAttributeAccessIssue]
    versions.wrap_checkpoints(begin)


class _Kept(NamedTuple):
    """What is not computed again."""

    tensor: torch.Tensor


class _Now(exception_safety.Here):
    """What the checkpoint keeps that begins now, or has kept that is computed again."""

    keeps: Keeps = staticmethod(lambda _: False)


_now = _Now.made()


@contextmanager
def _that(keeps: Keeps) -> Iterator[None]:
    was, _now.keeps = _now.keeps, keeps
    try:
        yield
    finally:
        _now.keeps = was


class _Begun(Generator):
    """A checkpoint whose hooks are told, where they are entered, what it keeps."""

    def __init__(self, keeps: Keeps, hooks: Generator) -> None:
        self.keeps, self.hooks = keeps, hooks

    def send(self, value: Any) -> Any:
        with _that(self.keeps):
            return self.hooks.send(value)

    def throw(self, *error: Any) -> Any:
        return self.hooks.throw(*error)


def _keeping(keeps: Keeps, function: Callable) -> Callable:
    def run(*args: Any, **kwargs: Any) -> Any:
        with _that(keeps):
            return function(*args, **kwargs)

    return run


def _install_hooks(
    in_place: Callable,
    tangents: Callable[[], bool],
) -> None:
    def of_checkpoint(pack: Callable, unpack: Callable, keeps: Keeps | None) -> None:
        """As they are: they have been told where. What runs in a checkpoint is its own affair."""

        def packed(tensor: torch.Tensor) -> Any:
            return _Kept(tensor) if (keeps or _now.keeps)(tensor) else pack(tensor)

        def unpacked(x: Any) -> Any:
            return x.tensor if type(x) is _Kept else unpack(x)

        torch._C._autograd._push_saved_tensors_default_hooks(packed, unpacked)

    def enter(self: saved_tensors_hooks) -> None:
        pack, unpack = self.pack_hook, self.unpack_hook
        if type(self).__module__ == checkpoint.__name__:
            again = type(self) is checkpoint._recomputation_hook
            of_checkpoint(pack, unpack, None if again else _now.keeps)
            return

        def packed(tensor: torch.Tensor) -> Any:
            # Torch packs under no_grad, which is none of the user's: it must cut no tangents.
            with torch.set_grad_enabled(tangents()):
                return pack(tensor), in_place(unpack)

        def unpacked(pair: Any) -> Any:
            kept, unpack_there = pair
            return unpack_there(kept)

        torch._C._autograd._push_saved_tensors_default_hooks(packed, unpacked)

    saved_tensors_hooks.__enter__ = enter
