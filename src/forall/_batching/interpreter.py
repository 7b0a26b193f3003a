"""The vmap level: what runs while the user's function sees one example.

It is two modes. The dispatch mode sees every ATen call, below autograd, also factories and the
buffers that torch's own code makes. The function mode sees every API call before autograd does
and puts tensors from outside that require grad in their shared form (`border.Share`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from forall._batching import border, table
from forall._batching.batched import Batched, derive, levels_in, wrap
from forall._batching.resolve import resolve
from forall._core.levels import (
    Level,
    at,
    innermost,
    is_from_outside,
    lift,
    outside,
    second_name,
    stack,
    top,
)
from forall._torch.dispatch import (
    AUTOGRAD,
    CONJUGATE,
    autograd_below,
    has_tangent,
    is_excluded,
    set_lazy_bits,
    users_tangents,
)
from forall._torch.schema import facts
from forall._torch.wrapper import Wrapper

aten = torch.ops.aten
_HANDLERS = table.HANDLERS
_SHARED = table.SHARED
_DETACH = aten.detach.default


class VmapLevel(Level, TorchDispatchMode):
    """``size`` examples as one. ``randomness`` is the flag of `vmap`.

    With ``records_values`` autograd acts on the stacks, not on the examples, in the grad mode that
    the level was made in: what a pull-back needs that runs through a graph recorded further out.
    """

    def __init__(
        self,
        size: int,
        randomness: str = "error",
        parent: Level | None = None,
        *,
        records_values: bool = False,
    ) -> None:
        TorchDispatchMode.__init__(self)
        Level.__init__(self, parent)
        self.size = size
        self.randomness = randomness
        self.records_values = self.peels = records_values
        self.outer_grad = torch.is_grad_enabled()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler to leave our handler alone

    def share(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.records_values:
            shared = wrap(tensor, None, self)
            shared.older = True
            return shared
        return border.share(tensor, self)

    def push(self, h: Any, args: tuple) -> tuple:
        """``h`` as a function of stacks, one level further out."""

        def stacked(*stacks: torch.Tensor) -> tuple[torch.Tensor, ...]:
            again = VmapLevel(self.size, self.randomness, top())
            examples = [border.enter(s, 0, again) for s in stacks]
            with running(again):
                outs = h(*examples)
            return tuple(border.leave(y, 0, again) for y in outs)

        with outside(self):
            stacks = tuple(self._given(lift(a, self)) for a in args)
            return tuple(self._taken(y) for y in at(self.parent, stacked, stacks))

    def _taken(self, stack_: torch.Tensor) -> torch.Tensor:
        """A stack (B, *S) as one example, by the way that this level records."""
        return wrap(stack_, 0, self) if self.records_values else border.enter(stack_, 0, self)

    def _given(self, example: torch.Tensor) -> torch.Tensor:
        """One example as its stack (B, *S)."""
        if self.records_values:
            return border.undress(example, ((self, 0),))
        return border.leave(example, 0, self)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for t in types:
            if issubclass(t, Wrapper):
                for level in levels_in(args, kwargs or {}):
                    if level is not self and not level.is_outside(self):
                        return NotImplemented  # an inner value: its level acts first
                break
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """One operator on values of this level, with this level's modes off."""
        with torch._C.DisableTorchFunction():
            if func is _DETACH and not is_excluded(AUTOGRAD):
                return second_name(args[0])
            if self.records_values:
                with autograd_below(grad=self.outer_grad, forward=self.outer_grad):
                    return self._run(func, args, kwargs)
            if not is_excluded(CONJUGATE):
                return self._run(func, args, kwargs)
            set_lazy_bits(True)
            try:
                return self._run(func, args, kwargs)
            finally:
                set_lazy_bits(False)

    def _run(self, func: Any, args: tuple, kwargs: dict) -> Any:
        for a in args:
            if type(a) is Batched:
                if a.axis is not None and a.level is self:
                    break
            elif type(a) in _SEQUENCES and any(
                type(b) is Batched and b.axis is not None and b.level is self for b in a
            ):
                break
        else:
            if not kwargs or not any(
                type(a) is Batched and a.axis is not None and a.level is self
                for a in kwargs.values()
            ):
                return run_shared(self, func, args, kwargs)
        handler = _HANDLERS.get(func)
        if handler is None:
            handler = resolve(func)
        return handler(self, func, args, kwargs)

    def share_captured(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The arguments with tensors from outside that carry a derivative in their shared form."""
        args = tuple(self._shared(a) for a in args)
        if kwargs:
            kwargs = {k: self._shared(a) for k, a in kwargs.items()}
        return args, kwargs

    def _shared(self, a: Any) -> Any:
        if isinstance(a, torch.Tensor):
            if (a.requires_grad or (users_tangents() and has_tangent(a))) and is_from_outside(
                a, self
            ):
                return lift(a, self)
        elif type(a) in _SEQUENCES and a:
            return type(a)([self._shared(b) for b in a])
        return a


_SEQUENCES = frozenset({list, tuple})


def run_shared(level: VmapLevel, func: Any, args: tuple, kwargs: dict) -> Any:
    """An operator whose arguments are the same for all examples runs once."""
    special = _SHARED.get(func)
    if special is not None:
        return special(level, func, args, kwargs)
    fact = facts(func)
    if fact.seeded:
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(level, func, args, kwargs)
    if fact.mutates:
        return _HANDLERS["shared write"](level, func, args, kwargs)
    plain = [_plain(a, level) for a in args]
    if kwargs:
        out = func(*plain, **{k: _plain(a, level) for k, a in kwargs.items()})
    else:
        out = func(*plain)
    if fact.view and isinstance(args[0], Batched) and args[0].level is level:
        return _derived(args[0], func, args[1:], kwargs, out)
    return _wrapped(out, level)


def _plain(a: Any, level: VmapLevel) -> Any:
    if type(a) is Batched:
        return a.value if a.level is level else a
    if type(a) in _SEQUENCES and a:
        return [_plain(b, level) for b in a]
    return a


def _wrapped(out: Any, level: VmapLevel) -> Any:
    if isinstance(out, torch.Tensor):
        return wrap(out, None, level)
    if isinstance(out, (list, tuple)):
        return type(out)(_wrapped(o, level) for o in out)
    return out


def _derived(base: Batched, func: Any, rest: tuple, kwargs: dict, out: Any) -> Any:
    """Views of a shared tensor, each with the call that re-derives it should the base change."""
    if isinstance(out, torch.Tensor):
        return derive(base, out, None, table.view_call(func, rest, kwargs, None, base))
    return type(out)(
        derive(base, o, None, table.view_call(func, rest, kwargs, i, base))
        for i, o in enumerate(out)
    )


# Getters and setters that read or change the tensor itself: sharing would answer for another.
_ITSELF = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("requires_grad", "grad_fn", "shape", "grad", "is_leaf", "dtype", "device", "ndim")
) | {
    torch.Tensor.grad.__set__,
    torch.Tensor.requires_grad.__set__,
    torch.Tensor.requires_grad_,
    torch.Tensor.detach,
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.register_hook,
    torch.Tensor.retain_grad,
    torch.Tensor.backward,
    torch.autograd.backward,
}


class Sharing(TorchFunctionMode):
    """One for all nested levels of a thread: it asks which level is innermost at each call."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if (
                (torch.is_grad_enabled() or users_tangents())
                and func not in _ITSELF
                and _carries(args, kwargs)
            ):
                args, kwargs = self._share(args, kwargs or {})
            return func(*args, **kwargs) if kwargs else func(*args)

    def _share(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        levels = levels_in(args, kwargs)
        running = top()
        if running is not None:
            levels.append(running)
        level = innermost(levels) if levels else None
        while level is not None and not (
            isinstance(level, VmapLevel) and not level.records_values
        ):
            level = level.parent  # only levels that record on their examples share
        return (args, kwargs) if level is None else level.share_captured(args, kwargs)


def _carries(args: tuple, kwargs: dict | None) -> bool:
    """Whether any argument might need sharing: a cheap look before the careful one."""
    tangents = users_tangents()
    for a in args if not kwargs else (*args, *kwargs.values()):
        if isinstance(a, torch.Tensor):
            if a.requires_grad or tangents:
                return True
        elif type(a) in _SEQUENCES and _carries(tuple(a), None):
            return True
    return False


class running:
    """Push a level with its modes, and take all of it back however the body ends."""

    __slots__ = ("level", "previous", "sharing")

    def __init__(self, level: VmapLevel) -> None:
        self.level = level

    def __enter__(self) -> VmapLevel:
        level = self.level
        self.previous = stack.top
        self.sharing = None
        level.active = True
        stack.top = level
        try:
            level.__enter__()
            if not level.records_values:
                sharing = Sharing()
                sharing.__enter__()
                self.sharing = sharing
        except BaseException:
            self._leave()
            raise
        return level

    def __exit__(self, *error: object) -> None:
        if self.sharing is not None:
            self.sharing.__exit__(None, None, None)
        self.level.__exit__(None, None, None)
        self._leave()

    def _leave(self) -> None:
        stack.top = self.previous
        self.level.active = False
        self.level.lifted.clear()

