"""The three autograd nodes through which values cross a level's border.

`Enter` (stack -> example) and `Exit` (example -> stack) are each other's derivative. `Share` brings
in a tensor from outside, the same for every example; its derivative leaves and sums over them.
The derivative is taken on the examples, by autograd itself; the rules run below it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from forall._batching.batched import Batched, wrap
from forall._core.levels import graph_free, lift, outside
from forall._torch.dispatch import has_tangent, users_tangents

if TYPE_CHECKING:
    from forall._batching.interpreter import VmapLevel

_call = torch.autograd.Function.__dict__["apply"].__func__


def carries(tensor: torch.Tensor) -> bool:
    """Whether autograd must see this tensor cross."""
    return (tensor.requires_grad and torch.is_grad_enabled()) or (
        users_tangents() and has_tangent(tensor)
    )


def enter(stack: torch.Tensor, axis: int, level: VmapLevel) -> torch.Tensor:
    """A stack from just outside ``level`` as one example of it."""
    if stack.is_complex() and stack.is_conj():
        stack = stack.resolve_conj()
    if stack.is_neg():
        stack = stack.resolve_neg()
    stack = lift(stack, level.parent) if stack.requires_grad else stack
    if carries(stack):
        with torch._C.DisableTorchFunction():
            return _call(Enter, stack, axis, level)
    return _entered(stack, axis, level)


def leave(example: torch.Tensor, axis: int, level: VmapLevel) -> torch.Tensor:
    """One example of ``level`` as a stack just outside it, examples at ``axis``."""
    if carries(example):
        with torch._C.DisableTorchFunction():
            return _call(Exit, example, axis, level)
    return _left(example, axis, level)


def share(tensor: torch.Tensor, level: VmapLevel) -> torch.Tensor:
    """A tensor of the level just outside, the same for every example of ``level``."""
    if carries(tensor):
        with torch._C.DisableTorchFunction():
            return _call(Share, tensor, level)
    return _shared(tensor, level)


def _entered(stack: torch.Tensor, axis: int, level: VmapLevel) -> Batched:
    b = wrap(graph_free(stack), axis, level)
    b.older = True
    return b


def _shared(tensor: torch.Tensor, level: VmapLevel) -> Batched:
    b = wrap(graph_free(tensor), None, level)
    b.older = True
    return b


def _left(example: torch.Tensor, axis: int, level: VmapLevel) -> torch.Tensor:
    """The stack itself where it is ours alone; a copy where it is older or shared by all."""
    if not isinstance(example, Batched) or example.level is not level:
        value = graph_free(example).unsqueeze(axis)
        shape = list(value.shape)
        shape[axis] = level.size
        return value.expand(shape).clone()
    value = example.value
    if example.axis is None:
        value = value.unsqueeze(axis)
        shape = list(value.shape)
        shape[axis] = level.size
        return value.expand(shape).clone()
    if example.older:
        value = value.clone()
    return value if example.axis == axis else value.movedim(example.axis, axis)


class Enter(torch.autograd.Function):
    """(.., B, ..) -> one example."""

    @staticmethod
    def forward(stack, axis, level):
        return _entered(stack, axis, level)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.axis, ctx.level = inputs

    @staticmethod
    def backward(ctx, g):
        with outside(ctx.level):
            return leave(g, ctx.axis, ctx.level), None, None

    @staticmethod
    def jvp(ctx, t, _axis, _level):
        return None if t is None else enter(t, ctx.axis, ctx.level)


class Exit(torch.autograd.Function):
    """One example -> (.., B, ..)."""

    @staticmethod
    def forward(example, axis, level):
        return graph_free(_left(example, axis, level))

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.axis, ctx.level = inputs

    @staticmethod
    def backward(ctx, g):
        with outside(ctx.level):
            return enter(g, ctx.axis, ctx.level), None, None

    @staticmethod
    def jvp(ctx, t, _axis, _level):
        return None if t is None else leave(t, ctx.axis, ctx.level)


class Share(torch.autograd.Function):
    """One tensor from outside, the same for every example: back comes the sum over examples."""

    @staticmethod
    def forward(tensor, level):
        return _shared(tensor, level)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.level = inputs

    @staticmethod
    def backward(ctx, g):
        with outside(ctx.level):
            return _summed(g, ctx.level), None

    @staticmethod
    def jvp(ctx, t, _level):
        return None if t is None else share(t, ctx.level)


def _summed(g: torch.Tensor, level: VmapLevel) -> torch.Tensor:
    if isinstance(g, Batched) and g.level is level and g.axis is None and not carries(g):
        return g.value * level.size
    return leave(g, 0, level).sum(0)


