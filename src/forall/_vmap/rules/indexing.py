"""Rules of indexing: (B, *S) and (B, *I) -> (B, *R), each example from its own entries.

If only the values are batched, the index is applied one axis further on. If only the index is
batched, it is applied as it is, and its batch axis becomes the result's. If both are, an index
``arange(B)`` selects the example.
"""

from __future__ import annotations

from typing import Any

import torch

from forall._compat.shapes import broadcast_shapes
from forall._core.axes import pad_rank, stacked_dim
from forall._vmap.batched_indices import (
    StackIndices,
    expand_index,
    flatten_examples,
    is_rank_zero,
    make_example_index,
    number_true_entries,
    spread_over_mask,
    stack_with_dim,
    take_indices,
)
from forall._vmap.batched_tensor import BatchedTensor, wrap_stack
from forall._vmap.failing_example import check_fits
from forall._vmap.memory_layout import is_not_contiguous, keep_example_layout
from forall._vmap.registry import CALLS, register_rows
from forall._vmap.rule_makers.basic import (
    MappedStack,
    get_example_shape,
    is_mapped,
    lower_shared,
    make_stack_handler,
    move_to_front,
    unsqueeze_shared,
)

aten = torch.ops.aten
Tensor = torch.Tensor


def _index(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    x, indices = args[0], kwargs.get("indices", args[-1])
    places = StackIndices(level.size, take_indices(indices, level))
    if is_mapped(x, level):
        out = func(move_to_front(x), places.index_examples(level.size, x.device))
        if shift := places.find_dim_shift():
            out = out.movedim(shift[1], shift[0])
        return wrap_stack(out, 0, level)
    out = func(lower_shared(x, level), places.indices)
    return wrap_stack(out, places.lead if places.adjacent else 0, level)


register_rows(
    dict.fromkeys((aten.index.Tensor, aten._unsafe_index.Tensor), keep_example_layout(_index))
)


@make_stack_handler
def _gather(size, x, dim, index, sparse_grad=False):
    v = stack_with_dim(x, size)
    out = aten.gather.default(v, stacked_dim(dim, v.dim() - 1), stack_with_dim(index, size))
    return out.squeeze(1) if is_rank_zero(index) else out


def _index_select(level, func, args, kwargs):
    x, dim, index = args
    if not is_mapped(x, level):
        value, i = lower_shared(x, level), move_to_front(index)
        if value.dim() == 0:
            return wrap_stack(func(value.reshape(1), 0, i.reshape(-1)), 0, level)
        dim = stacked_dim(dim, value.dim()) - 1
        n = i.shape[1] if i.dim() > 1 else 1
        out = func(value, dim, i.reshape(-1))
        return wrap_stack(out.unflatten(dim, (level.size, n)), dim, level)
    v = stack_with_dim(MappedStack(move_to_front(x)), level.size)
    d = stacked_dim(dim, v.dim() - 1)
    if is_mapped(index, level):
        i = stack_with_dim(MappedStack(move_to_front(index)), level.size)
        out = v.gather(d, expand_index(i, d, v.shape))
    else:
        out = func(v, d, lower_shared(index, level))
    return wrap_stack(out.squeeze(1) if x.dim() == 0 else out, 0, level)


@make_stack_handler
def _take(size, x, index):
    if not isinstance(x, MappedStack):
        return aten.take.default(x, index.v)
    v = flatten_examples(x.v)
    if not isinstance(index, MappedStack):
        return aten.index.Tensor(v, [None, index])
    return aten.index.Tensor(v, [make_example_index(size, v.device, index.v.dim() - 1), index.v])


register_rows(
    {
        aten.gather.default: _gather,
        aten.index_select.default: _index_select,
        aten.take.default: _take,
    }
)


# --- masks, with results of fixed shape --------------------------------------------------------


def _broadcast_stacks(size: int, *operands: Any, shape: Any = None) -> list[Tensor]:
    """Broadcast the operands' examples to one shape S, and return each as (B, *S)."""
    if shape is None:
        shape = broadcast_shapes(*map(get_example_shape, operands))
    found = []
    for a in operands:
        v = pad_rank(unsqueeze_shared(a), len(shape))
        found.append(v.expand(size, *shape))
    return found


@make_stack_handler
def _masked_scatter(size, x, mask, source):
    v, mask = _broadcast_stacks(size, x, mask)
    source = flatten_examples(unsqueeze_shared(source)).expand(size, -1)
    return torch.where(mask, spread_over_mask(mask, source).reshape(v.shape), v)


@make_stack_handler
def _masked_scatter_backward(size, grad, mask, sizes):
    grad, mask = _broadcast_stacks(size, grad, mask)
    n = torch.Size(sizes).numel()
    out = grad.new_zeros(size, n + 1).scatter(1, number_true_entries(mask), flatten_examples(grad))
    return out[:, 1:].reshape(size, *sizes)


@make_stack_handler
def _masked_fill(size, x, mask, value):
    if not is_rank_zero(value):
        raise RuntimeError("masked_fill only supports a 0-dimensional value tensor")
    v, mask = _broadcast_stacks(size, x, mask)
    value = value.v if isinstance(value, MappedStack) else value
    check_fits(value, v.dtype)
    value = value.reshape(-1, *(1,) * (v.dim() - 1))
    return torch.where(mask, value.to(dtype=v.dtype, device=v.device), v)


def _nonzero_static(level, func, args, kwargs):
    """Return the indices (B, n, rank) of the first n nonzero entries: a shape without data."""
    v, n, fill = move_to_front(args[0]), kwargs["size"], kwargs.get("fill_value", -1)
    numbered = number_true_entries(v != 0)
    numbered = torch.where(
        numbered <= n, numbered, 0
    )  # entries after the first n go to index 0, with the zeros
    numbers = torch.arange(numbered.shape[1], device=v.device).expand(numbered.shape)
    found = numbered.new_full((v.shape[0], n + 1), -1).scatter(1, numbered, numbers)[:, 1:]
    shape = v.shape[1:]
    steps = [torch.Size(shape[d + 1 :]).numel() for d in range(len(shape))]
    places = [found // max(s, 1) % max(m, 1) for s, m in zip(steps, shape, strict=True)]
    places = torch.stack(places, -1) if places else found.new_zeros(*found.shape, 0)
    return wrap_stack(torch.where(found.unsqueeze(-1) < 0, fill, places), 0, level)


register_rows(
    {
        aten.masked_scatter.default: keep_example_layout(_masked_scatter, is_not_contiguous),
        aten.masked_scatter_backward.default: _masked_scatter_backward,
        aten.masked_fill.Tensor: _masked_fill,
        aten.nonzero_static.default: _nonzero_static,
    }
)


# --- index_fill --------------------------------------------------------------------------------


def _index_fill(x: Tensor, dim: Any, index: Any, value: Any) -> Any:
    """Run index_fill with a value that requires grad and a batched index.

    Torch's derivative of it would need the number of entries, which differs between the examples.
    """
    if not (isinstance(value, Tensor) and value.requires_grad and type(index) is BatchedTensor):
        return NotImplemented
    if type(dim) is not int or value.dim() or value.dtype != x.dtype:
        return NotImplemented
    size = x.shape[dim] if x.dim() else 1
    places = torch.zeros(size, dtype=torch.bool, device=x.device).index_fill(0, index, True)
    shape = [-1 if d == dim % x.dim() else 1 for d in range(x.dim())]
    return torch.where(places.reshape(shape), value, x)


def _index_fill_in_place(x: Tensor, dim: Any, index: Any, value: Any) -> Any:
    found = _index_fill(x, dim, index, value)
    return found if found is NotImplemented else x.copy_(found)


CALLS.update(
    {
        torch.index_fill: _index_fill,
        Tensor.index_fill: _index_fill,
        Tensor.index_fill_: _index_fill_in_place,
    }
)
