"""The autograd nodes through which values cross the boundary of a level.

`Enter` (stack -> example) and `Exit` (example -> stack) are each other's derivative. `Share` brings
in a tensor from outside, the same for every example; its derivative is the sum over examples.
Autograd itself takes derivatives of the examples; the rules run below it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._compat.dispatch_state import (
    apply_function,
    functions_off,
    has_tangent,
    is_accumulating,
    plain_alias,
    torch_funcs,
    users_tangent,
    users_tangents,
)
from forall._compat.op_schema import facts
from forall._compat.wrapper_tensor import Wrapper
from forall._core.errors import columns, short
from forall._core.levels import graph_free, level_of, lift, outside, second_name
from forall._core.version_counter import Count
from forall._vmap.batched_cotangents import (
    dress,
    entering,
    is_within,
    leaving,
    settle,
    strip,
)
from forall._vmap.batched_tensor import Batched, named, wrap
from forall._vmap.lazy_grad.lazy_tensor import Unmade

if TYPE_CHECKING:
    from forall._vmap.batched_cotangents import Dress
    from forall._vmap.vmap_level import VmapLevel


_DETACH = torch.ops.aten.detach.default
_DEVICE = torch.ops.prim.device.default  # a fake tensor is asked for it by autograd's nodes


def refuse_torchs(tensor: torch.Tensor) -> None:
    """Refuse a tensor that a torch transform wrapped: torch's level lies inside all of ours."""
    tangent = users_tangent(tensor)
    if torch_funcs(tensor) or (tangent is not None and torch_funcs(tangent)):
        raise NotImplementedError(
            "vmap: a transform of torch (torch.vmap, torch.func, or torch.autograd with "
            "is_grads_batched=True or vectorize=True) runs through a call of forall.vmap.\n"
            "Inside, its values are out of reach.\n"
            "Use forall's transform for the outer one too: forall.jacrev, jacfwd, hessian, or "
            "forall.vmap of vjp's function."
        )


def all_shared(level: VmapLevel, func: Any, met: list[torch.Tensor]) -> None:
    """Refuse an operator that autograd recorded on a tensor from outside, past `Share`.

    The function mode cannot share what it does not see: transforms of torch.func wrap their
    primals in C++. The derivative would be that of one example, or a value of the ended level.
    """
    if level.records_values or not torch.is_grad_enabled() or func is _DEVICE:
        return
    for t in met:
        if t.requires_grad and level_of(t) is not level and not is_accumulating():
            if func is _DETACH or facts(func).mutates:
                return
            raise NotImplementedError(
                f"vmap: {func} reached a tensor from outside that requires grad by a way on which "
                "it could not be shared.\n"
                f"{columns([('from outside', short(t))])}\n"
                "A transform of torch.func inside vmap does so with its argument.\n"
                "Use forall's transform, or give it a clone made inside the function (.clone())."
            )


def carries(tensor: torch.Tensor) -> bool:
    """True if autograd must record that this tensor crosses."""
    return (tensor.requires_grad and torch.is_grad_enabled()) or (
        users_tangents() and has_tangent(tensor)
    )


def _is_bare(stack: torch.Tensor) -> bool:
    """True if a stack is plain numbers: no history, tangent, lazy bit or other level."""
    return (
        type(stack) is torch.Tensor
        and not (stack.requires_grad or stack.is_complex() or stack.is_neg())
        and not (users_tangents() or torch_funcs(stack))
    )


def _is_ours(example: torch.Tensor, level: VmapLevel) -> bool:
    """True if ``example`` is a value of ``level`` without history."""
    return type(example) is Batched and example.level is level and not example.requires_grad


def enter(stack: torch.Tensor, axis: int, level: VmapLevel, worn: Dress = ()) -> torch.Tensor:
    """A stack from just outside ``level`` as one example of it."""
    with functions_off():
        if not worn and _is_bare(stack):
            return _from_outside(wrap(stack, axis, level), stack, stack)
        if is_within(stack, level):
            value, at, n = entering(stack, axis)
            return wrap(enter(value, at, level, worn), n, stack.level)
        refuse_torchs(stack)
        if stack.is_complex() and stack.is_conj():
            stack = stack.resolve_conj()
        if stack.is_neg():
            stack = stack.resolve_neg()
        stack = lift(stack, level.parent) if stack.requires_grad else stack
        bare, wears = strip(stack)
        worn = (*wears, *worn)
        if carries(bare):
            return apply_function(Enter, bare, axis, level, worn)
        return _entered(bare, axis, level, worn)


def leave(example: torch.Tensor, axis: int, level: VmapLevel, worn: Dress = ()) -> torch.Tensor:
    """One example of ``level`` as a stack just outside it, examples at ``axis``."""
    with functions_off():
        if is_within(example, level):
            value, at, n = leaving(example, axis)
            return wrap(leave(value, at, level, worn), n, example.level)
        if type(example) is Batched and example.level is not level:
            example = example.level.completed(example, level)
        if not worn and _is_ours(example, level) and _is_bare(example.value):
            if example.axis is not None:
                return _own(example, example.value, axis)
            return _left(example, axis, level)
        refuse_torchs(example)
        crosses = carries(example)
        if crosses:  # by `Share` first, if it is a captured tensor
            example = lift(example, level)
        # Made here and not in the node: a node's forward runs under no_grad, and there the tangents
        # that a value holds, and its history further out, would be cut.
        value, worn = settle(_left(example, axis, level), worn)
        if not crosses:
            return value
        bare, wears = strip(value)
        # Another tensor than the value: it gets a history that may have saved the value. A tangent
        # that the value has comes from outside, and crosses as the example's.
        wrapped = isinstance(bare, Wrapper)
        made = [second_name(bare) if wrapped else plain_alias(bare, moves=False)]
        if isinstance(example, Batched) and example.family is not None:
            example.family.left = Count(bare)
        return dress(apply_function(Exit, example, made, axis, level, (*wears, *worn)), wears)


def share(tensor: torch.Tensor, level: VmapLevel) -> torch.Tensor:
    """A tensor of the level just outside, the same for every example of ``level``."""
    with functions_off():
        if carries(tensor):
            return apply_function(Share, tensor, level)
        return _shared(tensor, level)


def hand_back(example: torch.Tensor, stack: torch.Tensor, axis: int, level: VmapLevel) -> bool:
    """Give a mapped argument the history of what the examples have written into it, if they have.

    Its numbers are there already: rules write into the caller's memory, but below autograd.
    """
    node = example.grad_fn
    if node is None or isinstance(node, Enter._backward_cls):
        return False
    stack.copy_(leave(example, axis, level))
    if isinstance(example, Batched) and example.came is not None:
        example.came.renew()
    return True


def keep(example: Batched) -> torch.Tensor:
    """The value that is left of one that all examples share, when its level has ended."""
    with functions_off():
        return apply_function(Keep, example, example.level) if carries(example) else example.value


def _entered(bare: torch.Tensor, axis: int, level: VmapLevel, worn: Dress) -> Batched:
    free = graph_free(bare)
    return _from_outside(wrap(dress(free, worn), axis, level), bare, free)


def _shared(tensor: torch.Tensor, level: VmapLevel) -> Batched:
    free = graph_free(tensor)
    return _from_outside(named(free, None, level), tensor, free)


def _from_outside(b: Batched, tensor: torch.Tensor, free: torch.Tensor) -> Batched:
    """Mark ``b`` as a tensor from outside; ``free`` is that tensor without history."""
    own: Any = b.__dict__
    own["older"], own["came"] = True, Count(tensor if isinstance(tensor, Wrapper) else free)
    return b


def _left(example: torch.Tensor, axis: int, level: VmapLevel) -> torch.Tensor:
    """The stack itself where it is ours alone; a copy where it is older or shared by all."""
    if isinstance(example, Batched) and example.level is level:
        value, now = example.value, example.axis
    else:
        value, now = graph_free(example), None
    value = value.resolve_conj().resolve_neg()  # a stack is new memory, which has no lazy bits
    if now is None:
        return (
            value.unsqueeze(axis)
            .expand(*value.shape[:axis], level.size, *value.shape[axis:])
            .clone(memory_format=torch.contiguous_format)
        )
    return _own(example, value, axis)


def _own(example: Batched, value: torch.Tensor, axis: int) -> torch.Tensor:
    """The stack of a mapped value; a copy if it was there before the call."""
    if example.older:
        value = value.clone()
    return value if example.axis == axis else value.movedim(example.axis, axis)


class Enter(torch.autograd.Function):
    """(.., B, ..) -> one example."""

    @staticmethod
    def forward(stack, axis, level, worn):
        return _entered(stack, axis, level, worn)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.axis, ctx.level, ctx.worn = inputs

    @staticmethod
    def backward(ctx, g):
        if ctx.level.active:
            ctx.level.ledger.keep_grads(ctx)
        g = _without_tangents(g, ctx.level)
        with outside(ctx.level):
            return leave(g, ctx.axis, ctx.level, ctx.worn), None, None, None

    @staticmethod
    def jvp(ctx, t, *_):
        return None if t is None else enter(t, ctx.axis, ctx.level, ctx.worn)


class Exit(torch.autograd.Function):
    """One example -> (.., B, ..); the stack is computed beforehand."""

    @staticmethod
    def forward(example, made, axis, level, worn):
        return made[0]

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, _, ctx.axis, ctx.level, ctx.worn = inputs

    @staticmethod
    def backward(ctx, g):
        with outside(ctx.level):
            return enter(g, ctx.axis, ctx.level, ctx.worn), None, None, None, None

    @staticmethod
    def jvp(ctx, t, *_):
        return None if t is None else leave(t, ctx.axis, ctx.level, ctx.worn)


class Share(torch.autograd.Function):
    """One tensor from outside, the same for every example; its derivative is the sum over them."""

    @staticmethod
    def forward(tensor, level):
        return _shared(tensor, level)

    @staticmethod
    def setup_context(ctx, inputs, output):
        tensor, ctx.level = inputs
        ctx.leaf = id(tensor) if tensor.is_leaf else None

    @staticmethod
    def backward(ctx, g):
        if ctx.level.active:
            if ctx.leaf is not None:
                ctx.level.ledger.leaves.add(ctx.leaf)
            ctx.level.ledger.keep_grads(ctx)
        g = _without_tangents(g, ctx.level)
        with outside(ctx.level):
            return summed(g, ctx.level), None

    @staticmethod
    def jvp(ctx, t, _level):
        return None if t is None else share(t, ctx.level)


class Total(torch.autograd.Function):
    """The sum over examples of a lazy gradient: the transpose of `Share`."""

    @staticmethod
    def forward(g):
        return g.total()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.level = inputs[0].level

    @staticmethod
    def backward(ctx, g):
        with outside(ctx.level):
            return share(g, ctx.level)

    @staticmethod
    def jvp(ctx, t):
        return None if t is None else summed(t, ctx.level)


class Keep(torch.autograd.Function):
    """A value shared by all examples, kept after the call as the loop's first example left it.

    Its derivative goes to the first example alone: `Share` would count it once for each example.
    """

    @staticmethod
    def forward(example, level):
        return second_name(example.value)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.level = inputs

    @staticmethod
    def backward(ctx, g):
        with outside(ctx.level), functions_off():
            nothing = g.new_zeros(()).expand(ctx.level.size - 1, *g.shape)
            return enter(torch.cat([g.unsqueeze(0), nothing]), 0, ctx.level), None

    @staticmethod
    def jvp(ctx, t, _level):
        return None if t is None else keep(t)


def _without_tangents(g: torch.Tensor, level: VmapLevel) -> torch.Tensor:
    """Drop tangents of a `jvp` inside ``level`` from a gradient that a pass takes further out."""
    while isinstance(g, Wrapper) and not isinstance(g, Batched) and level.root in g.level.around:
        with outside(g.level):
            g = g.level.afterwards(g)
    return g


def summed(g: torch.Tensor, level: VmapLevel) -> torch.Tensor:
    if type(g) is Unmade and g.level is level:
        if not carries(g):
            return settle(g.total(), ())[0]
        if not g.peels:
            return apply_function(Total, g)
        g.made()
    if isinstance(g, Batched) and g.level is level and g.axis is None and not carries(g):
        return g.value * _count(level)
    stack = leave(g, 0, level)
    # Directions of one call have one gradient, whatever the axis it came out with.
    return stack.sum(0) if _count(level) == level.size else stack[0] * _count(level)


def _count(level: VmapLevel) -> int:
    """The number of gradients of one shared value: one for each call of the function."""
    return level.calls if level.active and level.calls is not None else level.size
