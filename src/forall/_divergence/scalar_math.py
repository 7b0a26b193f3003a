"""Functions of ``math`` and Python's builtins on Numbers, for converted code.

``MATH[f](*args)`` and ``BUILTINS[f](*args)`` equal ``f(*args)`` for ordinary arguments. For a
`Number`, or a per-example 0-d tensor where ``f`` takes a number, they compute ``f`` for each
example without divergence: ``int(n)`` is a `Number` of ints.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch

from forall._divergence.batched_scalar import (
    Number,
    by_lane,
    operand,
    trunc,
)
from forall._divergence.scalar_semantics import (
    DTYPES,
    all_finite,
    any_,
    wider,
)
from forall._vmap.batched_tensor import is_mapped_at_any

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor


def _ours(a: Any) -> bool:
    """True if ``a`` is or contains a Number, or a per-example tensor with one entry."""
    if type(a) in (list, tuple):
        return any(map(_ours, a))
    return type(a) is Number or (isinstance(a, Tensor) and a.numel() == 1 and is_mapped_at_any(a))


def as_number(a: Any) -> Any:
    """Read tensors of one entry as numbers, in lists too; return anything else as it is."""
    if type(a) in (list, tuple):
        return type(a)(map(as_number, a))
    return a.item() if isinstance(a, Tensor) and a.numel() == 1 else a


# --- math ---------------------------------------------------------------------------------------

# For these functions a finite result of torch equals that of math to the last bit; torch's vector
# code rounds others differently. If the result is not finite, math itself is called, or raises.
_TORCHS = {
    "fabs": torch.abs,
    "degrees": torch.rad2deg,
    "radians": torch.deg2rad,
    "copysign": torch.copysign,
    "fmod": torch.fmod,
}
_ASKS = {"isnan": torch.isnan, "isinf": torch.isinf, "isfinite": torch.isfinite}


def _float(a: Any) -> Tensor:
    if type(a) is Number:
        return a.tensor.to(torch.float64)
    return torch.tensor(float(a), dtype=torch.float64)


def _mathematical(f: Callable) -> Callable:
    name = f.__name__
    torchs = _TORCHS.get(name) or _ASKS.get(name)

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not any(map(_ours, (*args, *kwargs.values()))):
            return f(*args, **kwargs)
        args = tuple(map(as_number, args))
        if torchs is not None and not kwargs and all(map(_is_real, args)):
            try:
                out = torchs(*map(_float, args))
            except (
                TypeError,
                OverflowError,
            ):  # another count of arguments; an int that is no float
                return by_lane(f, *args)
            if name in _ASKS or all_finite(out):
                return Number(out)
        named = {k: as_number(v) for k, v in kwargs.items()}
        return by_lane(lambda a, k: f(*a, **k), args, named, name=name)

    return call


def _is_real(a: Any) -> bool:
    return (a.kind if type(a) is Number else type(a)) in (bool, int, float)


MATH: dict[Any, Callable] = {
    f: _mathematical(f)
    for f in vars(math).values()
    if callable(f) and f not in (math.floor, math.ceil, math.trunc)
}
for _f in (math.floor, math.ceil, math.trunc):
    MATH[_f] = lambda x, f=_f: f(as_number(x) if _ours(x) else x)


# --- Python's own -------------------------------------------------------------------------------


def _int(*args: Any, **kwargs: Any) -> Any:
    if len(args) == 1 and _is_one(args[0]):
        return trunc(as_number(args[0]))
    return int(*args, **kwargs)


def _to(kind: type) -> Callable:
    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and _is_one(args[0]):
            n = as_number(args[0])
            if n.kind is complex and kind is not complex:
                return by_lane(kind, n) if kind is float else Number(n.tensor != 0)
            return Number(n.tensor != 0 if kind is bool else n.tensor.to(DTYPES[kind]))
        return kind(*args, **kwargs)

    return call


def _is_one(a: Any) -> bool:
    return type(a) not in (list, tuple) and _ours(a)


def _are_numbers(items: list) -> bool:
    return any(type(a) is Number for a in items) and all(
        type(a) is Number or type(a) in DTYPES for a in items
    )


def _extreme(f: Callable, is_better: Callable) -> Callable:
    def call(*args: Any, **kwargs: Any) -> Any:
        items = list(args[0]) if len(args) == 1 else list(args)
        if kwargs or not _are_numbers(items):
            return f(items, **kwargs) if len(args) == 1 else f(*args, **kwargs)
        best = items[0]
        for item in items[1:]:
            best = chosen(is_better(item, best), item, best)
        return best

    return call


def chosen(test: Any, a: Any, b: Any) -> Any:
    """Evaluate ``a if test else b`` for numbers, in a type that holds both exactly if there is one.

    If there is none, the lanes diverge.
    """
    if type(test) is not Number:
        return a if test else b
    if not any_(test.tensor):
        return b
    if not any_(~test.tensor):
        return a
    kinds = [n.kind if type(n) is Number else type(n) for n in (a, b)]
    kind = wider(*kinds)
    if not all(_has(n, kind) for n in (a, b)):
        return a if test else b  # which parts the lanes
    parts = [n.tensor.to(DTYPES[kind]) if type(n) is Number else kind(n) for n in (a, b)]
    if not any(isinstance(p, Tensor) for p in parts):
        parts = [torch.tensor(p, dtype=DTYPES[kind]) for p in parts]
    return Number(torch.where(test.tensor, *parts).to(DTYPES[kind]))


def _has(n: Any, kind: type) -> bool:
    """True if this type holds the number exactly and as the same kind of value."""
    own = n.kind if type(n) is Number else type(n)
    lo, hi = operand(n).bounds
    if own is kind or own is bool:
        return own is kind or kind is int
    if own is int:
        return kind is float and -(2**53) <= lo <= hi <= 2**53
    return False


def _sum(items: Any, /, start: Any = 0) -> Any:
    items = list(items)
    if _are_numbers([*items, start]):
        return by_lane(sum, items, start)
    return sum(items, start)


BUILTINS: dict[Any, Callable] = {
    int: _int,
    float: _to(float),
    bool: _to(bool),
    complex: _to(complex),
    min: _extreme(min, lambda a, b: a < b),
    max: _extreme(max, lambda a, b: a > b),
    sum: _sum,
    **{f: f for f in (abs, round, divmod, pow)},  # by methods of Number
}
