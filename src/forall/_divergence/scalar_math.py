"""Functions of ``math`` and Python's builtins on Numbers, for converted code.

``MATH[f](*args)`` and ``BUILTINS[f](*args)`` equal ``f(*args)`` for ordinary arguments. For a
`BatchedScalar`, or a per-example 0-d tensor where ``f`` takes a number, they compute ``f`` for each
example without divergence: ``int(n)`` is a `BatchedScalar` of ints.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch

from forall._divergence.batched_scalar import (
    BatchedScalar,
    as_operand,
    call_per_lane,
    truncate_number,
)
from forall._divergence.scalar_semantics import (
    DTYPES,
    all_finite,
    has_any_true,
    widest_type,
)
from forall._vmap.batched_tensor import is_mapped_at_any

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor


def _holds_number(a: Any) -> bool:
    """True if ``a`` is or contains a Number, or a per-example tensor with one entry."""
    if type(a) in (list, tuple):
        return any(map(_holds_number, a))
    return type(a) is BatchedScalar or (
        isinstance(a, Tensor) and a.numel() == 1 and is_mapped_at_any(a)
    )


def read_as_number(a: Any) -> Any:
    """Read tensors of one entry as numbers, in lists too; return anything else as it is."""
    if type(a) in (list, tuple):
        return type(a)(map(read_as_number, a))
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
    if type(a) is BatchedScalar:
        return a.tensor.to(torch.float64)
    return torch.tensor(float(a), dtype=torch.float64)


def _make_math_function(f: Callable) -> Callable:
    name = f.__name__
    torchs = _TORCHS.get(name) or _ASKS.get(name)

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not any(map(_holds_number, (*args, *kwargs.values()))):
            return f(*args, **kwargs)
        args = tuple(map(read_as_number, args))
        if torchs is not None and not kwargs and all(map(_is_real, args)):
            try:
                out = torchs(*map(_float, args))
            except (
                TypeError,
                OverflowError,
            ):  # another count of arguments; an int that is no float
                return call_per_lane(f, *args)
            if name in _ASKS or all_finite(out):
                return BatchedScalar(out)
        named = {k: read_as_number(v) for k, v in kwargs.items()}
        return call_per_lane(lambda a, k: f(*a, **k), args, named, name=name)

    return call


def _is_real(a: Any) -> bool:
    return (a.kind if type(a) is BatchedScalar else type(a)) in (bool, int, float)


MATH: dict[Any, Callable] = {
    f: _make_math_function(f)
    for f in vars(math).values()
    if callable(f) and f not in (math.floor, math.ceil, math.trunc)
}
for _f in (math.floor, math.ceil, math.trunc):
    MATH[_f] = lambda x, f=_f: f(read_as_number(x) if _holds_number(x) else x)


# --- Python's own -------------------------------------------------------------------------------


def _int(*args: Any, **kwargs: Any) -> Any:
    if len(args) == 1 and _is_single_number(args[0]):
        return truncate_number(read_as_number(args[0]))
    return int(*args, **kwargs)


def _make_conversion(kind: type) -> Callable:
    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and _is_single_number(args[0]):
            n = read_as_number(args[0])
            if n.kind is complex and kind is not complex:
                return call_per_lane(kind, n) if kind is float else BatchedScalar(n.tensor != 0)
            return BatchedScalar(n.tensor != 0 if kind is bool else n.tensor.to(DTYPES[kind]))
        return kind(*args, **kwargs)

    return call


def _is_single_number(a: Any) -> bool:
    return type(a) not in (list, tuple) and _holds_number(a)


def _are_numbers(items: list) -> bool:
    return any(type(a) is BatchedScalar for a in items) and all(
        type(a) is BatchedScalar or type(a) in DTYPES for a in items
    )


def _make_extreme(f: Callable, is_better: Callable) -> Callable:
    def call(*args: Any, **kwargs: Any) -> Any:
        items = list(args[0]) if len(args) == 1 else list(args)
        if kwargs or not _are_numbers(items):
            return f(items, **kwargs) if len(args) == 1 else f(*args, **kwargs)
        best = items[0]
        for item in items[1:]:
            best = choose_number(is_better(item, best), item, best)
        return best

    return call


def choose_number(test: Any, a: Any, b: Any) -> Any:
    """Evaluate ``a if test else b`` for numbers, in a type that holds both exactly if there is one.

    If there is none, the lanes diverge.
    """
    if type(test) is not BatchedScalar:
        return a if test else b
    if not has_any_true(test.tensor):
        return b
    if not has_any_true(~test.tensor):
        return a
    kinds = [n.kind if type(n) is BatchedScalar else type(n) for n in (a, b)]
    kind = widest_type(*kinds)
    if not all(_holds_exactly(n, kind) for n in (a, b)):
        return a if test else b  # which parts the lanes
    parts = [n.tensor.to(DTYPES[kind]) if type(n) is BatchedScalar else kind(n) for n in (a, b)]
    if not any(isinstance(p, Tensor) for p in parts):
        parts = [torch.tensor(p, dtype=DTYPES[kind]) for p in parts]
    return BatchedScalar(torch.where(test.tensor, *parts).to(DTYPES[kind]))


def _holds_exactly(n: Any, kind: type) -> bool:
    """True if this type holds the number exactly and as the same kind of value."""
    own = n.kind if type(n) is BatchedScalar else type(n)
    lo, hi = as_operand(n).bounds
    if own is kind or own is bool:
        return own is kind or kind is int
    if own is int:
        return kind is float and -(2**53) <= lo <= hi <= 2**53
    return False


def _sum(items: Any, /, start: Any = 0) -> Any:
    items = list(items)
    if _are_numbers([*items, start]):
        return call_per_lane(sum, items, start)
    return sum(items, start)


BUILTINS: dict[Any, Callable] = {
    int: _int,
    float: _make_conversion(float),
    bool: _make_conversion(bool),
    complex: _make_conversion(complex),
    min: _make_extreme(min, lambda a, b: a < b),
    max: _make_extreme(max, lambda a, b: a > b),
    sum: _sum,
    **{f: f for f in (abs, round, divmod, pow)},  # by methods of Number
}
