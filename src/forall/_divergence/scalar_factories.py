"""torch.tensor and similar factories on a `BatchedScalar`, alone or in a list.

For these functions, torch does not call ``__torch_function__`` of objects in a list. The level's
function mode sees the call and finds it in `registry.CALLS`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._compat.devices import find_new_device
from forall._compat.dispatch_state import functions_off, no_dispatch
from forall._core.levels import stack
from forall._divergence import scalar_storage
from forall._divergence.batched_scalar import BatchedScalar
from forall._divergence.scalar_semantics import find_bounds
from forall._divergence.scalar_torch import cast_number, fits_in_dtype, promote_dtypes
from forall._vmap.batched_tensor import BatchedTensor, wrap_stack
from forall._vmap.registry import CALLS
from forall._vmap.rules import api_overrides  # noqa: F401 - enters the meanings that are widened here

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Tensor = torch.Tensor


def _has_number(data: Any) -> bool:
    if type(data) in (list, tuple):
        return any(map(_has_number, data))
    return type(data) is BatchedScalar


def _replace_numbers(data: Any, dtype: torch.dtype | None, device: Any) -> Any:
    """Replace each Number by the tensor that the factory would make of it alone."""
    if type(data) in (list, tuple):
        return type(data)(_replace_numbers(d, dtype, device) for d in data)
    if type(data) is not BatchedScalar:
        return data
    t = cast_number(data, dtype or promote_dtypes([data]), device)
    return data.concretize() if t is None else t


def _stack_numbers(data: Sequence, dtype: torch.dtype | None, device: Any) -> Tensor | None:
    """Return a row of numbers at once, where all are of one type and of the same examples."""
    if stack.listening or not data or {*map(type, data)} != {BatchedScalar}:
        return None
    kind, tensors = data[0].kind, scalar_storage.move_to_one_device([n.tensor for n in data])
    level = getattr(tensors[0], "level", None)
    if kind is complex or any(n.kind is not kind for n in data):
        return None
    for t in tensors:
        if type(t) is not BatchedTensor or t.level is not level or t.axis != 0:
            return None
        if type(t.value) is not Tensor:
            return None
    dtype = dtype or promote_dtypes([data[0]])
    with functions_off(), no_dispatch():
        rows = torch.stack([t.value for t in tensors], 1)
        if not fits_in_dtype(kind, find_bounds(rows), dtype):
            return None
        return wrap_stack(rows.to(device, dtype), 0, level)


def _make_tensor(before: Any, data: Any, dtype: Any, device: Any, requires_grad: bool) -> Tensor:
    device = find_new_device(device)
    found = _stack_numbers(data, dtype, device) if type(data) in (list, tuple) else None
    if found is not None:
        return found.requires_grad_() if requires_grad else found
    found = _replace_numbers(data, dtype, device)
    if not isinstance(found, Tensor):
        options = {"dtype": dtype, "device": device, "requires_grad": requires_grad}
        made = before(found, **options)
        return torch.tensor(found, **options) if made is NotImplemented else made
    # The number keeps its cast, so a copy is returned. Listeners must see an operator.
    found = (
        found.clone()
        if stack.listening
        else scalar_storage.cast_values(found, found.dtype, copy=True)
    )
    return found.requires_grad_() if requires_grad else found


def _accept_numbers(func: Callable) -> Callable:
    before, tensor = CALLS.get(func), CALLS[torch.tensor]

    def call(data: Any, dtype: Any = None, device: Any = None, **options: Any) -> Any:
        if _has_number(data):
            return _make_tensor(tensor, data, dtype, device, options.get("requires_grad", False))
        if before is None:
            return NotImplemented
        return before(data, dtype=dtype, device=device, **options)

    return call


def _accept_numbers_method(before: Callable) -> Callable:
    def call(x: Tensor, data: Any, **options: Any) -> Any:
        if not _has_number(data):
            return before(x, data, **options)
        like = {"dtype": x.dtype, "device": x.device, **options}
        return CALLS[torch.tensor](data, **like)

    return call


CALLS.update({f: _accept_numbers(f) for f in (torch.tensor, torch.as_tensor, torch.asarray)})
CALLS[torch.Tensor.new_tensor] = _accept_numbers_method(CALLS[torch.Tensor.new_tensor])
