"""In-place and out= operators on examples, which write into stacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._compat.documented_error import documented_error
from forall._compat.op_schema import find_functional, find_written_tensors, get_facts
from forall._core.axes import pad_rank
from forall._core.errors import format_columns, format_short, make_shared_write_error
from forall._vmap.batched_tensor import BatchedTensor, batch_alias_family, replace_stack
from forall._vmap.mutation.mutation_log import count_write
from forall._vmap.mutation.pending_updates import is_external
from forall._vmap.rule_makers.basic import (
    is_mapped,
    lower_shared,
    move_to_front,
    reenter_level,
    wrap_results,
)
from forall._vmap.rule_makers.pointwise import OperandConverter

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor
_GROWS = frozenset({torch.ops.aten.addbmm_.default})  # in place, but grows to the result's shape


# --- derived from the functional overload --------------------------------------------------------


def make_write_handler(functional: Any, done: tuple = ()) -> Callable:
    """Make a handler of in-place and out= forms: compute what they would write, then write it.

    ``done`` names the arguments that ``functional`` writes to by itself.
    """

    def handler(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
        fact = get_facts(func)
        mutates = [m for m in fact.mutates if m not in done]
        targets = [args[m] if isinstance(m, int) else kwargs.get(m) for m in mutates]
        rest = {k: a for k, a in kwargs.items() if k not in fact.out_names}
        with reenter_level(level):
            results = functional(*args, **rest)
        if len(targets) == 1:  # for several, lists among them, the functional lists what it writes
            results = (results,)
        elif not fact.out_names:
            results = results[-len(targets) :]
        put = _write_out if fact.out_names or func in _GROWS else _write_in_place
        for target, result in zip(targets, results, strict=True):
            if isinstance(target, (list, tuple)):
                for t, r in zip(target, result, strict=True):
                    put(level, func, t, r)
            elif target is not None:
                put(level, func, target, result)
        return _pack_targets(targets) if func._schema.returns else None

    return handler


def _write_in_place(level: Any, func: Any, target: Any, result: Tensor) -> None:
    _check_cast(target, result)
    write_to_target(level, func, target, result)


def _check_cast(target: Any, result: Tensor) -> None:
    if not torch.can_cast(result.dtype, target.dtype):
        raise RuntimeError(
            f"result type {result.dtype} can't be cast to the desired output type {target.dtype}"
        )


def _write_out(level: Any, func: Any, target: Any, result: Tensor) -> None:
    _check_cast(target, result)
    if target.shape != result.shape:
        _resize_and_write(level, func, target, result)
    else:
        write_to_target(level, func, target, result)


def _resize_and_write(level: Any, func: Any, target: Any, result: Tensor) -> None:
    """Give an out= target the size of the result, as long as only this call knows the target."""
    if is_external(target, level):
        rows = [("written to", format_short(target)), ("result", format_short(result))]
        raise documented_error(RuntimeError, "resized")(
            f"vmap: {func} would resize what it writes to, a tensor from before the call.\n"
            f"{format_columns(rows)}\n"
            "Give it the result's shape, or use the form that returns a new tensor."
        )
    axis = 0 if is_mapped(result, level) else None
    value = lower_shared(result, level) if axis is None else move_to_front(result)
    replace_stack(target, value.to(target.dtype), axis)


def write_all(level: Any, func: Any, targets: list, results: Any) -> Any:
    """Write results into targets, as examples; returns the targets as the operator would."""
    for target, result in zip(targets, results, strict=True):
        write_to_target(level, func, target, result)
    return _pack_targets(targets)


def _pack_targets(targets: list) -> Any:
    return targets[0] if len(targets) == 1 else tuple(targets)


def write_to_target(level: Any, func: Any, target: Any, data: Tensor) -> None:
    """target.copy_(data) for every example, one level down."""
    view_of = get_writable_stack(level, func, target, [data])
    to, align = _align_to_target(level, view_of)
    to.copy_(align(data))


def _align_to_target(level: Any, stack: Tensor) -> tuple[Tensor, Any]:
    """The tensor to write to, and a function that aligns operands to it example by example.

    A single example is written as itself: as a stack of one, its memory can have other strides in a
    view of the same, and torch refuses to write to a tensor from one that it overlaps in part.
    """
    if stack.shape[0] == 1:
        return (
            stack.select(0, 0),
            lambda a: (
                move_to_front(a).select(0, 0) if is_mapped(a, level) else lower_shared(a, level)
            ),
        )
    rank = stack.dim() - 1

    def align(a: Tensor) -> Tensor:
        if is_mapped(a, level):
            return pad_rank(move_to_front(a), rank)
        v = lower_shared(a, level)  # one of more dims must not broadcast over the examples
        return v.unsqueeze(0) if v.dim() > rank else v

    return stack, align


def get_writable_stack(level: Any, func: Any, target: Any, data: list) -> Tensor:
    """The target's stack (B, *S) to write into, with an axis if the examples will differ in it."""
    count_write(target)
    if not (type(target) is BatchedTensor and target.level is level):
        raise make_shared_write_error(str(func), target, [d for d in data if is_mapped(d, level)])
    if target.axis is None:
        if target.is_external:
            raise make_shared_write_error(
                str(func), target, [d for d in data if is_mapped(d, level)]
            )
        batch_alias_family(target, level.size)
    if target.is_external:
        if level.state.logs_writes:
            level.state.mutation_log.log_mapped_write(func, target)
        level.state.mutation_log.keep_value(target.value)
        _bump_source_version(target)
    return move_to_front(target)


def _bump_source_version(target: BatchedTensor) -> None:
    """Bump the version of a caller's tensor, since rules write below autograd's version count.

    A view that was made below has a version of its own.
    """
    value = target.value if target.family is None else target.family.value
    if not isinstance(value, BatchedTensor):
        torch.autograd.graph.increment_version(value)
        if target.source_version is not None:
            target.source_version.renew()


def pointwise_in_place(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """x.op_(y, ..): the examples of the others broadcast to x's."""
    target = args[0]
    to, align = _align_to_target(level, get_writable_stack(level, func, target, list(args[1:])))
    operands = OperandConverter(level, func, args, kwargs)

    def operand(a: Any) -> Any:
        return operands.convert(a, align(a)) if isinstance(a, Tensor) else a

    given, named = [operand(a) for a in args[1:]], {k: operand(a) for k, a in kwargs.items()}
    if operands.exact_in is None:
        func(to, *given, **named)
    else:
        functional: Any = find_functional(func)
        to.copy_(functional(to.float(), *given, **named))
    return target


def shared_data_write(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """Run an in-place or out= operator none of whose arguments differs between examples."""
    fact = get_facts(func)
    flat = find_written_tensors(func, args, kwargs)
    for target in flat:
        count_write(target)
    out = func(
        *[lower_shared(a, level) for a in args],
        **{k: lower_shared(a, level) for k, a in kwargs.items()},
    )
    for target in flat:
        ours = type(target) is BatchedTensor and target.level is level and target.axis is None
        if ours and target.shape != target.value.shape:
            replace_stack(target, target.value, None)
    targets = [args[m] if isinstance(m, int) else kwargs[m] for m in fact.mutates]
    if fact.out_names:
        return targets[0] if len(targets) == 1 else tuple(targets)
    if not func._schema.returns:
        return None
    if len(func._schema.returns) == 1:
        return targets[0]
    return wrap_results(out, None, level)
