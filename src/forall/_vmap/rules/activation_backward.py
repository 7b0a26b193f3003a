"""Rules of backward operators of activations, which are pointwise: ``g * f'(x)``.

In a Jacobian only ``g`` is batched. The slope ``f'(x)``, with an exponential or two per entry, is
then computed once for all rows, by the operator with ``g = 1``. The rest is a product.
"""

from __future__ import annotations

from typing import Any

import torch

from forall._vmap.registry import register_rows
from forall._vmap.rule_makers.basic import (
    expand_to_stack,
    is_mapped,
    lower_shared,
    wrap_results,
)
from forall._vmap.rule_makers.pointwise import handle_pointwise

aten = torch.ops.aten
_WIDE = (torch.float32, torch.float64)  # a slope in half precision would be rounded twice


def _make_slope_handler(point: int):
    """Return the handler of an operator on g, and on x as argument number ``point``."""

    def handler(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
        g, *rest = args
        x = args[point]
        alike = g.shape == x.shape and g.dtype == x.dtype
        if not alike or g.dtype not in _WIDE or any(is_mapped(a, level) for a in rest):
            return _run_on_stacks(level, func, args, kwargs)
        slope = func(torch.ones_like(lower_shared(x, level)), *lower_shared(rest, level), **kwargs)
        return handle_pointwise(level, aten.mul.Tensor, (g, slope), {})

    return handler


def _run_on_stacks(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """Run the kernel on batched tensors alone: not all kernels broadcast (gelu, log_sigmoid)."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    if all(is_mapped(a, level) for a in tensors):
        return handle_pointwise(level, func, args, kwargs)
    args = tuple(expand_to_stack(a, level) if isinstance(a, torch.Tensor) else a for a in args)
    return wrap_results(func(*args, **kwargs), 0, level)


_POINTS = {
    aten.gelu_backward.default: 1,
    aten.silu_backward.default: 1,
    aten.mish_backward.default: 1,
    aten.softplus_backward.default: 1,
    aten.elu_backward.default: 5,
    aten.log_sigmoid_backward.default: 1,
}
register_rows({op: _make_slope_handler(point) for op, point in _POINTS.items()})
