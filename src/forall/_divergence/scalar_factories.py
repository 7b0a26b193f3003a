"""torch.tensor and similar factories on a `Number`, alone or in a list.

For these functions, torch does not call ``__torch_function__`` of objects in a list. The level's
function mode sees the call and finds it in `table.CALLS`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._compat.devices import new_device
from forall._compat.dispatch_state import functions_off, no_dispatch
from forall._core.levels import stack
from forall._divergence import scalar_storage
from forall._divergence.batched_scalar import Number
from forall._divergence.scalar_semantics import bounds_of
from forall._divergence.scalar_torch import common_dtype, fit, in_dtype
from forall._vmap.batched_tensor import Batched, wrap
from forall._vmap.registry import CALLS
from forall._vmap.rules import api_overrides  # noqa: F401 - enters the meanings that are widened here

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Tensor = torch.Tensor


def _has_number(data: Any) -> bool:
    if type(data) in (list, tuple):
        return any(map(_has_number, data))
    return type(data) is Number


def _with_tensors(data: Any, dtype: torch.dtype | None, device: Any) -> Any:
    """Replace each Number by the tensor that the factory would make of it alone."""
    if type(data) in (list, tuple):
        return type(data)(_with_tensors(d, dtype, device) for d in data)
    if type(data) is not Number:
        return data
    t = in_dtype(data, dtype or common_dtype([data]), device)
    return data.one() if t is None else t


def _stack_numbers(data: Sequence, dtype: torch.dtype | None, device: Any) -> Tensor | None:
    """Return a row of numbers at once, where all are of one type and of the same examples."""
    if stack.listening or not data or {*map(type, data)} != {Number}:
        return None
    kind, tensors = data[0].kind, scalar_storage.on_one_device([n.tensor for n in data])
    level = getattr(tensors[0], "level", None)
    if kind is complex or any(n.kind is not kind for n in data):
        return None
    for t in tensors:
        if type(t) is not Batched or t.level is not level or t.axis != 0:
            return None
        if type(t.value) is not Tensor:
            return None
    dtype = dtype or common_dtype([data[0]])
    with functions_off(), no_dispatch():
        rows = torch.stack([t.value for t in tensors], 1)
        if not fit(kind, bounds_of(rows), dtype):
            return None
        return wrap(rows.to(device, dtype), 0, level)


def _made(before: Any, data: Any, dtype: Any, device: Any, requires_grad: bool) -> Tensor:
    device = new_device(device)
    found = _stack_numbers(data, dtype, device) if type(data) in (list, tuple) else None
    if found is not None:
        return found.requires_grad_() if requires_grad else found
    found = _with_tensors(data, dtype, device)
    if not isinstance(found, Tensor):
        options = {"dtype": dtype, "device": device, "requires_grad": requires_grad}
        made = before(found, **options)
        return torch.tensor(found, **options) if made is NotImplemented else made
    # The number keeps its cast, so a copy is returned. Listeners must see an operator.
    found = found.clone() if stack.listening else scalar_storage.cast(found, found.dtype, copy=True)
    return found.requires_grad_() if requires_grad else found


def _widened(func: Callable) -> Callable:
    before, tensor = CALLS.get(func), CALLS[torch.tensor]

    def call(data: Any, dtype: Any = None, device: Any = None, **options: Any) -> Any:
        if _has_number(data):
            return _made(tensor, data, dtype, device, options.get("requires_grad", False))
        if before is None:
            return NotImplemented
        return before(data, dtype=dtype, device=device, **options)

    return call


def _widened_method(before: Callable) -> Callable:
    def call(x: Tensor, data: Any, **options: Any) -> Any:
        if not _has_number(data):
            return before(x, data, **options)
        like = {"dtype": x.dtype, "device": x.device, **options}
        return CALLS[torch.tensor](data, **like)

    return call


CALLS.update({f: _widened(f) for f in (torch.tensor, torch.as_tensor, torch.asarray)})
CALLS[torch.Tensor.new_tensor] = _widened_method(CALLS[torch.Tensor.new_tensor])
