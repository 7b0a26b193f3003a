"""Memory layouts of results: those of the loop, wherever the batch axis is.

A kernel lays out the dims of its result by the strides of its operands. An expanded or indexed dim
has no stride that says where it belongs, and an inner batch axis may change the order that one
example would get. So the first example is asked: its result is computed as in the loop, and if the
layout of the stack differs, the stack is copied.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from forall._compat.op_schema import map_arguments
from forall._core.axes import is_axis_inside
from forall._vmap.batched_tensor import BatchedTensor, compute_dense_strides, wrap_stack

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor


def is_layout_open(out: Any, values: list) -> bool:
    """True if no operand of a pointwise operator determines how the dims of its result lie."""
    shape = None
    for v in values:
        if isinstance(v, Tensor) and 0 not in v.stride():
            if shape is None:
                shape = (out if isinstance(out, Tensor) else out[0]).shape
            if v.shape == shape:
                return False
    return True


def match_example_layout(level: Any, func: Any, args: tuple, kwargs: dict, out: Any) -> Any:
    """The results of an operator on stacks, each laid out as the first example's is alone."""
    if not level.size:
        return out
    given, named = map_arguments(partial(_select_first, level=level), args, kwargs)
    one = func(*given, **named)
    if isinstance(out, Tensor):
        return _copy_to_layout(out, one, level)
    return type(out)(_copy_to_layout(o, n, level) for o, n in zip(out, one, strict=True))


def keep_example_layout(handler: Callable, asks: Callable = is_axis_inside) -> Callable:
    """A handler whose results lie as the first example's, if the operand's layout asks for it."""

    def handle(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
        out = handler(level, func, args, kwargs)
        x = args[0]
        if (
            type(x) is BatchedTensor
            and x.level is level
            and x.axis is not None
            and asks(x.value, x.axis)
        ):
            return match_example_layout(level, func, args, kwargs, out)
        return out

    return handle


def is_expanded_inside(value: Tensor, axis: int) -> bool:
    return 0 in value.stride() and is_axis_inside(value, axis)


def is_not_contiguous(value: Tensor, axis: int) -> bool:
    return axis != 0 or not value.is_contiguous()


def _select_first(a: Any, level: Any) -> Any:
    if type(a) is BatchedTensor and a.level is level:
        return a.value if a.axis is None else a.value.select(a.axis, 0)
    return a


def _copy_to_layout(out: Any, one: Tensor, level: Any) -> Any:
    if out.axis is None or out.value.layout is not torch.strided:
        return out
    stack, strides = out.value.movedim(out.axis, 0), one.stride()
    pairs = zip(strides, compute_dense_strides(stack)[1:], stack.shape[1:], strict=True)
    if all(a == b for a, b, n in pairs if n > 1):
        return out
    room = 1 + sum((n - 1) * s for n, s in zip(one.shape, strides, strict=True))
    shape = (level.size, *one.shape)
    return wrap_stack(stack.new_empty_strided(shape, (room, *strides)).copy_(stack), 0, level)
