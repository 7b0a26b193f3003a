"""Forward-mode rules of forall's own for wrapped values, primal and tangent each by itself.

Torch's formula for an operator on wrappers makes aliases of its operands, and asks Python three
questions when it puts the tangent on the result. The rules here compute the same numbers without.
The halves of a result are joined when an operator needs them joined (`dual_tensor.Halves`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import is_inference_mode_enabled

from forall._autodiff.dual_tensor import (
    DualLevel,
    DualTensor,
    find_halves,
    is_split,
    read_tangent,
    wrap_dual,
    wrap_split,
)
from forall._autodiff.one_tangent_jvp import BINARY_OPS, push_pairs
from forall._compat.dispatch_state import (
    AUTOGRAD,
    enable_autograd_below,
    enable_forward_mode,
    functions_off,
    has_users_tangents,
    is_accumulating,
    is_excluded,
    is_in_backward,
)
from forall._compat.symbolic_zeros import (
    LINEAR,
    is_marked_zero,
    make_plain_zeros,
    marking,
)
from forall._compat.wrapper_tensor import Wrapper
from forall._core.levels import stack

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten
_DETACH = aten.detach.default
_SUMS = frozenset({aten.add.Tensor, aten.sub.Tensor})  # no graph keeps their operands


def push_by_rule(level: DualLevel, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return the result of an operator by forall's rule, or None where torch's formula is used.

    That is where forall has no rule, or where no operand is a wrapper with a tangent.
    """
    if level.entry.parent is None:  # its values are no wrappers
        return None
    rule = JVP_RULES.get(func)
    if (
        rule is None
        or not level.active
        or level.tapes is not None
        or stack.ever_parted
        or not torch.is_grad_enabled()
        or is_inference_mode_enabled()
        or has_users_tangents()  # an operand that is no value of the level may have one
        or (func is _DETACH and not is_excluded(AUTOGRAD))
        or (is_in_backward() and is_accumulating())
    ):
        return None
    # Where forward mode is off a value is as good as its primal.
    with functions_off(), enable_autograd_below(grad=level.outer_grad, forward=False):
        return rule(level, func, args, kwargs)


def _split(level: DualLevel, a: Any) -> tuple[Any, torch.Tensor | None]:
    """Return an operand and its tangent."""
    if type(a) is not DualTensor or a.level is not level:
        return a, None
    with enable_forward_mode():
        return level.split_value(a)


def _split_moving(level: DualLevel, a: Any) -> tuple[Any, torch.Tensor | None]:
    """Return an operand and its tangent; without one where torch's formula is used."""
    value, tangent = _split(level, a)
    return value, tangent if isinstance(value, Wrapper) else None


def _find_primal(level: DualLevel, a: Any) -> Any:
    """Return the primal of an operand, which a graph may keep."""
    with enable_forward_mode():
        return level.split_dual(a)[0]


def _push_view(level: DualLevel, func: Any, args: tuple, kwargs: dict) -> DualTensor | None:
    """Return a view, which is one of each half, if the halves are apart.

    A view of joined halves has to be torch's, or a write into its base would not reach its tangent.
    """
    x = args[0]
    if type(x) is not DualTensor or x.level is not level or (halves := find_halves(x)) is None:
        return None
    rest = args[1:]
    made = wrap_split(
        func(halves.primal, *rest, **kwargs), func(halves.tangent, *rest, **kwargs), level
    )
    return made if is_split(made) else None


def _push_constant(level: DualLevel, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return a result that has no tangent, of operands whose halves stay apart."""
    split = False
    primals = []
    for a in args:
        if type(a) is DualTensor and a.level is level:
            halves = find_halves(a)
            split = split or halves is not None
            a = a.value if halves is None else halves.primal
        primals.append(a)
    if not split:
        return None
    out = func(*primals, **kwargs)
    return wrap_dual(out, level) if isinstance(out, torch.Tensor) else out


def _push_linear(level: DualLevel, func: Any, args: tuple, kwargs: dict) -> DualTensor | None:
    """Return the result of an operator that is linear in its first argument, the one that moves."""
    value, tangent = _split_moving(level, args[0])
    if tangent is None:
        return None
    rest = args[1:]
    halves = func(value, *rest, **kwargs), func(tangent, *rest, **kwargs)
    return wrap_split(*halves, level)


def _push_masked_fill(level: DualLevel, func: Any, args: tuple, kwargs: dict) -> Any:
    value, tangent = _split_moving(level, args[0])
    if tangent is None:
        return None
    mask = level.lower_value(args[1])
    halves = func(value, mask, args[2]), func(tangent, mask, 0)
    return wrap_split(*halves, level)


def _push_where(level: DualLevel, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return entries of two operands; the tangent of one that does not move is zero."""
    (x, dx), (y, dy) = _split_moving(level, args[1]), _split_moving(level, args[2])
    if (dx is None and dy is None) or not (isinstance(x, Wrapper) and isinstance(y, Wrapper)):
        return None
    condition = level.lower_value(args[0])
    primal = func(condition, x, y)
    if dx is None or dy is None:
        moving: Any = dy if dx is None else dx
        if moving.dtype != primal.dtype:
            return None
        zero = make_plain_zeros((), dtype=moving.dtype, device=moving.device)
        dx, dy = (zero if dx is None else dx), (zero if dy is None else dy)
    tangent = func(condition, dx, dy)
    if tangent.shape != primal.shape:
        tangent = tangent.expand_as(primal)
    return wrap_split(primal, tangent, level)


def _push_cat(level: DualLevel, func: Any, args: tuple, kwargs: dict) -> Any:
    pairs = [_split_moving(level, a) for a in args[0]]
    if all(t is None for _, t in pairs) or not all(isinstance(p, Wrapper) for p, _ in pairs):
        return None
    rest = args[1:]
    primal = func([p for p, _ in pairs], *rest, **kwargs)
    tangents = [torch.zeros_like(p) if t is None else t for p, t in pairs]
    tangent = func(tangents, *rest, **kwargs)
    return wrap_split(primal, tangent, level)


def _keeps_operands(level: DualLevel, pairs: list[tuple[Any, Any]]) -> bool:
    """True if a graph of an outer derivative may keep these operands."""
    return level.outer_grad and any(
        isinstance(v, torch.Tensor) and v.requires_grad for v, _ in pairs
    )


def _has_torchs_tangent(a: Any) -> bool:
    with enable_forward_mode():
        return read_tangent(a) is not None


def _push_binary(level: DualLevel, func: Any, args: tuple, kwargs: dict) -> DualTensor | None:
    """Return a sum, a product, a quotient or a maximum."""
    pairs = [_split(level, a) for a in args]
    if all(t is None for _, t in pairs) or not any(isinstance(v, Wrapper) for v, _ in pairs):
        return None
    if marking.used and func in LINEAR and any(t is None and is_marked_zero(v) for v, t in pairs):
        return None
    if is_in_backward() and any(t is None and _has_torchs_tangent(p) for p, t in pairs):
        return None  # a tensor saved by a node has a tangent, and is no value of the level
    if func not in _SUMS and _keeps_operands(level, pairs):
        pairs = [
            (v if t is None else _find_primal(level, a), t)
            for a, (v, t) in zip(args, pairs, strict=True)
        ]
    halves = push_pairs(level, func, pairs, kwargs)
    return None if halves is None else wrap_split(*halves, level)


def _push_entrywise(level: DualLevel, func: Any, args: tuple, kwargs: dict) -> DualTensor | None:
    """Return a function of each entry, whose derivative torch gives by the same formula."""
    value, tangent = _split_moving(level, args[0])
    if tangent is None or kwargs or value.is_complex():
        return None
    if value.requires_grad and level.outer_grad:
        value = _find_primal(level, args[0])
    found = _ENTRYWISE[func](tangent, value, *args[1:])
    return None if found is None else wrap_split(*found, level)


def _power(t: torch.Tensor, x: torch.Tensor, exponent: Any) -> Any:
    if isinstance(exponent, complex) or exponent == 0:
        return None
    return x.pow(exponent), t * (exponent * x.pow(exponent - 1))


def _by_result(op: Any, formula: Callable) -> Callable:
    """Return a rule whose tangent is a formula of the result."""

    def push(t: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = op(x)
        return y, formula(t, y)

    return push


def _by_operand(op: Any, formula: Callable) -> Callable:
    """Return a rule whose tangent is a formula of the operand; numbers may follow that."""

    def push(t: torch.Tensor, x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return op(x, *rest), formula(t, x)

    return push


_ENTRYWISE: dict[Any, Callable[..., Any]] = {
    aten.pow.Tensor_Scalar: _power,
    **{
        op: _by_result(op, formula)
        for op, formula in {
            aten.exp.default: lambda t, y: t * y,
            aten.expm1.default: lambda t, y: t * (y + 1),
            aten.reciprocal.default: lambda t, y: -t * (y * y),
            aten.rsqrt.default: lambda t, y: -0.5 * t * y.pow(3),
            aten.sigmoid.default: aten.sigmoid_backward.default,
            aten.sqrt.default: lambda t, y: t / (2 * y),
            aten.tanh.default: aten.tanh_backward.default,
        }.items()
    },
    **{
        op: _by_operand(op, formula)
        for op, formula in {
            aten.abs.default: lambda t, x: t * x.sgn(),
            aten.add.Scalar: lambda t, x: t.clone(),
            aten.cos.default: lambda t, x: t * -x.sin(),
            aten.log.default: lambda t, x: t / x,
            aten.log1p.default: lambda t, x: t / (x + 1),
            aten.sin.default: lambda t, x: t * x.cos(),
            aten.sub.Scalar: lambda t, x: t.clone(),
        }.items()
    },
}


# What forall has a rule for, each called with the level, the operator and its arguments.
JVP_RULES: dict[Any, Callable[[Any, Any, tuple, dict], Any]] = {
    **dict.fromkeys(BINARY_OPS, _push_binary),
    **dict.fromkeys(_ENTRYWISE, _push_entrywise),
    aten.cat.default: _push_cat,
    aten.masked_fill.Scalar: _push_masked_fill,
    aten.where.self: _push_where,
    # views
    aten.alias.default: _push_view,
    aten.diagonal.default: _push_view,
    aten.expand.default: _push_view,
    aten.permute.default: _push_view,
    aten.select.int: _push_view,
    aten.slice.Tensor: _push_view,
    aten.squeeze.default: _push_view,
    aten.squeeze.dim: _push_view,
    aten.squeeze.dims: _push_view,
    aten.t.default: _push_view,
    aten.transpose.int: _push_view,
    aten.unsqueeze.default: _push_view,
    aten.view.default: _push_view,
    # linear in the first argument, and the others do not move
    aten._unsafe_view.default: _push_linear,
    aten.clone.default: _push_linear,
    aten.div.Scalar: _push_linear,
    aten.mean.default: _push_linear,
    aten.mean.dim: _push_linear,
    aten.mul.Scalar: _push_linear,
    aten.neg.default: _push_linear,
    aten.select_backward.default: _push_linear,
    aten.slice_backward.default: _push_linear,
    aten.sum.default: _push_linear,
    aten.sum.dim_IntList: _push_linear,
    # without a tangent
    aten.detach.default: _push_constant,
    aten.equal.default: _push_constant,
    aten.eq.Scalar: _push_constant,
    aten.eq.Tensor: _push_constant,
    aten.ge.Scalar: _push_constant,
    aten.ge.Tensor: _push_constant,
    aten.gt.Scalar: _push_constant,
    aten.gt.Tensor: _push_constant,
    aten.le.Scalar: _push_constant,
    aten.le.Tensor: _push_constant,
    aten.lt.Scalar: _push_constant,
    aten.lt.Tensor: _push_constant,
    aten.ne.Scalar: _push_constant,
    aten.ne.Tensor: _push_constant,
    aten.ones_like.default: _push_constant,
    aten.zeros_like.default: _push_constant,
}
