"""Custom autograd.Functions under our levels: the user's backward decides every derivative.

Function.apply does not pass the function mode, so it is wrapped once: captured arguments are
shared there too, and where a jvp is active the tangent is derived from the user's backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._batching import border
from forall._batching.batched import Batched
from forall._batching.interpreter import VmapLevel, running
from forall._core.levels import Level, innermost, is_from_outside, lift, outside, top
from forall._derivatives.forward import Dual, JvpLevel
from forall._derivatives.reversed import lowered
from forall._torch.wrapper import Wrapper

if TYPE_CHECKING:
    from collections.abc import Callable

_torchs = torch.autograd.Function.__dict__["apply"].__func__


def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """torch.autograd.Function.apply, which see; under a level captured tensors are shared first."""
    running_level = top()
    if running_level is None and not any(isinstance(a, Wrapper) for a in args):
        return _torchs(cls, *args, **kwargs)
    levels = [a.level for a in args if isinstance(a, Wrapper)]
    if running_level is not None:
        levels.append(running_level)
    level: Level = innermost(levels)
    if torch.is_grad_enabled() and not getattr(level, "records_values", False):
        args = tuple(
            lift(a, level)
            if isinstance(a, torch.Tensor) and a.requires_grad and is_from_outside(a, level)
            else a
            for a in args
        )
    if not any(isinstance(a, torch.Tensor) and _moves(a) for a in args):
        return _torchs(cls, *args, **kwargs)
    return _with_tangents(cls, level, args, kwargs)


def _moves(a: torch.Tensor) -> bool:
    """Whether a tangent of a jvp hides anywhere in this value."""
    while isinstance(a, Wrapper):
        if isinstance(a, Dual):
            return True
        a = a.value
    return False


def _with_tangents(cls: Any, level: Level, args: tuple, kwargs: dict) -> Any:
    places = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
    single: list[bool] = []
    others: list[Any] = []

    def h(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        filled = list(args)
        for i, t in zip(places, tensors, strict=True):
            filled[i] = t
        out = _torchs(cls, *filled, **kwargs)
        single[:] = [isinstance(out, torch.Tensor)]
        outs = (out,) if single[0] else out
        others[:] = [None if isinstance(o, torch.Tensor) else o for o in outs]
        return tuple(o for o in outs if isinstance(o, torch.Tensor))

    tensors = iter(_at(level, h, tuple(args[i] for i in places)))
    outs = tuple(next(tensors) if o is None else o for o in others)
    return outs[0] if single[0] else outs


def _at(level: Level | None, h: Callable, args: tuple) -> tuple:
    """``h`` on values of ``level``, run as far out as there is a tangent to derive."""
    if level is None or not any(_moves(a) for a in args):
        return h(*args)
    if isinstance(level, JvpLevel):
        return lowered(lambda *inner: _at(level.parent, h, inner), args, level)
    if not isinstance(level, VmapLevel):
        return h(*args)

    def stacked(*stacks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        again = VmapLevel(level.size, level.randomness, top())
        examples = [border.enter(s, 0, again) for s in stacks]
        with running(again):
            outs = h(*examples)
        return tuple(border.leave(y, 0, again) for y in outs)

    with outside(level):
        stacks = tuple(border.leave(_own(a, level), 0, level) for a in args)
        outs = _at(level.parent, stacked, stacks)
        return tuple(border.enter(y, 0, level) for y in outs)


def _own(a: torch.Tensor, level: Level) -> torch.Tensor:
    return a if isinstance(a, Batched) and a.level is level else lift(a, level)


def install() -> None:
    """Put our apply in torch's place, once."""
    torch.autograd.Function.apply = classmethod(apply)  # pyright: ignore[reportAttributeAccessIssue]


