"""Raw stacks without their wrappers, for functions that do nothing but compute.

A `Bare` has Python's operators and the torch functions that are one operator on stacks. Anything
else raises `Aside`: the function is left, and called again with wrappers. Only such a function ever
sees a `Bare`, and each of its operators costs no wrapper, mode or dispatcher.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch

from forall._vmap.active_set.restrict_args import for_reading
from forall._vmap.batched_tensor import Batched, wrap
from forall._vmap.fast_path.api_calls import are_words, has_own_rule, is_pointwise
from forall._vmap.fast_path.operators import BY_OPERATORS, asked_of, is_clear

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor
_NUMBERS = frozenset({int, float})
VIEW: Any = object()  # in the place of a wrapper: for a view of another stack


class Aside(Exception):  # noqa: N818 - nobody sees it
    """Raised where a raw stack cannot answer, so that the function needs wrappers."""


class Bare:
    """The stack (B, *S) of a value without its wrapper; ``of`` is that wrapper, if one exists."""

    __slots__ = ("of", "v")

    def __init__(self, v: Tensor, of: Any = None) -> None:
        self.v = v
        self.of = of

    def __getattr__(self, name: str) -> Any:
        raise Aside

    def __neg__(self) -> Bare:
        return Bare(-self.v)

    def __abs__(self) -> Bare:
        return Bare(self.v.abs())

    def __bool__(self) -> bool:
        raise Aside

    __hash__ = None  # type: ignore[assignment]

    def __iter__(self) -> Any:
        return iter(_unbind(self))

    def __getitem__(self, key: Any) -> Bare:
        keys = key if type(key) is tuple else (key,)
        for k in keys:
            parts = (k.start, k.stop, k.step) if type(k) is slice else (k,)
            if not all(p is None or p is Ellipsis or type(p) is int for p in parts):
                raise Aside
        return Bare(self.v[(slice(None), *keys)], VIEW)


def _aside(*_: Any) -> Any:
    raise Aside


def _other(b: Any, v: Tensor) -> Any:
    """The other operand of an operator, as a stack or a number."""
    if type(b) is Bare:
        if b.v.dtype is v.dtype:
            return b.v
    elif type(b) in _NUMBERS:
        return b
    raise Aside


def _lined_up(v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Give two stacks of examples the same number of dims."""
    more = v.dim() - w.dim()
    if more > 0:
        return v, w.reshape(w.shape[0], *[1] * more, *w.shape[1:])
    return v.reshape(v.shape[0], *[1] * -more, *v.shape[1:]), w


def _forward(op: Callable) -> Callable:
    def operated(a: Bare, b: Any) -> Bare:
        v = a.v
        w = _other(b, v)
        if w is not b and v.dim() != w.dim():
            v, w = _lined_up(v, w)
        return Bare(op(v, w))

    return operated


def _reflected(op: Callable) -> Callable:
    """Make an operator with a number on its left; two stacks go to `_forward`."""

    def operated(a: Bare, b: Any) -> Bare:
        if type(b) not in _NUMBERS:
            raise Aside
        return Bare(op(b, a.v))

    return operated


def _minus(number: Any, v: Tensor) -> Tensor:
    return torch.rsub(v, number)  # as Tensor.__rsub__ does, which is in Python


_OPERATORS = {
    **BY_OPERATORS,
    operator.and_: asked_of("__and__ bitwise_and"),
    operator.or_: asked_of("__or__ bitwise_or"),
    operator.xor: asked_of("__xor__ bitwise_xor"),
}
for _op in _OPERATORS:
    _name = _op.__name__.rstrip("_")
    if _op is operator.neg:
        continue
    setattr(Bare, f"__{_name}__", _forward(_op))
    if _name not in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(Bare, f"__r{_name}__", _reflected(_minus if _op is operator.sub else _op))
        setattr(Bare, f"__i{_name}__", _aside)  # writes into what others may see


# --- functions of torch --------------------------------------------------------------------------


def _dim(d: Any, rank: int) -> int:
    """A dim of an example as a dim of its stack."""
    if type(d) is not int or not -rank <= d < rank:
        raise Aside
    return d if d < 0 else d + 1


def _stack_of(a: Any) -> Tensor:
    if type(a) is not Bare:
        raise Aside
    return a.v


def _unbind(a: Bare, dim: int = 0) -> tuple[Bare, ...]:
    v = _stack_of(a)
    return tuple([Bare(w, VIEW) for w in v.unbind(_dim(dim, v.dim() - 1))])


def _unsqueeze(a: Bare, dim: int) -> Bare:
    v = _stack_of(a)
    return Bare(v.unsqueeze(_dim(dim, v.dim())), VIEW)


def _transpose(a: Bare, dim0: int, dim1: int) -> Bare:
    v = _stack_of(a)
    rank = v.dim() - 1
    return Bare(v.transpose(_dim(dim0, rank), _dim(dim1, rank)), VIEW)


def _together(op: Callable, more: int) -> Callable:
    def put(tensors: Any, dim: int = 0) -> Bare:
        if type(tensors) not in (list, tuple) or not tensors:
            raise Aside
        values = [_stack_of(a) for a in tensors]
        first = values[0]
        if any(v.dtype is not first.dtype or v.dim() != first.dim() for v in values):
            raise Aside
        return Bare(op(values, _dim(dim, first.dim() - 1 + more)))

    return put


def _reduced(op: Callable) -> Callable:
    def reduced(a: Bare, dim: int, keepdim: bool = False) -> Bare:
        v = _stack_of(a)
        if type(keepdim) is not bool:
            raise Aside
        return Bare(op(v, _dim(dim, v.dim() - 1), keepdim))

    return reduced


_CALLS: dict[Any, Callable] = {
    torch.stack: _together(torch.stack, 1),
    torch.cat: _together(torch.cat, 0),
}
for _name, _call in {
    "unbind": _unbind,
    "unsqueeze": _unsqueeze,
    "transpose": _transpose,
    **{name: _reduced(getattr(torch, name)) for name in ("sum", "mean", "amax", "amin")},
}.items():
    for _home in (torch, Tensor):
        _CALLS[getattr(_home, _name)] = _call
_USED = asked_of(
    "stack cat unbind unsqueeze transpose sum mean amax amin select slice alias abs"
).union(*_OPERATORS.values())


def _pointwise(func: Any) -> Callable:
    def called(*args: Any, **kwargs: Any) -> Bare:
        stacks = [a.v for a in args if type(a) is Bare]
        if not stacks or (kwargs and not are_words(kwargs)):
            raise Aside
        first = stacks[0]
        rank = max(v.dim() for v in stacks)
        values = [_fitting(a, first.dtype, rank) for a in args]
        out = func(*values, **kwargs)
        if type(out) is not Tensor or any(out is v for v in stacks):
            raise Aside
        return Bare(out)

    return called


def _fitting(a: Any, dtype: torch.dtype, rank: int) -> Any:
    if type(a) is Bare:
        v = a.v
        if v.dtype is not dtype:
            raise Aside
        return v if v.dim() == rank else v.reshape(len(v), *[1] * (rank - v.dim()), *v.shape[1:])
    if type(a) not in _NUMBERS:
        raise Aside
    return a


def does(func: Any) -> Callable:
    """Return the version of a torch function, or of a Tensor method, that takes raw stacks."""
    found = _CALLS.get(func)
    if found is None:
        if not is_pointwise(func):
            raise Aside
        found = _pointwise(func)
    return found


# --- in and out ----------------------------------------------------------------------------------


def may_be_bare() -> bool:
    """True if only the level decides what operators mean."""
    return is_clear() and not has_own_rule(_USED)


def bared(a: Batched, level: Any) -> Bare:
    """Unwrap a value that differs between the examples of ``level`` and has no derivative."""
    if a.axis is None or a.requires_grad:
        raise Aside
    v = a.value if a.level is level else for_reading(a, level)
    if type(v) is not Tensor or v.requires_grad:
        raise Aside
    return Bare(v.movedim(a.axis, 0) if a.axis else v, a)


def wrapped(b: Bare, level: Any) -> Batched:
    """Wrap a raw stack; every call returns the same wrapper."""
    if b.of is VIEW:
        raise Aside  # a write into it has to reach what it is a view of
    if b.of is None:
        b.of = wrap(b.v, 0, level)
    return b.of
