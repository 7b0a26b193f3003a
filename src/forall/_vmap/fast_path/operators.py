"""Operators of converted code, applied directly to the stacks.

Converted code has one of our functions in the place of ``a * b``, so it can do at once what the
function mode and `shortcut` would come to: a pointwise operator on stacks that lie alike, without a
derivative at stake. While examples diverge, operands are restricted on the way. Any other operation
goes the way of a user's call.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from forall._ast_rewrite.fuse_expressions import METHODS
from forall._compat.devices import function_modes
from forall._compat.dispatch_state import (
    dispatch_modes,
    functions_off,
    graph_task,
    in_torch_func,
    is_autocast,
    no_dispatch,
    users_tangents,
)
from forall._compat.private_api import PLAIN
from forall._compat.tensor_subclass import posing
from forall._core.levels import stack
from forall._vmap.active_set.restrict_args import for_reading
from forall._vmap.batched_tensor import Batched, wrap
from forall._vmap.fast_path import api_calls
from forall._vmap.fast_path.api_calls import has_own_rule, is_pointwise
from forall._vmap.mutation import view_copies
from forall._vmap.mutation.mutation_log import written
from forall._vmap.registry import overloads

if TYPE_CHECKING:
    from collections.abc import Callable

_NUMBERS = frozenset({int, float})
_T = torch.Tensor


def asked_of(names: str) -> frozenset:
    return frozenset(
        op for name in names.split() for op in overloads(getattr(torch.ops.aten, name))
    )


# The ATen operators that Python's operators call, whatever the order of the operands.
BY_OPERATORS: dict[Any, frozenset] = {
    operator.add: asked_of("add"),
    operator.sub: asked_of("sub rsub"),
    operator.mul: asked_of("mul"),
    operator.truediv: asked_of("div reciprocal mul"),
    operator.floordiv: asked_of("floor_divide"),
    operator.mod: asked_of("remainder"),
    operator.pow: asked_of("pow"),
    operator.neg: asked_of("neg"),
    operator.lt: asked_of("lt gt"),
    operator.le: asked_of("le ge"),
    operator.gt: asked_of("gt lt"),
    operator.ge: asked_of("ge le"),
    operator.eq: asked_of("eq"),
    operator.ne: asked_of("ne"),
}


def operators() -> dict[str, Callable]:
    """Python's operators by their names, each of which tries the stacks before its usual way."""
    found = {op.__name__: _unary(op) if op is operator.neg else _binary(op) for op in BY_OPERATORS}
    return {**found, "matmul": _matmul}


_PRODUCTS = asked_of("matmul mv mm t transpose")


def _matmul(a: Any, b: Any) -> Any:
    if type(a) is Batched or type(b) is Batched:
        if type(a) in PLAIN:
            found = _with_matrix(b, a, on_the_left=True)
        else:
            found = _with_matrix(a, b, on_the_left=False) if type(b) in PLAIN else None
        if found is None:
            found = called(_T.__matmul__, (a, b), {})
        if found is not None:
            return found
    return a @ b


_NONE: frozenset = frozenset()
_ALL = asked_of(METHODS).union(*BY_OPERATORS.values())


def fused(expression: Any, operands: tuple) -> Any:
    """Evaluate an expression of such operators and of `METHODS` on the stacks at once, or None."""
    return _answer(expression, _ALL, operands)


def _binary(op: Any) -> Callable:
    asks = BY_OPERATORS[op]

    def operated(a: Any, b: Any) -> Any:
        if type(a) is Batched or type(b) is Batched:
            found = _answer(op, asks, (a, b))
            if found is not None:
                return found
        return op(a, b)

    return operated


def _unary(op: Any) -> Callable:
    asks = BY_OPERATORS[op]

    def operated(a: Any) -> Any:
        found = _answer(op, asks, (a,)) if type(a) is Batched else None
        return op(a) if found is None else found

    return operated


def _answer(op: Any, asks: frozenset, operands: tuple) -> Any:
    """The result on the stacks, or None where the user's way must be taken."""
    if not is_clear() or has_own_rule(asks):
        return None
    level: Any = stack.top
    with functions_off(), no_dispatch():
        axis = rank = dtype = None
        alike = True
        values = []
        for a in operands:
            if type(a) is Batched:
                if a.axis is None or a.requires_grad:
                    return None
                v = a.value if a.level is level else for_reading(a, level)
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
            axis, values = 0, _in_front(values, operands)
        try:
            out = op(*values)
        except Exception:  # noqa: BLE001 - the user's way tells which example failed
            return None
        return wrap(out, axis, level)


def _in_front(values: list, operands: tuple) -> list:
    """Stacks with their examples in front, as many dims in each; numbers as they are."""
    rank = max(v.dim() for v in values if type(v) is _T)
    made = []
    for v, a in zip(values, operands, strict=True):
        if type(v) is _T:
            if a.axis:
                v = v.movedim(a.axis, 0)
            if v.dim() < rank:
                v = v.reshape(len(v), *[1] * (rank - v.dim()), *v.shape[1:])
        made.append(v)
    return made


def _with_matrix(x: Batched, w: _T, *, on_the_left: bool) -> Any:
    """``w @ x`` or ``x @ w`` of a vector of each example and one matrix, or None."""
    if not is_clear() or has_own_rule(_PRODUCTS) or in_torch_func() or is_autocast():
        return None
    level: Any = stack.top
    with functions_off():
        if x.axis != 0 or x.requires_grad or w.dim() != 2 or x.dim() != 1:
            return None
        v = x.value if x.level is level else for_reading(x, level)
        if type(v) is not _T or v.requires_grad or v.dtype is not w.dtype:
            return None
        if w.requires_grad and torch.is_grad_enabled():
            return None
        with no_dispatch():
            try:
                if level.notes:
                    level.ledger.read_by(_T.__matmul__, [w])
                out = torch.mm(v, w.t() if on_the_left else w)
            except Exception:  # noqa: BLE001 - the user's way tells what is wrong
                return None
            return wrap(out, 0, level)


def is_clear() -> bool:
    """True if no other mode, no backward pass and no copy that lags behind changes a call."""
    return (
        dispatch_modes() == 1
        and function_modes() == 1
        and not posing.used
        and graph_task() == -1
        and not (forward_ad._current_level >= 0 and users_tangents())
        and (view_copies.copies.found is None or view_copies.copies.seen == written.times)
        and not written.named
    )


def called(func: Any, args: tuple, kwargs: dict) -> Any:
    """Make a call of converted code to torch on the stacks; None where it must be made as it is."""
    if not is_clear():
        return None
    level: Any = stack.top
    if not kwargs and is_pointwise(func):
        return _answer(func, _NONE, args)
    with functions_off():
        if func in _VIEWS:
            return _view(func, args, kwargs, level)
        for n, a in enumerate(args):
            if type(a) is Batched and a.level is not level:
                if a.requires_grad or not is_pointwise(func):
                    return None
                v = for_reading(a, level)
                if v is None:
                    return None
                args = (*args[:n], wrap(v, a.axis, level), *args[n + 1 :])
        if func is torch.stack:
            return _stacked(args, kwargs, level)
        return api_calls.answer(func, args, kwargs, level, modes=1)


# Views, which the function mode has nothing to say about.
_VIEWS = frozenset(
    getattr(home, name) for home in (torch, _T) for name in ("unbind", "unsqueeze", "transpose")
)


def _view(func: Any, args: tuple, kwargs: dict, level: Any) -> Any:
    if not args or type(args[0]) is not Batched or args[0].level is not level:
        return None
    if any(type(a) is not int for a in (*args[1:], *kwargs.values())):
        return None
    try:
        return func(*args, **kwargs)
    except Exception:  # noqa: BLE001 - the user's way tells what is wrong
        return None


_STACK = asked_of("stack")


def _stacked(args: tuple, kwargs: dict, level: Any) -> Any:
    """``torch.stack(tensors, dim)`` of tensors that lie alike."""
    tensors, dim = args if len(args) == 2 else (args[0], 0)
    if kwargs or type(tensors) not in (list, tuple) or type(dim) is not int or has_own_rule(_STACK):
        return None
    with no_dispatch():
        values = []
        for a in tensors:
            if type(a) is not Batched or a.level is not level or a.axis != 0 or a.requires_grad:
                return None
            v = a.value
            if type(v) is not _T or v.requires_grad or (values and v.dtype is not values[0].dtype):
                return None
            values.append(v)
        if not values or not -values[0].dim() <= dim < values[0].dim():
            return None
        try:
            out = torch.stack(values, dim if dim < 0 else dim + 1)
        except Exception:  # noqa: BLE001 - the user's way tells what is wrong
            return None
        return wrap(out, 0, level)
