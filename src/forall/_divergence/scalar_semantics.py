"""Python's scalar arithmetic for all examples at once, where a torch operator gives the same.

Each entry returns a tensor, or None if some example might be one of Python's special cases: a
division by zero, an int that needs more than 64 bits, a result that is no float. Python's own
operator then runs for one example after another. So this table decides about speed alone.
"""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

import torch

from forall._compat.dispatch_state import functions_off, no_dispatch
from forall._divergence.scalar_storage import read_values

if TYPE_CHECKING:
    from collections.abc import Callable

DTYPES = {
    bool: torch.bool,
    int: torch.int64,
    float: torch.float64,
    complex: torch.complex128,
}
KINDS = {dtype: kind for kind, dtype in DTYPES.items()}
_ORDER = list(DTYPES)
_INT64 = 2**63
_EXACT = 2**53  # every int up to here is a float


def widest_type(a: type, b: type) -> type:
    """Return the type to which Python promotes numbers of these two types."""
    return max(a, b, key=_ORDER.index)


class Operand:
    """A number of each example (a tensor) or of Python's, with its least and largest value."""

    __slots__ = ("bounds", "kind", "of")

    def __init__(self, of: Any, kind: type, bounds: tuple) -> None:
        self.of = of
        self.kind = kind
        self.bounds = bounds

    @property
    def most(self) -> Any:
        lo, hi = self.bounds
        return max(-lo, hi)  # nan where there is one: `bounds` has it on both sides

    def convert_to(self, kind: type) -> Any:
        if isinstance(self.of, torch.Tensor):
            return self.of.to(DTYPES[kind]) if kind is not self.kind else self.of
        return kind(self.of)

    def has_zero(self) -> bool:
        lo, hi = self.bounds
        if lo > 0 or hi < 0:
            return False
        return not self.of if not isinstance(self.of, torch.Tensor) else has_any_true(self.of == 0)

    def is_64_bit(self) -> bool:
        return isinstance(self.of, torch.Tensor) or self.kind is float or self.most < _INT64

    def is_finite(self) -> bool:
        return all(map(math.isfinite, self.bounds))


def find_bounds(t: torch.Tensor) -> tuple:
    """Return the least and the largest number as Python's; nan for both if a float is nan."""
    numbers = read_values(t)
    if not numbers.numel() or numbers.is_complex():
        return (0, 0) if not numbers.numel() else (-math.inf, math.inf)
    with functions_off(), no_dispatch():
        lo, hi = torch.aminmax(numbers.to(torch.int64) if numbers.dtype is torch.bool else numbers)
        return lo.item(), hi.item()


def has_any_true(t: torch.Tensor) -> bool:
    with functions_off(), no_dispatch():
        return bool(read_values(t).any())


def all_finite(t: torch.Tensor) -> bool:
    with functions_off(), no_dispatch():
        return bool(read_values(t).isfinite().all())


# --- what may go wrong --------------------------------------------------------------------------


def _is_always_exact(a: Operand, b: Operand) -> bool:
    return True


def _pow_fits(a: Operand, b: Operand) -> bool:
    lo, hi = b.bounds
    return lo >= 0 and hi <= 64 and a.most**hi < _INT64


def _is_shift_in_range(b: Operand) -> bool:
    return b.bounds[0] >= 0 and b.bounds[1] < 64


def _is_exact_int_division(a: Operand, b: Operand) -> bool:
    return a.most < _INT64 and not b.has_zero()


def _is_exact_true_division(a: Operand, b: Operand) -> bool:
    return a.most <= _EXACT and b.most <= _EXACT and not b.has_zero()


def _is_exact_float_division(a: Operand, b: Operand) -> bool:
    return a.is_finite() and b.is_finite() and not b.has_zero()


def _is_exact_comparison(a: Operand, b: Operand) -> bool:
    """True if torch compares as Python does: it compares an int and a float by exact values."""
    return all(o.most <= _EXACT for o in (a, b) if o.kind is not float)


# --- the operators ------------------------------------------------------------------------------


def _float_mod(a: Any, b: Any) -> torch.Tensor:
    """Return ``a % b`` of floats as Python does: a zero has the divisor's sign."""
    r = torch.remainder(a, b)
    return torch.where(r == 0, torch.copysign(torch.zeros_like(r), b), r)


def _float_div(a: Any, b: Any) -> torch.Tensor:
    """Divide floats with one rounding.

    For a number on the left, torch's ``/`` would multiply by the reciprocal, which rounds twice.
    """
    return torch.div(a if isinstance(a, torch.Tensor) else torch.full_like(b, a), b)


_COMPARISONS = (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne)
_LOGIC = (operator.and_, operator.or_, operator.xor)

# For each operator on ints or on floats, when torch's is Python's. A power of floats never is:
# torch's vectors round it in their own way.
_INTS: dict[Any, Callable[[Operand, Operand], bool]] = {
    operator.add: lambda a, b: a.most + b.most < _INT64,
    operator.sub: lambda a, b: a.most + b.most < _INT64,
    operator.mul: lambda a, b: a.most * b.most < _INT64,
    operator.floordiv: _is_exact_int_division,
    operator.mod: _is_exact_int_division,
    operator.pow: _pow_fits,
    operator.lshift: lambda a, b: _is_shift_in_range(b) and a.most << b.bounds[1] < _INT64,
    operator.rshift: lambda a, b: _is_shift_in_range(b),
    **dict.fromkeys(_LOGIC, _is_always_exact),
    **dict.fromkeys(_COMPARISONS, _is_always_exact),
}
_FLOATS: dict[Any, Callable[[Operand, Operand], bool]] = {
    operator.add: _is_always_exact,
    operator.sub: _is_always_exact,
    operator.mul: _is_always_exact,
    operator.truediv: lambda a, b: not b.has_zero(),
    operator.floordiv: _is_exact_float_division,
    operator.mod: _is_exact_float_division,
    **dict.fromkeys(_COMPARISONS, _is_exact_comparison),
}
_FOR_FLOATS = {
    operator.truediv: _float_div,
    operator.mod: _float_mod,
}


def compute_binary(op: Any, a: Operand, b: Operand) -> torch.Tensor | None:
    """Compute ``op(a, b)`` for all examples at once, or return None."""
    kind = widest_type(a.kind, b.kind)
    if kind is complex or not (a.is_64_bit() and b.is_64_bit()):
        return None
    if kind is bool and op not in _LOGIC:
        kind = int
    if kind is int and op is operator.truediv:
        guard, kind = _is_exact_true_division, float
    else:
        guard = (_FLOATS if kind is float else _INTS).get(op)
    if guard is None or not guard(a, b):
        return None
    call: Any = _FOR_FLOATS.get(op, op) if kind is float else op
    return call(a.convert_to(kind), b.convert_to(kind))


def _make_rounding(rounded: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    def call(a: Operand) -> torch.Tensor | None:
        if a.kind is float:
            return rounded(a.of).to(torch.int64) if a.most < _INT64 else None
        return a.convert_to(int) if a.kind is not complex else None

    return call


def _make_signed_unary(op: Any) -> Any:
    def call(a: Operand) -> torch.Tensor | None:
        if a.kind is complex or (a.kind is not float and a.most >= _INT64):
            return None
        return op(a.convert_to(widest_type(a.kind, int)))

    return call


UNARY: dict[Any, Callable[[Operand], torch.Tensor | None]] = {
    operator.neg: _make_signed_unary(operator.neg),
    operator.pos: _make_signed_unary(operator.pos),
    operator.abs: _make_signed_unary(operator.abs),
    operator.invert: lambda a: ~a.convert_to(int) if a.kind in (bool, int) else None,
    round: _make_rounding(torch.round),
    math.floor: _make_rounding(torch.floor),
    math.ceil: _make_rounding(torch.ceil),
    math.trunc: _make_rounding(torch.trunc),
}
