"""Rules of indexing: (B, *S) and (B, *I) -> (B, *R), each example from its own entries.

If only the values are batched, the index is applied one axis further on. If only the index is
batched, it is applied as it is, and its batch axis becomes the result's. If both are, an index
``arange(B)`` selects the example.
"""

from __future__ import annotations

from typing import Any

import torch

from forall._compat.shapes import broadcast_shapes
from forall._core.axes import stacked_dim
from forall._vmap.batched_indices import (
    Places,
    along,
    examples_of,
    flat,
    in_order,
    is_number,
    lined,
    order,
    taken,
)
from forall._vmap.batched_tensor import Batched, wrap
from forall._vmap.failing_example import check_fits
from forall._vmap.memory_layout import asks_first, not_in_a_row
from forall._vmap.registry import CALLS, register
from forall._vmap.rule_makers.basic import (
    Stack,
    by_front,
    front,
    is_mapped,
    lower,
)

aten = torch.ops.aten
Tensor = torch.Tensor


def _index(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    x, indices = args[0], kwargs.get("indices", args[-1])
    places = Places(level.size, taken(indices, level))
    if is_mapped(x, level):
        out = func(front(x), places.on_examples(level.size, x.device))
        if shift := places.shift():
            out = out.movedim(shift[1], shift[0])
        return wrap(out, 0, level)
    out = func(lower(x, level), places.indices)
    return wrap(out, places.lead if places.adjacent else 0, level)


register(dict.fromkeys((aten.index.Tensor, aten._unsafe_index.Tensor), asks_first(_index)))


@by_front
def _gather(size, x, dim, index, sparse_grad=False):
    v = lined(x, size)
    out = aten.gather.default(v, stacked_dim(dim, v.dim() - 1), lined(index, size))
    return out.squeeze(1) if is_number(index) else out


def _index_select(level, func, args, kwargs):
    x, dim, index = args
    if not is_mapped(x, level):
        value, i = lower(x, level), front(index)
        if value.dim() == 0:
            return wrap(func(value.reshape(1), 0, i.reshape(-1)), 0, level)
        dim = stacked_dim(dim, value.dim()) - 1
        n = i.shape[1] if i.dim() > 1 else 1
        out = func(value, dim, i.reshape(-1))
        return wrap(out.unflatten(dim, (level.size, n)), dim, level)
    v = lined(Stack(front(x)), level.size)
    d = stacked_dim(dim, v.dim() - 1)
    if is_mapped(index, level):
        i = lined(Stack(front(index)), level.size)
        out = v.gather(d, along(i, d, v.shape))
    else:
        out = func(v, d, lower(index, level))
    return wrap(out.squeeze(1) if x.dim() == 0 else out, 0, level)


@by_front
def _take(size, x, index):
    if not isinstance(x, Stack):
        return aten.take.default(x, index.v)
    v = flat(x.v)
    if not isinstance(index, Stack):
        return aten.index.Tensor(v, [None, index])
    return aten.index.Tensor(v, [examples_of(size, v.device, index.v.dim() - 1), index.v])


register(
    {
        aten.gather.default: _gather,
        aten.index_select.default: _index_select,
        aten.take.default: _take,
    }
)


# --- masks, with results of fixed shape --------------------------------------------------------


def _broadcast(size: int, *operands: Any, shape: Any = None) -> list[Tensor]:
    """Broadcast the operands' examples to one shape S, and return each as (B, *S)."""
    if shape is None:
        shape = broadcast_shapes(
            *(a.v.shape[1:] if isinstance(a, Stack) else a.shape for a in operands)
        )
    found = []
    for a in operands:
        v = a.v if isinstance(a, Stack) else a.unsqueeze(0)
        v = v.reshape(v.shape[0], *(1,) * (len(shape) + 1 - v.dim()), *v.shape[1:])
        found.append(v.expand(size, *shape))
    return found


@by_front
def _masked_scatter(size, x, mask, source):
    v, mask = _broadcast(size, x, mask)
    source = flat(source.v if isinstance(source, Stack) else source.unsqueeze(0)).expand(size, -1)
    return torch.where(mask, in_order(mask, source).reshape(v.shape), v)


@by_front
def _masked_scatter_backward(size, grad, mask, sizes):
    grad, mask = _broadcast(size, grad, mask)
    n = torch.Size(sizes).numel()
    out = grad.new_zeros(size, n + 1).scatter(1, order(mask), flat(grad))
    return out[:, 1:].reshape(size, *sizes)


@by_front
def _masked_fill(size, x, mask, value):
    if not is_number(value):
        raise RuntimeError("masked_fill only supports a 0-dimensional value tensor")
    v, mask = _broadcast(size, x, mask)
    value = value.v if isinstance(value, Stack) else value
    check_fits(value, v.dtype)
    value = value.reshape(-1, *(1,) * (v.dim() - 1))
    return torch.where(mask, value.to(dtype=v.dtype, device=v.device), v)


def _nonzero_static(level, func, args, kwargs):
    """Return the indices (B, n, rank) of the first n nonzero entries: a shape without data."""
    v, n, fill = front(args[0]), kwargs["size"], kwargs.get("fill_value", -1)
    numbered = order(v != 0)
    numbered = torch.where(
        numbered <= n, numbered, 0
    )  # entries after the first n go to index 0, with the zeros
    numbers = torch.arange(numbered.shape[1], device=v.device).expand(numbered.shape)
    found = numbered.new_full((v.shape[0], n + 1), -1).scatter(1, numbered, numbers)[:, 1:]
    shape = v.shape[1:]
    steps = [torch.Size(shape[d + 1 :]).numel() for d in range(len(shape))]
    places = [found // max(s, 1) % max(m, 1) for s, m in zip(steps, shape, strict=True)]
    places = torch.stack(places, -1) if places else found.new_zeros(*found.shape, 0)
    return wrap(torch.where(found.unsqueeze(-1) < 0, fill, places), 0, level)


register(
    {
        aten.masked_scatter.default: asks_first(_masked_scatter, not_in_a_row),
        aten.masked_scatter_backward.default: _masked_scatter_backward,
        aten.masked_fill.Tensor: _masked_fill,
        aten.nonzero_static.default: _nonzero_static,
    }
)


# --- index_fill --------------------------------------------------------------------------------


def _filled(x: Tensor, dim: Any, index: Any, value: Any) -> Any:
    """Run index_fill with a value that requires grad and a batched index.

    Torch's derivative of it would need the number of entries, which differs between the examples.
    """
    if not (isinstance(value, Tensor) and value.requires_grad and type(index) is Batched):
        return NotImplemented
    if type(dim) is not int or value.dim() or value.dtype != x.dtype:
        return NotImplemented
    size = x.shape[dim] if x.dim() else 1
    places = torch.zeros(size, dtype=torch.bool, device=x.device).index_fill(0, index, True)
    shape = [-1 if d == dim % x.dim() else 1 for d in range(x.dim())]
    return torch.where(places.reshape(shape), value, x)


def _fill(x: Tensor, dim: Any, index: Any, value: Any) -> Any:
    found = _filled(x, dim, index, value)
    return found if found is NotImplemented else x.copy_(found)


CALLS.update({torch.index_fill: _filled, Tensor.index_fill: _filled, Tensor.index_fill_: _fill})
