"""The autograd nodes through which values cross the boundary of a level.

`Unstack` (stack -> example) and `Restack` (the reverse) are each other's derivative. `Broadcast`
brings in a tensor from outside, the same for every example; its derivative is the sum over
examples. Autograd itself takes derivatives of the examples; the rules run below it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from forall._compat.dispatch_state import (
    apply_own_function,
    functions_off,
    get_users_tangent,
    has_tangent,
    has_users_tangents,
    is_accumulating,
    is_at_c_node,
    is_functorch_wrapped,
    is_legacy_batched,
    is_torch_func_value,
    make_plain_alias,
)
from forall._compat.documented_error import documented_error
from forall._compat.op_schema import get_facts
from forall._compat.private_api import get_version, set_version
from forall._compat.wrapper_tensor import Wrapper
from forall._core.errors import format_columns, format_short
from forall._core.levels import alias_for_autograd, graph_free, level_of, lift, run_outside
from forall._core.version_counter import VersionCount
from forall._vmap.batched_cotangents import (
    is_pullback_value,
    strip_cotangent_wrappers,
    unwrap_at_node,
    unwrap_on_entry,
    unwrap_on_exit,
    wrap_cotangents,
)
from forall._vmap.batched_tensor import BatchedTensor, wrap_existing, wrap_stack
from forall._vmap.lazy_grad.lazy_tensor import LazyGrad

if TYPE_CHECKING:
    from forall._vmap.batched_cotangents import CotangentWrappers
    from forall._vmap.vmap_level import VmapLevel


_DETACH = torch.ops.aten.detach.default
_DEVICE = torch.ops.prim.device.default  # a fake tensor is asked for it by autograd's nodes


def refuse_torch_transforms(tensor: torch.Tensor) -> None:
    """Refuse a tensor that a torch transform wrapped: torch's level lies inside all of ours."""
    tangent = get_users_tangent(tensor)
    if is_functorch_wrapped(tensor) or (tangent is not None and is_functorch_wrapped(tangent)):
        raise documented_error(NotImplementedError, "mixed-with-torch-func")(
            "vmap: a transform of torch (torch.vmap, torch.func, or torch.autograd with "
            "is_grads_batched=True or vectorize=True) runs through a call of forall.vmap.\n"
            "Inside, its values are out of reach.\n"
            "Use forall's transform for the outer one too: forall.jacrev, jacfwd, hessian, or "
            "forall.vmap of vjp's function."
        )


def check_all_shared(level: VmapLevel, func: Any, met: list[torch.Tensor]) -> None:
    """Refuse an operator that autograd recorded on a tensor from outside, past `Broadcast`.

    The function mode cannot share what it does not see: transforms of torch.func wrap their
    primals in C++. The derivative would be that of one example, or a value of the ended level.
    """
    if level.records_on_value or not torch.is_grad_enabled() or func is _DEVICE:
        return
    for t in met:
        if t.requires_grad and level_of(t) is not level and not is_accumulating():
            if func is _DETACH or get_facts(func).mutates:
                return
            raise documented_error(NotImplementedError, "mixed-with-torch-func")(
                f"vmap: {func} reached a tensor from outside that requires grad by a way on which "
                "it could not be shared.\n"
                f"{format_columns([('from outside', format_short(t))])}\n"
                "A transform of torch.func inside vmap does so with its argument.\n"
                "Use forall's transform, or give it a clone made inside the function (.clone())."
            )


def is_at_outer_node(level: VmapLevel, met: list[torch.Tensor]) -> bool:
    """Return True in a backward pass at a node in C++ that autograd recorded outside ``level``.

    A pull-back from outside was called on stacks, and is differentiated: its values stay outside.
    """
    return (
        not level.records_on_value
        and torch.is_grad_enabled()
        and any(t.requires_grad and level_of(t) is not level for t in met)
        and is_at_c_node()
    )


def needs_boundary_node(tensor: torch.Tensor) -> bool:
    """True if autograd must record that this tensor crosses."""
    return (tensor.requires_grad and torch.is_grad_enabled()) or (
        forward_ad._current_level >= 0 and has_users_tangents() and has_tangent(tensor)
    )


def _is_plain_stack(stack: torch.Tensor) -> bool:
    """True if a stack is plain numbers: no history, tangent, lazy bit or other level."""
    return (
        type(stack) is torch.Tensor
        and not (stack.requires_grad or stack.is_complex() or stack.is_neg())
        and not (is_torch_func_value(stack) or is_legacy_batched(stack))
        and not (forward_ad._current_level >= 0 and has_users_tangents())
    )


def stack_to_example(
    stack: torch.Tensor, axis: int, level: VmapLevel, worn: CotangentWrappers = ()
) -> torch.Tensor:
    """A stack from just outside ``level`` as one example of it."""
    with functions_off():
        if not worn and _is_plain_stack(stack):
            return _mark_external(wrap_stack(stack, axis, level), stack, stack)
        if is_pullback_value(stack, level):
            value, at, n = unwrap_on_entry(stack, axis)
            return wrap_stack(stack_to_example(value, at, level, worn), n, stack.level)
        refuse_torch_transforms(stack)
        if stack.is_complex() and stack.is_conj():
            stack = stack.resolve_conj()
        if stack.is_neg():
            stack = stack.resolve_neg()
        stack = lift(stack, level.parent) if stack.requires_grad else stack
        bare, wears = strip_cotangent_wrappers(stack)
        worn = (*wears, *worn)
        if needs_boundary_node(bare):
            return apply_own_function(Unstack, bare, axis, level, worn)
        return _wrap_entering(bare, axis, level, worn)


def example_to_stack(
    example: torch.Tensor, axis: int, level: VmapLevel, worn: CotangentWrappers = ()
) -> torch.Tensor:
    """One example of ``level`` as a stack just outside it, examples at ``axis``."""
    with functions_off():
        is_own = type(example) is BatchedTensor and example.level is level
        if is_own and not (worn or example.requires_grad) and _is_plain_stack(example.value):
            return _unwrap_leaving(example, axis, level)
        if is_pullback_value(example, level):
            value, at, n = unwrap_on_exit(example, axis)
            return wrap_stack(example_to_stack(value, at, level, worn), n, example.level)
        if type(example) is BatchedTensor and example.level is not level:
            example = example.level.complete_gradient_for(example, level)
        refuse_torch_transforms(example)
        crosses = needs_boundary_node(example)
        if crosses:  # by `Broadcast` first, if it is a captured tensor
            example = lift(example, level)
        # Made here and not in the node: a node's forward runs under no_grad, and there the tangents
        # that a value holds, and its history further out, would be cut.
        value, worn = unwrap_at_node(_unwrap_leaving(example, axis, level), worn)
        if not crosses:
            return value
        bare, wears = strip_cotangent_wrappers(value)
        # Another tensor than the value: it gets a history that may have saved the value. A tangent
        # that the value has comes from outside, and crosses as the example's.
        wrapped = isinstance(bare, Wrapper)
        made = [alias_for_autograd(bare) if wrapped else make_plain_alias(bare, moves=False)]
        if isinstance(example, BatchedTensor) and example.family is not None:
            example.family.left = VersionCount(bare)
        return wrap_cotangents(
            apply_own_function(Restack, example, made, axis, level, (*wears, *worn)), wears
        )


def broadcast_to_examples(tensor: torch.Tensor, level: VmapLevel) -> torch.Tensor:
    """A tensor of the level just outside, the same for every example of ``level``."""
    with functions_off():
        if needs_boundary_node(tensor):
            return apply_own_function(Broadcast, tensor, level)
        return _wrap_shared(tensor, level)


def hand_back_history(
    example: torch.Tensor, stack: torch.Tensor, axis: int, level: VmapLevel
) -> bool:
    """Give a mapped argument the history of what the examples have written into it, if they have.

    Its numbers are there already: rules write into the caller's memory, but below autograd.
    """
    node = example.grad_fn
    if node is None or isinstance(node, Unstack._backward_cls):
        return False
    stack.copy_(example_to_stack(example, axis, level))
    if isinstance(example, BatchedTensor) and example.source_version is not None:
        example.source_version.renew()
    return True


def list_written_captures(level: VmapLevel) -> list[tuple[torch.Tensor, BatchedTensor]]:
    """The captured tensors of a call whose stand-ins were written into with a history, with these.

    A stand-in is made by `Broadcast`; a write that autograd records gives it another node.
    """
    return [
        (t, s)
        for t, s in level.lift_cache.values()
        if t.requires_grad
        and type(s) is BatchedTensor
        and s.grad_fn is not None
        and not isinstance(s.grad_fn, Broadcast._backward_cls)
    ]


def hand_back_captured(t: torch.Tensor, stand_in: BatchedTensor, level: VmapLevel) -> None:
    """Give a captured tensor the history of what the call has written into its stand-in.

    Its numbers are there already, as the stand-in has its memory.
    """
    with functions_off():
        level.state.mutation_log.keep_history(t)
        give_history(lift(t, level.parent), keep_shared(stand_in))


def give_history(target: torch.Tensor, value: torch.Tensor) -> None:
    """Give the target the history of a value that it holds, written there below autograd.

    That counts no write: a derivative that has read the target meanwhile compares the count.
    """
    if value.requires_grad:
        count = get_version(target)
        target.copy_(value)
        set_version(target, count)


def keep_shared(example: BatchedTensor) -> torch.Tensor:
    """The value that is left of one that all examples share, when its level has ended."""
    with functions_off():
        return (
            apply_own_function(KeepFirst, example, example.level)
            if needs_boundary_node(example)
            else example.value
        )


def _wrap_entering(
    bare: torch.Tensor, axis: int, level: VmapLevel, worn: CotangentWrappers
) -> BatchedTensor:
    free = graph_free(bare)
    return _mark_external(wrap_stack(wrap_cotangents(free, worn), axis, level), bare, free)


def _wrap_shared(tensor: torch.Tensor, level: VmapLevel) -> BatchedTensor:
    free = graph_free(tensor)
    return _mark_external(wrap_existing(free, None, level), tensor, free)


def _mark_external(b: BatchedTensor, tensor: torch.Tensor, free: torch.Tensor) -> BatchedTensor:
    """Mark ``b`` as a tensor from outside; ``free`` is that tensor without history."""
    own: Any = b.__dict__
    own["is_external"], own["source_version"] = (
        True,
        VersionCount(tensor if isinstance(tensor, Wrapper) else free),
    )
    return b


def _unwrap_leaving(example: torch.Tensor, axis: int, level: VmapLevel) -> torch.Tensor:
    """The stack itself where it is ours alone; a copy where it is older or shared by all."""
    if isinstance(example, BatchedTensor) and example.level is level:
        value, now = example.value, example.axis
    else:
        value, now = graph_free(example), None
    value = value.resolve_conj().resolve_neg()  # a stack is new memory, which has no lazy bits
    if now is None:
        stack = value.expand(level.size, *value.shape).movedim(0, axis)
        return stack.clone(memory_format=torch.contiguous_format)
    if example.is_external:
        value = value.clone()
    return value if now == axis else value.movedim(now, axis)


class Unstack(torch.autograd.Function):
    """(.., B, ..) -> one example."""

    @staticmethod
    def forward(stack, axis, level, worn):
        return _wrap_entering(stack, axis, level, worn)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.axis, ctx.level, ctx.worn = inputs

    @staticmethod
    def backward(ctx, g):
        if ctx.level.active:
            ctx.level.state.mutation_log.keep_grads(ctx)
        g = _drop_tangents(g, ctx.level)
        with run_outside(ctx.level):
            return example_to_stack(g, ctx.axis, ctx.level, ctx.worn), None, None, None

    @staticmethod
    def jvp(ctx, t, *_):
        return None if t is None else stack_to_example(t, ctx.axis, ctx.level, ctx.worn)


class Restack(torch.autograd.Function):
    """One example -> (.., B, ..); the stack is computed beforehand."""

    @staticmethod
    def forward(example, made, axis, level, worn):
        return made[0]

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, _, ctx.axis, ctx.level, ctx.worn = inputs

    @staticmethod
    def backward(ctx, g):
        with run_outside(ctx.level):
            return stack_to_example(g, ctx.axis, ctx.level, ctx.worn), None, None, None, None

    @staticmethod
    def jvp(ctx, t, *_):
        return None if t is None else example_to_stack(t, ctx.axis, ctx.level, ctx.worn)


class Broadcast(torch.autograd.Function):
    """One tensor from outside, the same for every example; its derivative is the sum over them."""

    @staticmethod
    def forward(tensor, level):
        return _wrap_shared(tensor, level)

    @staticmethod
    def setup_context(ctx, inputs, output):
        tensor, ctx.level = inputs
        ctx.leaf = id(tensor) if tensor.is_leaf else None

    @staticmethod
    def backward(ctx, g):
        if ctx.level.active:
            if ctx.leaf is not None:
                ctx.level.state.mutation_log.leaves.add(ctx.leaf)
            ctx.level.state.mutation_log.keep_grads(ctx)
        g = _drop_tangents(g, ctx.level)
        with run_outside(ctx.level):
            return sum_over_examples(g, ctx.level), None

    @staticmethod
    def jvp(ctx, t, _level):
        return None if t is None else broadcast_to_examples(t, ctx.level)


class SumOverBatch(torch.autograd.Function):
    """The sum over examples of a lazy gradient: the transpose of `Broadcast`."""

    @staticmethod
    def forward(g):
        return g.deferred.sum_examples()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.level = inputs[0].level

    @staticmethod
    def backward(ctx, g):
        with run_outside(ctx.level):
            return broadcast_to_examples(g, ctx.level)

    @staticmethod
    def jvp(ctx, t):
        return None if t is None else sum_over_examples(t, ctx.level)


class KeepFirst(torch.autograd.Function):
    """A value shared by all examples, kept after the call as the loop's first example left it.

    Its derivative goes to the first example alone: `Broadcast` would count it once per example.
    """

    @staticmethod
    def forward(example, level):
        return alias_for_autograd(example.value)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.level = inputs

    @staticmethod
    def backward(ctx, g):
        with run_outside(ctx.level), functions_off():
            nothing = g.new_zeros(()).expand(ctx.level.size - 1, *g.shape)
            return stack_to_example(torch.cat([g.unsqueeze(0), nothing]), 0, ctx.level), None

    @staticmethod
    def jvp(ctx, t, _level):
        return None if t is None else keep_shared(t)


def _drop_tangents(g: torch.Tensor, level: VmapLevel) -> torch.Tensor:
    """Drop tangents of a `jvp` inside ``level`` from a gradient that a pass takes further out."""
    while (
        isinstance(g, Wrapper)
        and not isinstance(g, BatchedTensor)
        and level.root in g.level.entry.around
    ):
        with run_outside(g.level):
            g = g.level.fallback_value(g)
    return g


def sum_over_examples(g: torch.Tensor, level: VmapLevel) -> torch.Tensor:
    if type(g) is LazyGrad and g.level is level:
        if not needs_boundary_node(g):
            return unwrap_at_node(g.deferred.sum_examples(), ())[0]
        if not g.records_on_value:
            return apply_own_function(SumOverBatch, g)
        g.materialize()
    if (
        isinstance(g, BatchedTensor)
        and g.level is level
        and g.axis is None
        and not needs_boundary_node(g)
    ):
        return g.value * _count_gradients(level)
    stack = example_to_stack(g, 0, level)
    # Directions of one call have one gradient, whatever the axis it came out with.
    return (
        stack.sum(0)
        if _count_gradients(level) == level.size
        else stack[0] * _count_gradients(level)
    )


def _count_gradients(level: VmapLevel) -> int:
    """The number of gradients of one shared value: one for each call of the function."""
    return level.state.calls if level.active and level.state.calls is not None else level.size
