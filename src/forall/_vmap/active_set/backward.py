"""Operators on values of different examples of one level, below autograd. See NOTE [parts]."""

from __future__ import annotations

from typing import Any

import torch

from forall._compat import pytree
from forall._compat.op_schema import find_written_args
from forall._core.levels import find_innermost, levels_in, run_outside
from forall._vmap.active_set.merge import (
    is_value_of_root,
    make_zeros_for,
    select_examples,
    unite_parts,
)
from forall._vmap.active_set.sub_level import covers_examples, intersect_examples, unite_examples
from forall._vmap.registry import list_overloads

aten = torch.ops.aten


def _find_overloads(names: str) -> frozenset:
    return frozenset(op for name in names.split() for op in list_overloads(getattr(aten, name)))


# Operators by which a backward pass adds up, or lays side by side: a summand that lacks examples is
# zero there. Numbers, masks and indices among the operands are no summands.
SUMS = _find_overloads(
    """
    add add_ sub sub_ rsub stack cat complex where index_put index_put_ index_add index_add_
    scatter_add scatter_add_ slice_scatter select_scatter diagonal_scatter as_strided_scatter
    _thnn_fused_lstm_cell_backward _thnn_fused_lstm_cell_backward_impl mkldnn_rnn_layer_backward
    _thnn_fused_gru_cell_backward _cudnn_rnn_backward
    """
)
# One summand and a product.
_BOTH = _find_overloads(
    "addmm addmm_ addmv addmv_ addr addr_ addbmm baddbmm addcmul addcmul_ addcdiv"
)


def run_mixed_operands(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run an operator on values of examples of one root, not all of the same ones."""
    root = find_innermost(levels_in(args, kwargs)).root
    values = [b for b in pytree.get_leaves((args, kwargs)) if is_value_of_root(b, root)]
    if any(b.level is not values[0].level for b in values):
        known = _find_target_level(func, args, values)
        target = known or values[-1].level

        def fit_operand(a: Any) -> Any:
            if not is_value_of_root(a, root) or a.level is target:
                return a
            if covers_examples(a.level, target):
                return select_examples(a, target)
            parts = [*_iter_common_examples(a, target)]
            return unite_parts(parts, target) if parts else make_zeros_for(a, target)

        with run_outside(root):
            old, (args, kwargs) = args, pytree.map_tensors(fit_operand, (args, kwargs))
            for place in find_written_args(func, args):
                if isinstance(place, int) and args[place] is not old[place]:
                    args = (
                        *args[:place],
                        _replace_examples(func, old[place], args[place]),
                        *args[place + 1 :],
                    )
        out = target.run(func, args, kwargs)
        if known is None:  # a cotangent of none of these examples: they get nothing, not 0 * inf
            out = pytree.map_tensors(torch.zeros_like, out)
        return out
    return values[0].level.run(func, args, kwargs)


def _find_target_level(func: Any, args: tuple, values: list) -> Any:
    """The level that an operator is done for; None where its factors have no examples in common."""
    if func is aten.copy_.default:
        return args[0].level
    sums = func in SUMS
    target = None
    factors = []
    for b in values:
        if not sums or not (b.is_floating_point() or b.is_complex()):
            factors.append(b)
        else:
            target = b.level if target is None else unite_examples(target, b.level)
    for b in factors:
        target = b.level if target is None else intersect_examples(target, b.level)
        if target is None:
            return None
    if func in _BOTH and args[0].level is not target and not covers_examples(target, args[0].level):
        raise NotImplementedError(
            f"vmap: {func} adds to a gradient of examples that have diverged a product of some of "
            "them.\nWrite it as a product and a sum."
        )
    return target


def _iter_common_examples(b: Any, target: Any) -> Any:
    """Yield the level and the values of the examples that ``b`` has of those of ``target``."""
    some = intersect_examples(b.level, target)
    if some is not None:
        yield some, (b if some is b.level else select_examples(b, some))


def _replace_examples(func: Any, written: Any, made: Any) -> Any:
    """Replace the examples of a tensor that is written into by those of ``made``."""
    family = written.family
    if family is not None and sum(m() is not None for m in family.members) > 1:
        raise NotImplementedError(
            f"vmap: {func} writes into a view of a gradient, for other examples than it has."
        )
    written.value, written.axis, written.level = made.value, made.axis, made.level
    written.family, written.chain = None, ()
    return written
