"""Operators of converted code, applied directly to the stacks.

Converted code has one of our functions in the place of ``a * b``, so it can do at once what the
function mode and `api_calls` would come to: a pointwise operator on stacks that lie alike, without
a derivative at stake. While examples diverge, operands are restricted on the way. Any other
operation goes the way of a user's call.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from forall._ast_rewrite.fuse_expressions import METHODS
from forall._compat.devices import count_function_modes
from forall._compat.dispatch_state import (
    functions_off,
    graph_task,
    has_users_tangents,
    in_torch_func,
    is_autocast,
    no_dispatch,
)
from forall._compat.private_api import PLAIN, count_dispatch_modes
from forall._compat.tensor_subclass import posing
from forall._core.axes import move_axis_to_front
from forall._core.levels import stack
from forall._vmap.active_set.restrict_args import restrict_for_reading
from forall._vmap.batched_tensor import BatchedTensor, wrap_stack
from forall._vmap.fast_path import api_calls
from forall._vmap.fast_path.api_calls import is_any_overruled, is_pointwise
from forall._vmap.mutation import view_copies
from forall._vmap.mutation.mutation_log import write_counts
from forall._vmap.registry import HANDLERS, list_overloads
from forall._vmap.rule_makers.pointwise import pad_stacks

if TYPE_CHECKING:
    from collections.abc import Callable

_NUMBERS = frozenset({int, float})
_T = torch.Tensor


def collect_overloads(names: str) -> frozenset:
    return frozenset(
        op for name in names.split() for op in list_overloads(getattr(torch.ops.aten, name))
    )


# The ATen operators that Python's operators call, whatever the order of the operands.
BY_OPERATORS: dict[Any, frozenset] = {
    operator.add: collect_overloads("add"),
    operator.sub: collect_overloads("sub rsub"),
    operator.mul: collect_overloads("mul"),
    operator.truediv: collect_overloads("div reciprocal mul"),
    operator.floordiv: collect_overloads("floor_divide"),
    operator.mod: collect_overloads("remainder"),
    operator.pow: collect_overloads("pow"),
    operator.neg: collect_overloads("neg"),
    operator.lt: collect_overloads("lt gt"),
    operator.le: collect_overloads("le ge"),
    operator.gt: collect_overloads("gt lt"),
    operator.ge: collect_overloads("ge le"),
    operator.eq: collect_overloads("eq"),
    operator.ne: collect_overloads("ne"),
}


def make_operators() -> dict[str, Callable]:
    """Python's operators by their names, each of which tries the stacks before its usual way."""
    found = {
        op.__name__: _make_unary(op) if op is operator.neg else _make_binary(op)
        for op in BY_OPERATORS
    }
    return {**found, "matmul": _multiply_matrices}


_PRODUCTS = collect_overloads("matmul mv mm t transpose")


def _multiply_matrices(a: Any, b: Any) -> Any:
    if type(a) is BatchedTensor or type(b) is BatchedTensor:
        if type(a) in PLAIN:
            found = _multiply_by_matrix(b, a, on_the_left=True)
        else:
            found = _multiply_by_matrix(a, b, on_the_left=False) if type(b) in PLAIN else None
        if found is None:
            found = call_on_stacks(_T.__matmul__, (a, b), {})
        if found is not None:
            return found
    return a @ b


_NONE: frozenset = frozenset()
_ALL = collect_overloads(METHODS).union(*BY_OPERATORS.values())


def evaluate_fused(expression: Any, operands: tuple) -> Any:
    """Evaluate an expression of such operators and of `METHODS` on the stacks at once, or None."""
    return _apply_to_stacks(expression, _ALL, operands)


def _make_binary(op: Any) -> Callable:
    asks = BY_OPERATORS[op]

    def apply_binary(a: Any, b: Any) -> Any:
        if type(a) is BatchedTensor or type(b) is BatchedTensor:
            found = _apply_to_stacks(op, asks, (a, b))
            if found is not None:
                return found
        return op(a, b)

    return apply_binary


def _make_unary(op: Any) -> Callable:
    asks = BY_OPERATORS[op]

    def apply_unary(a: Any) -> Any:
        found = _apply_to_stacks(op, asks, (a,)) if type(a) is BatchedTensor else None
        return op(a) if found is None else found

    return apply_unary


def _apply_to_stacks(op: Any, asks: frozenset, operands: tuple) -> Any:
    """The result on the stacks, or None where the user's way must be taken."""
    if not can_use_fast_path() or is_any_overruled(asks):
        return None
    level: Any = stack.top
    with functions_off(), no_dispatch():
        axis = rank = dtype = None
        alike = True
        values = []
        for a in operands:
            if type(a) is BatchedTensor:
                if a.axis is None or a.requires_grad:
                    return None
                v = a.value if a.level is level else restrict_for_reading(a, level)
                if type(v) is not _T or v.requires_grad:
                    return None
                if dtype is None:
                    axis, rank, dtype = a.axis, v.dim(), v.dtype
                elif v.dtype is not dtype:
                    return None
                elif a.axis != axis or v.dim() != rank:
                    alike = False
                values.append(v)
            elif type(a) in _NUMBERS:
                values.append(a)
            else:
                return None
        if not alike:
            axis, values = (
                0,
                pad_stacks(
                    [
                        move_axis_to_front(v, a.axis) if type(v) is _T else v
                        for v, a in zip(values, operands, strict=True)
                    ]
                ),
            )
        try:
            out = op(*values)
        except Exception:  # noqa: BLE001 - the user's way tells which example failed
            return None
        return wrap_stack(out, axis, level)


def _multiply_by_matrix(x: BatchedTensor, w: _T, *, on_the_left: bool) -> Any:
    """``w @ x`` or ``x @ w`` of a vector of each example and one matrix, or None."""
    if not can_use_fast_path() or is_any_overruled(_PRODUCTS) or in_torch_func() or is_autocast():
        return None
    level: Any = stack.top
    with functions_off():
        if x.axis != 0 or x.requires_grad or w.dim() != 2 or x.dim() != 1:
            return None
        v = x.value if x.level is level else restrict_for_reading(x, level)
        if type(v) is not _T or v.requires_grad or v.dtype is not w.dtype:
            return None
        if w.requires_grad and torch.is_grad_enabled():
            return None
        with no_dispatch():
            try:
                if level.state.logs_writes:
                    level.state.mutation_log.log_operand_reads(_T.__matmul__, [w])
                out = torch.mm(v, w.t() if on_the_left else w)
            except Exception:  # noqa: BLE001 - the user's way tells what is wrong
                return None
            return wrap_stack(out, 0, level)


def can_use_fast_path() -> bool:
    """True if no other mode, no backward pass and no copy that lags behind changes a call."""
    return (
        count_dispatch_modes() == 1
        and count_function_modes() == 1
        and not posing.used
        and graph_task() == -1
        and not (forward_ad._current_level >= 0 and has_users_tangents())
        and (
            view_copies.view_copies.found is None
            or view_copies.view_copies.seen == write_counts.times
        )
        and not write_counts.named
    )


def call_on_stacks(func: Any, args: tuple, kwargs: dict) -> Any:
    """Make a call of converted code to torch on the stacks; None where it must be made as it is."""
    if not can_use_fast_path():
        return None
    level: Any = stack.top
    if not kwargs and is_pointwise(func):
        return _apply_to_stacks(func, _NONE, args)
    with functions_off():
        if func in _VIEWS:
            return _call_view(func, args, kwargs, level)
        for n, a in enumerate(args):
            if type(a) is BatchedTensor and a.level is not level:
                if a.requires_grad or not is_pointwise(func):
                    return None
                v = restrict_for_reading(a, level)
                if v is None:
                    return None
                args = (*args[:n], wrap_stack(v, a.axis, level), *args[n + 1 :])
        if func is torch.stack:
            return _stack_tensors(args, kwargs, level)
        return api_calls.answer_call(func, args, kwargs, level, modes=1)


# Views, which the function mode has nothing to say about.
_VIEWS = frozenset(
    getattr(home, name) for home in (torch, _T) for name in ("unbind", "unsqueeze", "transpose")
)


def _call_view(func: Any, args: tuple, kwargs: dict, level: Any) -> Any:
    if not args or type(args[0]) is not BatchedTensor or args[0].level is not level:
        return None
    if any(type(a) is not int for a in (*args[1:], *kwargs.values())):
        return None
    try:
        return func(*args, **kwargs)
    except Exception:  # noqa: BLE001 - the user's way tells what is wrong
        return None


def find_stack_function(op: Any) -> Callable:
    """Return the function of stacks of the operator's row, which the dispatcher would ask."""
    handler: Any = HANDLERS[op]
    return handler.run


_STACK = collect_overloads("stack")


def _stack_tensors(args: tuple, kwargs: dict, level: Any) -> Any:
    """``torch.stack(tensors, dim)`` of tensors that lie alike."""
    tensors, dim = args if len(args) == 2 else (args[0], 0)
    if (
        kwargs
        or type(tensors) not in (list, tuple)
        or type(dim) is not int
        or is_any_overruled(_STACK)
    ):
        return None
    with no_dispatch():
        values = []
        for a in tensors:
            if (
                type(a) is not BatchedTensor
                or a.level is not level
                or a.axis != 0
                or a.requires_grad
            ):
                return None
            v = a.value
            if type(v) is not _T or v.requires_grad or (values and v.dtype is not values[0].dtype):
                return None
            values.append(v)
        if not values or not -values[0].dim() <= dim < values[0].dim():
            return None
        try:
            out = find_stack_function(torch.ops.aten.stack.default)(
                values, dim if dim < 0 else dim + 1
            )
        except Exception:  # noqa: BLE001 - the user's way tells what is wrong
            return None
        return wrap_stack(out, 0, level)
