"""Where values of different examples of one level meet, below autograd. See NOTE [parts]."""

from __future__ import annotations

from typing import Any

import torch

from forall._batching.parts import Undefined, common, covers, cut, is_of, union, united
from forall._batching.table import overloads
from forall._core.levels import innermost, levels_in, outside
from forall._torch import trees
from forall._torch.schema import facts

aten = torch.ops.aten

# What a backward pass adds up, or lays side by side: a summand that lacks examples is zero there.
_SUMMING = """
    add add_ sub sub_ rsub stack cat where copy_ index_put index_put_ index_add index_add_
    scatter_add scatter_add_ slice_scatter select_scatter diagonal_scatter as_strided_scatter
    _thnn_fused_lstm_cell_backward _thnn_fused_lstm_cell_backward_impl mkldnn_rnn_layer_backward
"""
SUMS = frozenset(op for name in _SUMMING.split() for op in overloads(getattr(aten, name)))


def meet(func: Any, args: tuple, kwargs: dict) -> Any:
    """An operator on values of examples of one root, not all the same ones or those that run."""
    root = innermost(levels_in(args, kwargs)).root
    first, *rest = dict.fromkeys(b.level for b in trees.leaves((args, kwargs)) if is_of(b, root))
    adds = func in SUMS
    target = first
    for level in rest:
        target = union(target, level) if adds else common(target, level)
        if target is None:
            raise Undefined(args[0], level)

    def fitted(a: Any) -> Any:
        if not is_of(a, root) or a.level is target:
            return a
        if covers(a.level, target):
            return cut(a, target)
        return united([(a.level, a)], target)

    if rest:
        with outside(root):
            written = args[0] if facts(func).mutates else None
            args, kwargs = trees.map_tensors(fitted, (args, kwargs))
            if written is not None and args[0] is not written:  # a sum that grows
                written.value, written.axis, written.level = args[0].value, args[0].axis, target
                written.family, written.chain = None, ()
                args = (written, *args[1:])
    return target.run(func, args, kwargs)
