"""Rules of writes by index: (B, *S) and (B, *I) -> (B, *S), in place or as a new tensor.

A rule gets the batched target x and an object w for the form of the operator. With it,
``w.scatter_add(x, ..)`` makes a new tensor for ``index_add`` and writes in place for
``index_add_``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._compat.assertions import require
from forall._core.axes import append_dims, pad_rank, stacked_dim
from forall._vmap.batched_indices import (
    MASKS,
    StackIndices,
    expand_index,
    flatten_examples,
    is_rank_zero,
    make_example_index,
    spread_over_mask,
    stack_with_dim,
    take_indices,
)
from forall._vmap.batched_tensor import wrap_stack
from forall._vmap.failing_example import check_fits
from forall._vmap.memory_layout import is_expanded_inside, keep_example_layout
from forall._vmap.mutation.in_place import get_writable_stack
from forall._vmap.registry import register_rows
from forall._vmap.rule_makers.basic import (
    MappedStack,
    expand_to_stack,
    is_mapped,
    lower_shared,
    move_to_front,
    unsqueeze_shared,
)

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten
Tensor = torch.Tensor


class WriteVariant:
    """The form in which an operator writes, in place or as a new tensor, as methods of Tensor."""

    __slots__ = ("size", "suffix")

    def __init__(self, size: int, in_place: bool) -> None:
        self.size = size
        self.suffix = "_" if in_place else ""

    def __getattr__(self, name: str) -> Callable:
        return getattr(Tensor, name + self.suffix)


def make_write_handlers(rule: Callable) -> tuple[Callable, Callable]:
    """Return the handlers (functional, in place) made of ``rule(w, x, *args)``.

    x is (B, *S), where S has rank 1 at least.
    """

    def handler(in_place: bool) -> Callable:
        def handle(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
            x, *rest = args
            data = [*rest, *kwargs.values()]
            stack = (
                get_writable_stack(level, func, x, data) if in_place else expand_to_stack(x, level)
            )
            target = stack if stack.dim() > 1 else stack.unsqueeze(1)
            given = [_take_operand(a, level) for a in rest]
            named = {k: _take_operand(a, level) for k, a in kwargs.items()}
            out = rule(WriteVariant(level.size, in_place), target, *given, **named)
            return x if in_place else wrap_stack(out.reshape(stack.shape), 0, level)

        return handle

    return keep_example_layout(handler(False), is_expanded_inside), handler(True)


def _take_operand(a: Any, level: Any) -> Any:
    if isinstance(a, (list, tuple)):
        return take_indices(a, level, mask=len(a) == 1)
    return MappedStack(move_to_front(a)) if is_mapped(a, level) else lower_shared(a, level)


def _dim(x: Tensor, dim: int) -> int:
    return stacked_dim(dim, x.dim() - 1)


def make_scatter_rule(name: str) -> Callable:
    """Return the rule of ``x.name(dim, index, source, ..)``, where all have the target's rank."""

    def rule(
        w: WriteVariant, x: Tensor, dim: int, index: Any, source: Any, *args: Any, **kwargs: Any
    ):
        if isinstance(source, (MappedStack, Tensor)):
            source = stack_with_dim(source, w.size)
        return getattr(w, name)(
            x, _dim(x, dim), stack_with_dim(index, w.size), source, *args, **kwargs
        )

    return rule


def make_index_rule(name: str, instead: Callable) -> Callable:
    """Return the rule of ``x.name(dim, index, source, ..)`` with a 1-d index into ``dim``.

    ``instead(w, x, dim, index, source, ..)`` is called if the index is batched.
    """

    def rule(
        w: WriteVariant, x: Tensor, dim: int, index: Any, source: Any, *args: Any, **kwargs: Any
    ):
        dim = _dim(x, dim)
        source = stack_with_dim(source, w.size)
        if not isinstance(index, MappedStack):
            return getattr(w, name)(x, dim, index, source, *args, **kwargs)
        return instead(w, x, dim, stack_with_dim(index, w.size), source, *args, **kwargs)

    return rule


def _add(w, x, dim, index, source, *, alpha=1):
    source = source if alpha == 1 else source * alpha
    return w.scatter_add(x, dim, expand_index(index, dim, source.shape), source)


def _copy(w, x, dim, index, source):
    return w.scatter(x, dim, expand_index(index, dim, source.shape), source)


def _reduce(w, x, dim, index, source, reduce, *, include_self=True):
    places = expand_index(index, dim, source.shape)
    return w.scatter_reduce(x, dim, places, source, reduce, include_self=include_self)


def _fill(w, x, dim, index, value):
    index = expand_index(stack_with_dim(index, w.size), dim, x.shape)
    index = torch.where(index < 0, index + x.shape[dim], index)  # scatter counts from 0 only
    if isinstance(value, (MappedStack, Tensor)):
        value = value.v if isinstance(value, MappedStack) else value
        check_fits(value, x.dtype)
        value = value.reshape(-1, *(1,) * (x.dim() - 1)).to(dtype=x.dtype, device=x.device)
        value = value.expand(index.shape)
    return w.scatter(x, dim, index, value)


def _index_fill(w, x, dim, index, value):
    if isinstance(index, MappedStack) or isinstance(value, MappedStack):
        return _fill(w, x, _dim(x, dim), index, value)
    return w.index_fill(x, _dim(x, dim), index, value)


def _put_by_mask(w, x, mask, values, accumulate):
    """Run ``x[mask] = values`` in order, with shapes that do not depend on the mask's values."""
    rest = x.shape[mask.dim() :]
    v = pad_rank(unsqueeze_shared(values), len(rest) + 1)
    if v.shape[1] == 1:
        filling = v.reshape(v.shape[0], *(1,) * (mask.dim() - 1), *v.shape[2:])
    else:
        fits = flatten_examples(mask).sum(1) == v.shape[1]
        require(fits.all(), "x[mask] = values: not as many values as true entries")
        v = v.expand(x.shape[0], v.shape[1], *rest).flatten(1)
        everywhere = append_dims(mask, len(rest)).expand(x.shape)
        filling = spread_over_mask(everywhere, v).reshape(x.shape)
    mask = append_dims(mask, len(rest)).to(torch.bool)
    out = torch.where(mask, x + filling if accumulate else filling.to(x.dtype), x)
    return x.copy_(out) if w.suffix else out


def _index_put(w, x, indices, values, accumulate=False, unsafe=False):
    head = indices[0]
    if len(indices) == 1 and isinstance(head, MappedStack) and head.v.dtype in MASKS:
        return _put_by_mask(w, x, head.v, values, accumulate)
    places = StackIndices(w.size, indices)
    rank = x.dim() - 1 - places.consumed + places.rank
    v = pad_rank(unsqueeze_shared(values), rank)
    if shift := places.find_dim_shift():
        v = v.movedim(*shift)
    v = v.to(x.device) if is_rank_zero(values) else v
    form = aten.index_put_.default if w.suffix else aten.index_put.default
    return form(x, places.index_examples(w.size, x.device), v, accumulate)


def _put_entries(w, x, index, source, accumulate=False):
    """Run ``x.put(index, source)``, which takes x, index and source as flattened."""
    flat = x.flatten(1)
    rows = [make_example_index(w.size, x.device, 1), stack_with_dim(index, w.size).flatten(1)]
    source = stack_with_dim(source, w.size).flatten(1)
    if not w.suffix:
        return flat.index_put(rows, source, accumulate)
    x.copy_(flat.index_put(rows, source, accumulate).reshape(x.shape))
    return x


def _make_handlers(ops: dict[tuple[Any, ...], Callable]) -> dict[Any, Callable]:
    """Return the handlers of both forms for pairs (functional, in place) of operators."""
    return {
        op: handler
        for pair, rule in ops.items()
        for op, handler in zip(pair, make_write_handlers(rule), strict=True)
        if op is not None
    }


register_rows(
    _make_handlers(
        {
            (aten.scatter.src, aten.scatter_.src): make_scatter_rule("scatter"),
            (aten.scatter.value, aten.scatter_.value): make_scatter_rule("scatter"),
            (aten.scatter.reduce, aten.scatter_.reduce): make_scatter_rule("scatter"),
            (aten.scatter.value_reduce, aten.scatter_.value_reduce): make_scatter_rule("scatter"),
            (aten.scatter_add.default, aten.scatter_add_.default): make_scatter_rule("scatter_add"),
            (aten.scatter_reduce.two, aten.scatter_reduce_.two): make_scatter_rule(
                "scatter_reduce"
            ),
            (aten.index_add.default, aten.index_add_.default): make_index_rule("index_add", _add),
            (aten.index_copy.default, aten.index_copy_.default): make_index_rule(
                "index_copy", _copy
            ),
            (aten.index_reduce.default, aten.index_reduce_.default): make_index_rule(
                "index_reduce", _reduce
            ),
            (aten.index_fill.int_Scalar, aten.index_fill_.int_Scalar): _index_fill,
            (aten.index_fill.int_Tensor, aten.index_fill_.int_Tensor): _index_fill,
            (aten.index_put.default, aten.index_put_.default): _index_put,
            (aten._unsafe_index_put.default, None): _index_put,
            (aten._index_put_impl.default, aten._index_put_impl_.default): _index_put,
            (aten.put.default, aten.put_.default): _put_entries,
        }
    )
)
