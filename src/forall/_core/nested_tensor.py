"""Nested tensors of jagged layout inside a level: torch's class runs calls on their rows.

That class reads the rows through a detach, which would cut a value of our levels from its tangent.
It also forwards the detach by which autograd saves a tensor. Both are handled here.
"""

from __future__ import annotations

from typing import Any

import torch

from forall._compat.dispatch_state import AUTOGRAD, is_excluded
from forall._compat.documented_error import documented_error
from forall._compat.jagged_layout import (
    Jagged,
    find_jagged_dim,
    get_raw_rows,
    replace_raw_rows,
    replace_rows,
    split_components,
)
from forall._core.levels import alias_for_autograd

aten = torch.ops.aten
_ATTENTION = torch.nn.functional.scaled_dot_product_attention
_GET_ROWS = frozenset({aten._nested_get_values.default, aten.values.default})
_DETACH = aten.detach.default


def run_on_nested(func: Any, args: tuple) -> Any:
    """Run an operator that torch's class gets wrong here; NotImplemented for all others."""
    if func in _GET_ROWS:
        return alias_for_autograd(get_raw_rows(args[0]))
    if func is _DETACH and type(args[0]) is Jagged and not is_excluded(AUTOGRAD):
        return replace_raw_rows(args[0], alias_for_autograd(get_raw_rows(args[0])))
    return NotImplemented


# Torch's class computes attention by nested tensors of strided layout, which no level sees.
OF_COMPONENTS = aten._nested_tensor_from_tensor_list.default


def make_no_tangent_error() -> NotImplementedError:
    return documented_error(NotImplementedError, "nested-tensors")(
        "jvp: attention of nested tensors, or another call that makes one of the strided layout, "
        "has no forward mode.\n"
        "Take it of their components (x.unbind()), or map the function over these: vmap(f)(x)."
    )


def attend_components(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Compute attention within each component: torch's kernels for it take no wrappers."""
    each = zip(*map(split_components, (query, key, value)), strict=True)
    found = [_ATTENTION(q, k, v, *args, **kwargs) for q, k, v in each]
    return replace_rows(query, torch.cat(found, find_jagged_dim(query)))


CALLS = {_ATTENTION: attend_components}
