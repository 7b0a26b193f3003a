"""Overrides of API calls that read a Python number from a tensor before any operator is reached.

Examples are ``x[i]``, ``torch.full(size, v)`` and ``torch.tensor([v])`` with a batched i or v. They
are rewritten with operators that take the batched tensor instead of a number.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from forall._compat.bitset import count_flags
from forall._compat.devices import find_new_device
from forall._compat.dispatch_state import no_dispatch
from forall._compat.documented_error import documented_error
from forall._compat.wrapper_tensor import Wrapper
from forall._core.axes import append_dims
from forall._core.errors import make_data_dependent_error, make_shared_write_error
from forall._core.levels import has_any_tangent, lift, top
from forall._vmap.batched_tensor import (
    BatchedTensor,
    alias_call,
    derive_view,
    is_mapped_at_any,
    replace_stack,
)
from forall._vmap.concretize import concretize_for_user, get_plain_numbers
from forall._vmap.failing_example import check_fits, first_error
from forall._vmap.function_mode import find_sharing_level
from forall._vmap.mutation.mutation_log import log_plain_read, make_summed_grad_error
from forall._vmap.mutation.pending_updates import is_shared_external, require_all_examples
from forall._vmap.mutation.rollback import find_logs, get_grad_key
from forall._vmap.mutation.view_copies import make_view_copy
from forall._vmap.registry import AFTER_EXIT_CALLS, CALLS, IN_PLACE, UNSHARED

aten = torch.ops.aten
Tensor = torch.Tensor
_EVERYTHING = slice(None)
_BASIC = (int, slice, type(None))


def is_mapped_number(a: Any) -> bool:
    """True if ``a`` is a batched tensor of rank 0, of any level."""
    return isinstance(a, Wrapper) and not a.dim() and is_mapped_at_any(a)


def _is_mapped_index(p: Any) -> bool:
    return is_mapped_number(p) and p.dtype not in (torch.bool, torch.uint8)


# --- x[i] --------------------------------------------------------------------------------------


def count_consumed_dims(p: Any) -> int:
    """Return how many dims of x an entry of an index takes."""
    if p is None or p is Ellipsis or isinstance(p, bool):
        return 0
    if isinstance(p, Tensor) and p.dtype in (torch.bool, torch.uint8):
        return p.dim()
    return 1


def expand_ellipsis(x: Tensor, index: Any) -> list:
    """Return an index as a list in which slices replace ``...``."""
    parts = list(index) if isinstance(index, tuple) else [index]
    missing = x.dim() - sum(map(count_consumed_dims, parts))
    for n, p in enumerate(parts):
        if p is Ellipsis:
            parts[n : n + 1] = [_EVERYTHING] * missing
            break
    return parts


def _find_indices(parts: list) -> list:
    """Return, for each dim of x, the batched number that indexes it, or None."""
    places: list = []
    for p in parts:
        places.extend([p.long()] if _is_mapped_index(p) else [None] * count_consumed_dims(p))
    while places and places[-1] is None:
        places.pop()
    return places


def _getitem(x: Tensor, index: Any) -> Any:
    if not any(map(_is_mapped_index, index if isinstance(index, tuple) else (index,))):
        return NotImplemented
    parts = expand_ellipsis(x, index)
    places = _find_indices(parts)
    picked = aten.index.Tensor(x, places)
    rest = tuple(p for p in parts if not _is_mapped_index(p))
    picked = make_view_copy(picked, x, places)
    return picked[rest] if rest else picked


def _write_at_numbers(x: Tensor, index: Any, value: Any) -> Any:
    parts = expand_ellipsis(x, index)
    if all(_is_mapped_index(p) or type(p) in _BASIC for p in parts):
        target = x[tuple(_EVERYTHING if _is_mapped_index(p) else p for p in parts)]
        slots = [p.long() if _is_mapped_index(p) else None for p in parts if type(p) is not int]
        kept = [n for n, slot in itertools.zip_longest(target.shape, slots) if slot is None]
        aten.index_put_.default(target, slots, fit_value(value, target, len(kept)))
        return x
    places = _find_indices(parts)
    row = aten.index.Tensor(x, places)
    row[tuple(p for p in parts if not _is_mapped_index(p))] = value
    aten.index_put_.default(x, places, row)
    return x


def fit_value(value: Any, target: Tensor, rank: int) -> Tensor:
    """Return ``value`` as ``target[..] = value`` takes it: in target's dtype, no leading 1s."""
    if not isinstance(value, Tensor):
        return torch.full((), value, dtype=target.dtype, device=target.device)
    while value.dim() > rank and value.shape[0] == 1:
        value = value[0]
    if type(value) is BatchedTensor and value.family is not None:
        value = value.clone()  # it may be part of the target, which index_put_ does not allow
    return value.to(dtype=target.dtype, device=target.device)


# --- numbers as values -------------------------------------------------------------------------


def _dtype_of_number(v: Tensor) -> torch.dtype:
    """The dtype of a tensor made from ``v.item()``."""
    if v.dtype.is_floating_point:
        return torch.get_default_dtype()
    if v.dtype.is_complex:
        return torch.complex128 if torch.get_default_dtype() == torch.float64 else torch.complex64
    return torch.bool if v.dtype == torch.bool else torch.int64


def _fill_like(like: Tensor, value: Tensor) -> Tensor:
    """Fill ``like`` with a number and return it. Numbers carry no derivative."""
    requires_grad = like.requires_grad
    check_fits(value, like.dtype)
    out = like.detach().copy_(value.detach())
    return out.requires_grad_() if requires_grad else out


def _full(size: Any, fill_value: Any, *, dtype: Any = None, **options: Any) -> Any:
    if not is_mapped_number(fill_value):
        return NotImplemented
    dtype = dtype or _dtype_of_number(fill_value)
    options.pop("out", None)
    options["device"] = find_new_device(options.get("device"))
    return _fill_like(torch.empty(size, dtype=dtype, **options), fill_value)


def _full_like(x: Tensor, fill_value: Any, **options: Any) -> Any:
    if not is_mapped_number(fill_value):
        return NotImplemented
    return _fill_like(torch.empty_like(x, **options), fill_value)


def _new_full(x: Tensor, size: Any, fill_value: Any, **options: Any) -> Any:
    if not is_mapped_number(fill_value):
        return NotImplemented
    return _fill_like(x.new_empty(size, **options), fill_value)


def _has_wrapper(data: Any) -> bool:
    if isinstance(data, (list, tuple)):
        return any(map(_has_wrapper, data))
    return isinstance(data, Wrapper)


def _stack_numbers(data: Any, dtype: torch.dtype | None, device: Any) -> Tensor:
    """Return the tensor of nested lists of numbers, some of which are batched."""
    if isinstance(data, (list, tuple)):
        parts = [_stack_numbers(d, dtype, device) for d in data]
        common = parts[0].dtype
        for p in parts[1:]:
            common = torch.promote_types(common, p.dtype)
        return torch.stack([p.to(common) for p in parts])
    if isinstance(data, Tensor):
        return data.detach().to(dtype=dtype, device=device)
    return torch.tensor(data, dtype=dtype, device=device)


def _tensor(
    data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False, **_: Any
) -> Any:
    if not isinstance(data, (list, tuple)) or not _has_wrapper(data):
        return NotImplemented
    out = _stack_numbers(data, dtype, find_new_device(device))
    return out.requires_grad_() if requires_grad else out


def _new_tensor(x: Tensor, data: Any, **options: Any) -> Any:
    return _tensor(data, **{"dtype": x.dtype, "device": x.device, **options})


def _as_tensor(data: Any, dtype: Any = None, device: Any = None) -> Any:
    return _tensor(data, dtype=dtype, device=device)


def _narrow(x: Tensor, dim: int, start: Any, length: int) -> Any:
    if not is_mapped_number(start):
        return NotImplemented
    begin = torch.where(start < 0, start + x.shape[dim], start).long()
    try:
        return gather_range(x, dim % x.dim(), begin, length)
    except (IndexError, RuntimeError) as error:  # of `index_select`, which the user has not called
        raise first_error("narrow", torch.narrow, (x, dim, start, length), {}) or error from None


def gather_range(x: Tensor, dim: int, begin: Tensor, length: int) -> Tensor:
    """Return ``x.narrow(dim, begin, length)`` with a batched ``begin`` (`view_copies`)."""
    places = begin + torch.arange(length, device=x.device)  # `begin` may be a number of the CPU
    return make_view_copy(x.index_select(dim, places), x, [*[None] * dim, places])


def _tensor_split(x: Tensor, cuts: Any, dim: int = 0) -> Any:
    if not isinstance(cuts, Tensor):
        return NotImplemented
    cure = "Give the places as a list."
    places = concretize_for_user(
        cuts, lambda: make_data_dependent_error("tensor_split at places in a tensor", cure)
    )
    with no_dispatch():
        where = places.tolist()
    return torch.tensor_split(x, where, dim)


# --- a test ------------------------------------------------------------------------------------


def _is_nonzero(x: Tensor) -> Any:
    """Return ``bool(x)``: only ``x != 0`` has to be the same for all examples, not the number."""
    numbers = get_plain_numbers(x)
    if numbers is not None:
        with no_dispatch():
            count = count_flags(numbers if numbers.dtype is torch.bool else numbers != 0)
        if count in (0, x.level.size):
            return count > 0
    if (
        not isinstance(x, Wrapper)
        or x.numel() != 1
        or x.dtype is torch.bool
        or not is_mapped_at_any(x)
    ):
        return NotImplemented
    return bool(x.detach() != 0)


# --- the tensor's own memory -------------------------------------------------------------------


def _make_memory_call(name: str) -> Any:
    """Return an override of a method that reads memory, such as ``x.numpy()``.

    The method of an ordinary tensor is called below all levels, which would intercept the read.
    """

    def call(x: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(x, Wrapper):
            return getattr(x, name)(*args, **kwargs)
        log_plain_read(f"x.{name}()", x)
        with no_dispatch():
            return getattr(x, name)(*args, **kwargs)

    return call


def _use_example_strides(x: Any, *args: Any, **kwargs: Any) -> Any:
    """Give x the strides that one example would have, then leave the call to torch.

    It comes before calls that return a view or a copy depending on strides, or the strides.
    """
    if isinstance(x, Wrapper):
        x.lay_out_alone()
    return NotImplemented


def _get_grad(x: Tensor) -> Any:
    for level, log in find_logs(top()):
        if id(x) in log.leaves:
            raise make_summed_grad_error(x)
        if is_shared_external(x, level):
            require_all_examples(level, "x.grad", x)
            log.read.add(get_grad_key(x))
    return NotImplemented


def _set_grad(x: Tensor, _new: Any) -> Any:
    for level, log in find_logs(top()):
        if is_shared_external(x, level):
            require_all_examples(level, "x.grad = ..", x)
            log.log_grad_write(x)
    return NotImplemented


def _set_data(x: Tensor, new: Tensor) -> Any:
    """Run ``x.data = new``: x becomes an alias of new's memory, without new's autograd history."""
    if type(x) is not BatchedTensor:
        if type(new) is BatchedTensor:
            if torch.nn.parameter.is_lazy(x):
                raise documented_error(RuntimeError, "shared-write")(
                    "vmap: a lazy module makes its parameters in its first call, for all examples."
                    "\nCall it once outside vmap, on one example: net(xs[0])."
                )
            raise make_shared_write_error("x.data = ..", x, [new])
        return NotImplemented
    if has_any_tangent(x.value):
        raise documented_error(NotImplementedError, "tangent-lost")(
            "vmap: x.data = .. inside forward mode: x would lose its tangent, which it keeps.\n"
            "Use x.copy_(..) under torch.no_grad(), or x = x + (new - x).detach()."
        )
    new = lift(new, x.level)
    requires_grad, twin = x.requires_grad, derive_view(new, new.value, new.axis, alias_call)
    replace_stack(x, new.value, new.axis)
    x.family, x.chain, x.is_external = twin.family, twin.chain, twin.is_external
    x.family.add(x)
    return x.requires_grad_(requires_grad) if x.is_leaf else None


def _set_items(x: Tensor, index: Any, value: Any) -> Any:
    if type(index) is BatchedTensor and index.dtype is torch.bool and index.dim():
        return _write_masked(x, index, value)
    if not any(map(_is_mapped_index, index if isinstance(index, tuple) else (index,))):
        return NotImplemented
    return _write_at_numbers(x, index, value)


def _write_masked(x: Tensor, mask: Tensor, value: Any) -> Any:
    """Run ``x[mask] = value`` with one value for all entries.

    Torch's derivative of it would need the number of entries, which differs between the examples.
    """
    rest = x.dim() - mask.dim()
    if rest < 0 or (isinstance(value, Tensor) and (value.dim() > rest or value.dtype != x.dtype)):
        return NotImplemented
    mask = append_dims(mask, rest)
    if isinstance(value, Tensor):
        return x.copy_(torch.where(mask, value, x))
    return x.masked_fill_(mask, value)


def _index_put(x: Tensor, indices: Any, values: Any, accumulate: bool = False) -> Any:
    """Run ``x.index_put_((mask,), values)``, which is ``x[mask] = values``."""
    if accumulate or len(indices) != 1 or type(indices[0]) is not BatchedTensor:
        return NotImplemented
    (mask,) = indices
    return (
        _write_masked(x, mask, values)
        if mask.dtype is torch.bool and mask.dim()
        else NotImplemented
    )


def _writes_in_place(name: str) -> bool:
    if name.startswith("__"):
        return name.startswith("__i") and f"__{name[3:]}" in _NAMES
    return name.endswith("_") and not name.startswith("_")


def _make_write_into_shared(func: Any) -> Any:
    """Return an override that makes a write into a captured tensor one into its stand-in.

    Autograd runs operators on what such a call writes into. On the tensor itself they would be
    recorded as for one example; the history of its stand-in is handed back when the call ends.
    """
    known = CALLS.get(func)

    def call(x: Any, *args: Any, **kwargs: Any) -> Any:
        level = find_sharing_level(top())
        if level is None:
            return NotImplemented
        shared, more = level.share_captured((x, *args), kwargs)
        if shared[0] is x:
            return NotImplemented
        out = NotImplemented if known is None else known(*shared, **more)
        if out is NotImplemented:
            out = func(*shared, **more)
        return x if out is shared[0] else out

    return call


# Writes which examples may make once for all, and on whose target autograd runs operators.
_READ_THEIR_TARGET = (
    *("__setitem__", "clamp_", "clamp_min_", "clamp_max_", "clip_"),
    *("relu_", "abs_", "absolute_"),
)
_NAMES = dir(Tensor)
IN_PLACE.update(getattr(Tensor, name) for name in _NAMES if _writes_in_place(name))
IN_PLACE.add(Tensor.__setitem__)
AFTER_EXIT_CALLS.update(
    {
        Tensor.__getitem__: _getitem,
        Tensor.__setitem__: _set_items,
        Tensor.index_put_: _index_put,
        torch.index_put_: _index_put,
        torch.narrow: _narrow,
        Tensor.narrow: _narrow,
        torch.tensor_split: _tensor_split,
        Tensor.tensor_split: _tensor_split,
    }
)
CALLS.update(
    {
        **AFTER_EXIT_CALLS,
        Tensor.__bool__: _is_nonzero,
        torch.is_nonzero: _is_nonzero,
        Tensor.is_nonzero: _is_nonzero,
        torch.full: _full,
        torch.full_like: _full_like,
        Tensor.new_full: _new_full,
        torch.tensor: _tensor,
        Tensor.new_tensor: _new_tensor,
        torch.as_tensor: _as_tensor,
        Tensor.data.__set__: _set_data,
        Tensor.grad.__get__: _get_grad,
        Tensor.grad.__set__: _set_grad,
        **{
            getattr(home, n): _use_example_strides
            for n in ("reshape", "flatten", "ravel", "as_strided", "as_strided_")
            for home in (torch, Tensor)
        },
        **{
            getattr(Tensor, n): _use_example_strides
            for n in ("view", "view_as", "reshape_as", "unflatten", "contiguous")
        },
        **{
            getattr(Tensor, n): _use_example_strides
            for n in ("stride", "is_contiguous", "dim_order")
        },
        **{
            getattr(Tensor, n): _make_memory_call(n)
            for n in ("numpy", "tolist", "__array__", "__dlpack__")
        },
    }
)
UNSHARED.update(
    {
        func: _make_write_into_shared(func)
        for home in (Tensor, torch)
        for name in _READ_THEIR_TARGET
        if (func := getattr(home, name, None)) is not None
    }
)
