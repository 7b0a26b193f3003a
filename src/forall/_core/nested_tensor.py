"""What a call on nested tensors means inside a level: what torch's class says, by their rows.

Their class takes rows out by a detach, which would cut what these are at our levels from its
tangent, and passes on the detach by which autograd saves a tensor.
"""

from __future__ import annotations

from typing import Any

import torch

from forall._compat.dispatch_state import AUTOGRAD, is_excluded
from forall._compat.jagged_layout import (
    Jagged,
    components,
    held_rows,
    jagged_dim,
    with_held_rows,
    with_rows,
)
from forall._core.levels import second_name

aten = torch.ops.aten
_ATTENTION = torch.nn.functional.scaled_dot_product_attention
_GET_ROWS = frozenset({aten._nested_get_values.default, aten.values.default})
_DETACH = aten.detach.default


def answer(func: Any, args: tuple) -> Any:
    """Return what is not left to their class, and NotImplemented for all other operators."""
    if func in _GET_ROWS:
        return second_name(held_rows(args[0]))
    if func is _DETACH and type(args[0]) is Jagged and not is_excluded(AUTOGRAD):
        return with_held_rows(args[0], second_name(held_rows(args[0])))
    return NotImplemented


# Their class computes attention by tensors of the other layout, of which nothing is seen here.
OF_COMPONENTS = aten._nested_tensor_from_tensor_list.default


def has_no_tangent() -> NotImplementedError:
    return NotImplementedError(
        "jvp: attention of nested tensors, or another call that makes one of the strided layout, "
        "has no forward mode.\n"
        "Take it of their components (x.unbind()), or map the function over these: vmap(f)(x)."
    )


def attend(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Attention within each component. Their class has kernels that take no values of ours."""
    each = zip(*map(components, (query, key, value)), strict=True)
    found = [_ATTENTION(q, k, v, *args, **kwargs) for q, k, v in each]
    return with_rows(query, torch.cat(found, jagged_dim(query)))


CALLS = {_ATTENTION: attend}
