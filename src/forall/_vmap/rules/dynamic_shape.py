"""Rules of operators whose result is a Python number, or has a data-dependent shape.

If the number or shape is the same for all examples, the result is one batched tensor. If not, the
examples diverge (`forall._vmap.concretize`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._compat.assertions import require
from forall._compat.dispatch_state import no_dispatch
from forall._compat.shapes import broadcast_shapes
from forall._core.axes import pad_rank
from forall._core.errors import make_data_dependent_error
from forall._vmap import concretize
from forall._vmap.batched_tensor import wrap_stack
from forall._vmap.registry import register_rows
from forall._vmap.rule_makers import basic
from forall._vmap.rule_makers.basic import (
    expand_to_stack,
    is_mapped,
    lower_shared,
    move_to_front,
    reenter_level,
    wrap_results,
)

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten
Tensor = torch.Tensor


def find_common_size(level: Any, sizes: Tensor, what: str, cure: str) -> int:
    """Return the size that is the same for all examples; they diverge if it is not.

    ``sizes`` (B,) is a tensor one level down.
    """
    return concretize.concretize_number(
        wrap_stack(sizes, 0, level), lambda: make_data_dependent_error(what, cure)
    )


def _local_scalar(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    return concretize.concretize_number(args[0], _make_read_error)


def _make_read_error() -> Exception:
    return make_data_dependent_error(
        "a tensor read as a Python number (.item(), bool(), int(), `if`, `while`)",
        "Use torch.where instead of `if`, and a tensor instead of the number.",
    )


def _is_nonzero(level: Any, func: Any, args: tuple, kwargs: dict) -> bool:
    """Return ``x != 0`` as a bool, which inference mode reads instead of a number.

    Torch raises the error for a tensor with several entries.
    """
    answer = concretize.concretize_for_user(args[0] != 0, _make_read_error)
    with no_dispatch():
        return func(answer)


_FIXED = "torch.where(mask, x, other) and torch.nonzero_static(x, size=n) have one shape for all."


def _nonzero(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return each example's indices of nonzero entries, from one call on the batched tensor.

    That call orders the indices by example.
    """
    found = move_to_front(args[0]) != 0
    counts = found.flatten(1).sum(1) if found.dim() > 1 else found.long()
    what = "nonzero, argwhere or a boolean mask as an index"
    n = find_common_size(level, counts, what, _FIXED)
    places = aten.nonzero.default(found)[:, 1:]
    return wrap_stack(places.reshape(found.shape[0], n, found.dim() - 1), 0, level)


def _masked_select(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    x, mask = args
    if not is_mapped(mask, level):
        return _select_by_shared_mask(level, func, args, kwargs)
    with reenter_level(level):
        x, mask = torch.broadcast_tensors(x, mask)
        return aten.index.Tensor(x.reshape(-1), [mask.reshape(-1)])


@basic.make_stack_handler
def _select_by_shared_mask(size, x, mask):
    """Select by a mask that is the same for all examples."""
    shape = broadcast_shapes(x.v.shape[1:], mask.shape)
    v = pad_rank(x.v, len(shape))
    flat = v.expand(size, *shape).reshape(size, torch.Size(shape).numel())
    return aten.index.Tensor(flat, [None, mask.expand(shape).reshape(-1)])


def loop_to_one_shape(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """Run any operator with data-dependent result shapes on one example after another."""
    if not level.size:
        raise _make_shape_error(func)
    columns = basic.call_per_example(level, func, args, kwargs)
    flat = [o if isinstance(o, (list, tuple)) else (o,) for o in columns]
    sizes = [[s for o in outs for s in (o.dim(), *o.shape)] for outs in flat]
    longest = max(map(len, sizes))
    shapes = torch.tensor([[*s, *(-1,) * (longest - len(s))] for s in sizes])
    concretize.concretize(wrap_stack(shapes, 0, level), lambda: _make_shape_error(func))
    return wrap_results(basic.stack_results(columns), 0, level)


def _unique(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return the sorted values of whole numbers.

    Floats go one example after another: torch chooses which of 0.0 and -0.0 it keeps.
    """
    names = ("x", "sorted", "return_inverse", "return_counts")
    given = dict(zip(names, args, strict=False)) | kwargs
    x = expand_to_stack(args[0], level)
    numbers = x.reshape(len(x), -1)
    size, length = numbers.shape
    if x.is_floating_point() or x.is_complex() or not numbers.numel():
        return loop_to_one_shape(level, func, args, kwargs)
    ordered, places = numbers.sort(dim=1)
    is_new = ordered[:, 1:] != ordered[:, :-1]
    is_first = torch.cat([is_new.new_ones((size, 1)), is_new], 1)
    n = find_common_size(level, is_first.sum(1), "unique", "Sort, and count what differs.")
    inverse = counts = places.new_empty((size, 0))
    if given.get("return_inverse"):
        order = is_first.cumsum(1) - 1
        inverse = torch.empty_like(places).scatter(1, places, order).reshape(x.shape)
    if given.get("return_counts"):
        starts = is_first.nonzero()[:, 1].reshape(size, n)
        counts = torch.diff(starts, dim=1, append=starts.new_full((size, 1), length))
    found = ordered[is_first].reshape(size, n), inverse, counts
    return tuple(wrap_stack(t, 0, level) for t in found)


def _make_shape_error(func: Any) -> Exception:
    return make_data_dependent_error(
        str(func), "Use torch.where or masks of fixed shape, or compute it outside vmap."
    )


def _repeat_interleave(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return the index of the entry that each output repeats: (B, n) -> (B, output_size)."""
    repeats = move_to_front(args[0])
    size = kwargs.get("output_size")
    # Who gives the size has nobody wait: then torch's kernel asserts on the device as well.
    check = require if size is None else aten._assert_async.msg
    check((repeats >= 0).all(), "repeats can not be negative")
    ends = repeats.cumsum(1)
    totals = ends[:, -1] if ends.shape[1] else ends.new_zeros(ends.shape[0])
    if size is None:
        cure = "Give output_size, the sum of repeats in every example."
        size = find_common_size(level, totals, "repeat_interleave(repeats)", cure)
    else:
        check((totals == size).all(), "allocated size does not match required size")
    places = torch.arange(size, device=ends.device, dtype=ends.dtype).expand(ends.shape[0], size)
    found = torch.searchsorted(ends, places.contiguous(), right=True)
    return wrap_stack(found.to(repeats.dtype), 0, level)


def _bincount(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    x, weights = args[0], args[1] if len(args) > 1 else None
    least = args[2] if len(args) > 2 else 0
    v = expand_to_stack(x, level)
    size, numel = v.shape
    needs = v.amax(1).long() + 1 if numel and size else v.new_full((size,), least)
    if numel and size:
        require((v >= 0).all(), "bincount only supports 1-d non-negative integral inputs.")
    cure = "Give minlength, one more than the largest value."
    longest = least
    if size:
        longest = find_common_size(level, needs.clamp(min=least), "bincount", cure)
    flat = v + longest * torch.arange(size, device=v.device).unsqueeze(1)
    if weights is not None:
        weights = expand_to_stack(weights, level).reshape(-1)
    counts = torch.bincount(flat.reshape(-1), weights, minlength=size * longest)
    return wrap_stack(counts.reshape(size, longest), 0, level)


def _make_check_handler(answer: Callable) -> Callable:
    """Return the handler of an operator that answers a question about values with a bool."""

    def handler(level: Any, func: Any, args: tuple, kwargs: dict) -> bool:
        cure = "Use (x == y).all() or torch.isclose, one answer for each."
        found = answer(level, *args, **kwargs) if level.size else True
        if isinstance(found, bool):
            return found
        return concretize.concretize_number(
            found, lambda: make_data_dependent_error(str(func), cure)
        )

    return handler


@_make_check_handler
def _equal(level: Any, x: Any, y: Any) -> Any:
    if x.shape != y.shape:
        return False
    with reenter_level(level):
        return (x == y).all()


@_make_check_handler
def _allclose(level: Any, *args: Any, **kwargs: Any) -> Any:
    with reenter_level(level):
        return torch.isclose(*args, **kwargs).all()


@_make_check_handler
def _is_left_aligned(level: Any, x: Any, mask: Any) -> Any:
    """True if in each row of the mask (N, L) no True follows a False."""
    if not is_mapped(mask, level):
        return aten._nested_tensor_from_mask_left_aligned.default(
            move_to_front(x)[0], lower_shared(mask, level)
        )
    with reenter_level(level):
        places = torch.arange(mask.shape[1], device=mask.device)
        return (mask == (places < mask.sum(1, keepdim=True))).all()


@_make_check_handler
def _is_set_to(level: Any, *tensors: Any) -> Any:
    """Compare the memory of the tensors, one example after another."""
    answers = basic.call_per_example(level, aten.is_set_to.default, tensors, {})
    return wrap_stack(torch.tensor(answers), 0, level)


register_rows(
    {
        aten.is_set_to.default: _is_set_to,
        aten._nested_tensor_from_mask_left_aligned.default: _is_left_aligned,
        aten._local_scalar_dense.default: _local_scalar,
        aten.item.default: _local_scalar,
        aten.is_nonzero.default: _is_nonzero,
        aten.nonzero.default: _nonzero,
        aten.masked_select.default: _masked_select,
        aten._unique2.default: _unique,
        aten.unique_dim.default: loop_to_one_shape,
        aten.unique_consecutive.default: loop_to_one_shape,
        aten.repeat_interleave.Tensor: _repeat_interleave,
        aten.bincount.default: _bincount,
        aten.equal.default: _equal,
        aten.allclose.default: _allclose,
    }
)
