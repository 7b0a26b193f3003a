"""Raw stacks without their wrappers, for functions that do nothing but compute.

A `RawStack` has Python's operators and the torch functions that are one operator on stacks.
Anything else raises `LeaveFastPath`: the function is left, and called again with wrappers. Only
such a function ever sees a `RawStack`, and its operators cost no wrapper, mode or dispatcher.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch

from forall._core.axes import move_axis_to_front, pad_rank
from forall._vmap.active_set.restrict_args import restrict_for_reading
from forall._vmap.batched_tensor import BatchedTensor, wrap_stack
from forall._vmap.fast_path.api_calls import are_plain_options, is_any_overruled, is_pointwise
from forall._vmap.fast_path.operators import (
    BY_OPERATORS,
    can_use_fast_path,
    collect_overloads,
    find_stack_function,
)
from forall._vmap.registry import VIEWS
from forall._vmap.rule_makers.pointwise import pad_stacks

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor
_NUMBERS = frozenset({int, float})
VIEW: Any = object()  # in the place of a wrapper: for a view of another stack


class LeaveFastPath(Exception):  # noqa: N818 - nobody sees it
    """Raised where a raw stack cannot answer, so that the function needs wrappers."""


class RawStack:
    """The stack (B, *S) of a value without its wrapper; ``of`` is that wrapper, if one exists."""

    __slots__ = ("of", "v")

    def __init__(self, v: Tensor, of: Any = None) -> None:
        self.v = v
        self.of = of

    def __getattr__(self, name: str) -> Any:
        raise LeaveFastPath

    def __neg__(self) -> RawStack:
        return RawStack(-self.v)

    def __abs__(self) -> RawStack:
        return RawStack(self.v.abs())

    def __bool__(self) -> bool:
        raise LeaveFastPath

    __hash__ = None  # type: ignore[assignment]

    def __iter__(self) -> Any:
        return iter(_unbind(self))

    def __getitem__(self, key: Any) -> RawStack:
        keys = key if type(key) is tuple else (key,)
        for k in keys:
            parts = (k.start, k.stop, k.step) if type(k) is slice else (k,)
            if not all(p is None or p is Ellipsis or type(p) is int for p in parts):
                raise LeaveFastPath
        return RawStack(self.v[(slice(None), *keys)], VIEW)


def _leave_fast_path(*_: Any) -> Any:
    raise LeaveFastPath


def _get_operand(b: Any, v: Tensor) -> Any:
    """The other operand of an operator, as a stack or a number."""
    if type(b) is RawStack:
        if b.v.dtype is v.dtype:
            return b.v
    elif type(b) in _NUMBERS:
        return b
    raise LeaveFastPath


def _make_operator(op: Callable) -> Callable:
    def apply_operator(a: RawStack, b: Any) -> RawStack:
        v = a.v
        w = _get_operand(b, v)
        if w is not b and v.dim() != w.dim():
            rank = max(v.dim(), w.dim()) - 1
            v, w = pad_rank(v, rank), pad_rank(w, rank)
        return RawStack(op(v, w))

    return apply_operator


def _make_reflected(op: Callable) -> Callable:
    """Make an operator with a number on its left; two stacks go to `_make_operator`."""

    def apply_reflected(a: RawStack, b: Any) -> RawStack:
        if type(b) not in _NUMBERS:
            raise LeaveFastPath
        return RawStack(op(b, a.v))

    return apply_reflected


def _subtract_reflected(number: Any, v: Tensor) -> Tensor:
    return torch.rsub(v, number)  # as Tensor.__rsub__ does, which is in Python


_OPERATORS = {
    **BY_OPERATORS,
    operator.and_: collect_overloads("__and__ bitwise_and"),
    operator.or_: collect_overloads("__or__ bitwise_or"),
    operator.xor: collect_overloads("__xor__ bitwise_xor"),
}
for _op in _OPERATORS:
    _name = _op.__name__.rstrip("_")
    if _op is operator.neg:
        continue
    setattr(RawStack, f"__{_name}__", _make_operator(_op))
    if _name not in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(
            RawStack,
            f"__r{_name}__",
            _make_reflected(_subtract_reflected if _op is operator.sub else _op),
        )
        setattr(RawStack, f"__i{_name}__", _leave_fast_path)  # writes into what others may see


# --- functions of torch --------------------------------------------------------------------------


def _stack_of(a: Any) -> Tensor:
    if type(a) is not RawStack:
        raise LeaveFastPath
    return a.v


def _make_view(op: Any) -> Callable:
    def view_stack(a: RawStack, *dims: int, **named: int) -> Any:
        if any(type(d) is not int for d in (*dims, *named.values())):
            raise LeaveFastPath
        out, _ = VIEWS[op](_stack_of(a), 0, *dims, **named)
        return (
            RawStack(out, VIEW) if type(out) is Tensor else tuple([RawStack(w, VIEW) for w in out])
        )

    return view_stack


def _stack_dim(d: Any, rank: int) -> int:
    """A dim of an example as a dim of its stack."""
    if type(d) is not int or not -rank <= d < rank:
        raise LeaveFastPath
    return d if d < 0 else d + 1


def _make_join(op: Any, more: int) -> Callable:
    def join_stacks(tensors: Any, dim: int = 0) -> RawStack:
        if type(tensors) not in (list, tuple) or not tensors:
            raise LeaveFastPath
        values = [_stack_of(a) for a in tensors]
        first = values[0]
        if any(v.dtype is not first.dtype or v.dim() != first.dim() for v in values):
            raise LeaveFastPath
        join = find_stack_function(op)
        return RawStack(join(values, _stack_dim(dim, first.dim() - 1 + more)))

    return join_stacks


def _make_reduction(op: Any) -> Callable:
    def reduce_stack(a: RawStack, dim: int, keepdim: bool = False) -> RawStack:
        v = _stack_of(a)
        if type(keepdim) is not bool:
            raise LeaveFastPath
        return RawStack(find_stack_function(op)(v, _stack_dim(dim, v.dim() - 1), keepdim))

    return reduce_stack


aten = torch.ops.aten
_unbind = _make_view(aten.unbind.int)
_CALLS: dict[Any, Callable] = {
    torch.stack: _make_join(aten.stack.default, 1),
    torch.cat: _make_join(aten.cat.default, 0),
}
for _name, _call in {
    "unbind": _unbind,
    "unsqueeze": _make_view(aten.unsqueeze.default),
    "transpose": _make_view(aten.transpose.int),
    "sum": _make_reduction(aten.sum.dim_IntList),
    "mean": _make_reduction(aten.mean.dim),
    "amax": _make_reduction(aten.amax.default),
    "amin": _make_reduction(aten.amin.default),
}.items():
    for _home in (torch, Tensor):
        _CALLS[getattr(_home, _name)] = _call
_USED = collect_overloads(
    "stack cat unbind unsqueeze transpose sum mean amax amin select slice alias abs"
).union(*_OPERATORS.values())


def _make_raw_pointwise(func: Any) -> Callable:
    def call_pointwise(*args: Any, **kwargs: Any) -> RawStack:
        stacks = [a.v for a in args if type(a) is RawStack]
        if not stacks or (kwargs and not are_plain_options(kwargs)):
            raise LeaveFastPath
        values = pad_stacks([_get_operand(a, stacks[0]) for a in args])
        out = func(*values, **kwargs)
        if type(out) is not Tensor or any(out is v for v in stacks):
            raise LeaveFastPath
        return RawStack(out)

    return call_pointwise


def find_raw_version(func: Any) -> Callable:
    """Return the version of a torch function, or of a Tensor method, that takes raw stacks."""
    found = _CALLS.get(func)
    if found is None:
        if not is_pointwise(func):
            raise LeaveFastPath
        found = _make_raw_pointwise(func)
    return found


# --- in and out ----------------------------------------------------------------------------------


def can_use_raw_stacks() -> bool:
    """True if only the level decides what operators mean."""
    return can_use_fast_path() and not is_any_overruled(_USED)


def unwrap_to_raw(a: BatchedTensor, level: Any) -> RawStack:
    """Unwrap a value that differs between the examples of ``level`` and has no derivative."""
    if a.axis is None or a.requires_grad:
        raise LeaveFastPath
    v = a.value if a.level is level else restrict_for_reading(a, level)
    if type(v) is not Tensor or v.requires_grad:
        raise LeaveFastPath
    return RawStack(move_axis_to_front(v, a.axis), a)


def wrap_raw(b: RawStack, level: Any) -> BatchedTensor:
    """Wrap a raw stack; every call returns the same wrapper."""
    if b.of is VIEW:
        raise LeaveFastPath  # a write into it has to reach what it is a view of
    if b.of is None:
        b.of = wrap_stack(b.v, 0, level)
    return b.of
