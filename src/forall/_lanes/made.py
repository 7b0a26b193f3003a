"""torch.tensor and its like on a `Number`, alone or in a list.

No ``__torch_function__`` of what lies in a list is asked there: the level's function mode meets the
call, and looks it up in `table.CALLS`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._batching.rules import calls  # noqa: F401 - enters the meanings that are widened here
from forall._batching.table import CALLS
from forall._lanes.in_torch import common_dtype, in_dtype
from forall._lanes.numbers import Number

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor


def _has_number(data: Any) -> bool:
    if type(data) in (list, tuple):
        return any(map(_has_number, data))
    return type(data) is Number


def _with_tensors(data: Any, dtype: torch.dtype | None, device: Any) -> Any:
    """Each Number as the tensor that it alone would make."""
    if type(data) in (list, tuple):
        return type(data)(_with_tensors(d, dtype, device) for d in data)
    if type(data) is not Number:
        return data
    t = in_dtype(data, dtype or common_dtype([data]), device)
    return data.one() if t is None else t


def _made(before: Any, data: Any, dtype: Any, device: Any, requires_grad: bool) -> Tensor:
    found = _with_tensors(data, dtype, device)
    if not isinstance(found, Tensor):
        options = {"dtype": dtype, "device": device, "requires_grad": requires_grad}
        made = before(found, **options)
        return torch.tensor(found, **options) if made is NotImplemented else made
    found = found.clone()
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
