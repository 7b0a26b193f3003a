"""Pointwise operators on stacks: the one place that aligns operands and promotes their dtypes.

Broadcasting and promotion count the dims of an example, and a stack has one more. So an example of
rank 0, which neither promotes nor broadcasts as its stack would, needs care. The same holds for a
Python number that differs between the examples.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from forall._compat.dispatch_state import functions_off, no_dispatch
from forall._compat.op_schema import map_arguments
from forall._compat.symbolic_zeros import is_marked_zero, marking
from forall._core.axes import is_axis_inside, pad_rank
from forall._core.half_precision import HALVES
from forall._vmap.batched_tensor import BatchedTensor, wrap_stack
from forall._vmap.memory_layout import is_layout_open, match_example_layout
from forall._vmap.rule_makers.basic import (
    LINEAR_ONCE,
    ONCE,
    count_example_dims,
    find_shared_use,
    is_mapped,
    lower_shared,
    move_to_front,
    wrap_results,
)
from forall._vmap.rule_makers.diagonal_cotangents import mark_diagonal_result

Tensor = torch.Tensor
_WHERE = torch.ops.aten.where.self
_CPU = torch.device("cpu")
# With a half tensor on the left, torch computes these with the exact number on the right, be it
# Python's or a tensor of rank 0. Other operators round it to half first.
_EXACT = [
    "mul",
    "multiply",
    "rmul",
    "div",
    "divide",
    "true_divide",
    "truediv",
    "floor_divide",
    "floordiv",
    "ldexp",
]
# Operators that refuse operands of several dtypes, so that none may be cast for them.
_UNPROMOTED = frozenset({"lerp", "heaviside", "complex", "polar"})


# --- dtypes --------------------------------------------------------------------------------------


def result_dtype(
    ranked: tuple[torch.dtype, ...], unranked: tuple[torch.dtype, ...], number: type | None = None
) -> torch.dtype:
    """Return the common dtype of examples with dims, examples of rank 0, and a Python number."""
    return _promote_dtypes(ranked, unranked, number, torch.get_default_dtype())


@functools.cache
def _promote_dtypes(
    ranked: tuple, unranked: tuple, number: type | None, _default: torch.dtype
) -> torch.dtype:
    with functions_off(), no_dispatch():
        given: list[Any] = [] if number is None else [torch.tensor(number(1)).dtype]
        if unranked:
            low = functools.reduce(torch.promote_types, unranked)
            given = [torch.result_type(_make_meta(low), number(1)) if number else low]
        if not ranked:
            return given[0]
        high = functools.reduce(torch.promote_types, ranked)
        return torch.result_type(_make_meta(high, 1), _make_meta(given[0])) if given else high


def _make_meta(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def is_exact_on_the_right(name: str) -> bool:
    """True if torch multiplies or divides half tensors by the exact number on the right.

    ``name`` may be that of an in-place form or of one of Python's operators.
    """
    return name.strip("_") in _EXACT


class OperandConverter:
    """A converter of mapped operands to the dtype and device that one example computes with.

    ``dtype`` is None where the stacks promote as the examples do.
    """

    def __init__(self, level: Any, func: Any, args: tuple, kwargs: dict) -> None:
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        # The condition of where takes no part in promotion.
        self.condition = args[0] if func is _WHERE else None
        ranks = [(t, count_example_dims(t, level)) for t in tensors]
        self.rank = max(rank for _, rank in ranks)
        # A CPU tensor of rank 0 goes with tensors of another device, but a stack of such does not.
        self.device = next((t.device for t in tensors if t.device != _CPU), _CPU)
        self.level = level
        self.dtype = None
        self.exact_in = None  # the dtype of a result that is computed in float32
        if any(rank == 0 and is_mapped(t, level) for t, rank in ranks):
            values = [(t, rank) for t, rank in ranks if t is not self.condition]
            self._promote(func, args, kwargs, values)

    def _promote(self, func: Any, args: tuple, kwargs: dict, values: list) -> None:
        ranked = tuple(t.dtype for t, rank in values if rank)
        unranked = tuple(t.dtype for t, rank in values if not rank)
        name = func.overloadpacket.__name__.rstrip("_")
        if len({*ranked, *unranked}) < 2 or name in _UNPROMOTED:
            return
        if name == "addcdiv" and not any(
            t.dtype.is_floating_point or t.is_complex() for t in args[1:3]
        ):
            return  # torch refuses to divide ints here
        self.dtype = result_dtype(ranked, unranked)
        if self.dtype in HALVES and is_exact_on_the_right(name) and self.device is _CPU:
            number = args[1]
            if is_mapped(number, self.level) and not count_example_dims(number, self.level):
                self.exact_in, self.dtype = self.dtype, torch.float32
        elif not (self.dtype.is_floating_point or self.dtype.is_complex):
            is_power = name == "ldexp"  # whose exponent has a dtype of its own
            self.dtype = None if is_power else self._find_computing_dtype(func, args, kwargs)

    def _find_computing_dtype(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Return the dtype of ints as operands: a float dtype if the result is one.

        A cast to the common dtype of ints first would let a negative number wrap around.
        """
        dtype = self.dtype

        def make_one(a: Any) -> Any:
            return _make_meta(dtype) if isinstance(a, Tensor) else a

        given, named = map_arguments(make_one, args, kwargs)
        try:
            with no_dispatch():
                found = func(*given, **named)
        except (NotImplementedError, RuntimeError):  # the operator itself tells what is wrong
            return dtype
        return found.dtype if isinstance(found, Tensor) and found.is_floating_point() else dtype

    def convert(self, a: Tensor, v: Tensor) -> Tensor:
        """Convert the value ``v`` of an operand ``a``."""
        if not is_mapped(a, self.level):
            return v if self.exact_in is None else v.float()
        if self.device is not _CPU and v.device == _CPU and not count_example_dims(a, self.level):
            v = v.to(self.device)
        if self.dtype is None or v.dtype in (self.dtype, torch.bool) or a is self.condition:
            return v
        return v.to(self.dtype)


# --- operators -----------------------------------------------------------------------------------


def try_aligned_pointwise(level: Any, func: Any, args: tuple) -> Any:
    """Apply a pointwise operator to operands of this level that broadcast as they lie; else None.

    Mapped operands have one dtype and one batch axis; it is in front where their ranks differ. What
    all examples share has fewer dims, or all operands are shared. The rest are numbers.
    """
    values: list[Any] = []
    shared: list[Tensor] = []
    pads = False
    x: Any = None  # the first mapped operand's stack
    axis: Any = None
    for a in args:
        kind = type(a)
        if kind is BatchedTensor:
            v = a.value
            # Kernels do not see a lazy conj or neg bit here.
            if a.level is not level or v.is_complex() or v.is_neg():
                return None
            if a.axis is None:
                if a.is_external:
                    return None
                shared.append(v)
            elif x is None:
                x, axis = v, a.axis
            elif a.axis != axis or v.dtype != x.dtype:
                return None
            elif v.dim() != x.dim():
                if axis or v.device != x.device:
                    return None
                pads = True
            elif v.dim() == 1 and v.device != x.device:
                return None
            values.append(v)
        elif kind is float or kind is int or not isinstance(a, (Tensor, list, tuple)):
            values.append(a)
        else:
            return None
    if pads:
        return None if shared else _call_padded(level, func, args, values)
    if shared:
        if x is not None and not all(_fits_beside(v, x, axis) for v in shared):
            return None
        use = find_shared_use(func)
        if use is not ONCE and (
            use is not LINEAR_ONCE or (marking.used and any(map(is_marked_zero, shared)))
        ):
            return None
    elif x is None:
        return None
    out = func._op(*values)
    is_open = axis and is_layout_open(out, values)
    out = _wrap_laid_out(level, func, args, {}, out, axis, is_open)
    if level.records_on_value:
        mark_diagonal_result(level, func, args, out)
    return out


def _call_padded(level: Any, func: Any, args: tuple, values: list) -> Any:
    """Apply an operator to stacks of several ranks, with their examples in front, and numbers."""
    padded = pad_stacks(values)
    out = func._op(*padded)
    is_open = any(isinstance(v, Tensor) and is_axis_inside(v, 0) for v in values)
    return _wrap_laid_out(level, func, args, {}, out, 0, is_open and is_layout_open(out, padded))


def _fits_beside(v: Tensor, x: Tensor, axis: int) -> bool:
    """True if what all examples share broadcasts with each example of a stack, dtype and all."""
    return v.dim() < x.dim() - axis and v.dtype == x.dtype and v.device == x.device


def handle_pointwise(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """f(x, y, ..) entry by entry: broadcasting aligns examples, not stacks."""
    aligned = _find_aligned(level, args, kwargs)
    if aligned is None:
        out = _align_and_call(level, func, args, kwargs)
    else:
        values, axis = aligned
        out = func(*values, **kwargs) if kwargs else func(*values)
        is_open = axis and is_layout_open(out, values)
        out = _wrap_laid_out(level, func, args, kwargs, out, axis, is_open)
    if level.records_on_value and not kwargs:
        mark_diagonal_result(level, func, args, out)
    return out


def _wrap_laid_out(
    level: Any, func: Any, args: tuple, kwargs: dict, out: Any, axis: int | None, is_open: Any
) -> Any:
    """Wrap results, laid out as the first example's if the operands leave that open."""
    if is_open:
        out = wrap_results(out, axis, level)
        return match_example_layout(level, func, args, kwargs, out)
    return (
        wrap_stack(out, axis, level) if isinstance(out, Tensor) else wrap_results(out, axis, level)
    )


def _find_aligned(level: Any, args: tuple, kwargs: dict) -> tuple[list, int] | None:
    """Return the values and their batch axis if they broadcast as they lie, else None."""
    if kwargs and any(isinstance(a, Tensor) for a in kwargs.values()):
        return None
    axis: Any = None
    rank = dtype = device = axis
    values = []
    for a in args:
        if type(a) is BatchedTensor and a.level is level:
            value = a.value
            if a.axis is not None:
                if axis is None:
                    axis, rank = a.axis, value.dim() - 1
                    dtype, device = value.dtype, value.device
                elif axis != a.axis or rank != value.dim() - 1:
                    return None
            values.append(value)
        else:
            values.append(a)
    for a, v in zip(args, values, strict=True):
        if isinstance(v, Tensor):
            if rank == 0 and (v.dtype != dtype or v.device != device):
                return None
            if v.dim() > rank - axis and not is_mapped(a, level):
                return None
        elif isinstance(v, (list, tuple)) and v and isinstance(v[0], Tensor):
            return None
    return values, axis


def _align_and_call(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    operands = OperandConverter(level, func, args, kwargs)

    def align(a: Any) -> Any:
        if not isinstance(a, Tensor):
            return a
        mapped = is_mapped(a, level)
        v = pad_rank(move_to_front(a), operands.rank) if mapped else lower_shared(a, level)
        return operands.convert(a, v)

    values = [*map(align, args)]
    out = func(*values, **{k: align(a) for k, a in kwargs.items()})
    if operands.exact_in is not None:
        out = out.to(operands.exact_in)
    is_open = any(
        is_mapped(a, level) and is_axis_inside(a.value, a.axis) for a in (*args, *kwargs.values())
    ) and is_layout_open(out, values)
    return _wrap_laid_out(level, func, args, kwargs, out, 0, is_open)


def pad_stacks(values: list) -> list:
    """Give stacks with their examples in front the same number of dims; numbers stay."""
    rank = max(v.dim() for v in values if isinstance(v, Tensor)) - 1
    return [pad_rank(v, rank) if isinstance(v, Tensor) else v for v in values]
