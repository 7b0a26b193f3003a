"""Rules of writes by index: (B, *S) and (B, *I) -> (B, *S), in place or as a new tensor.

A rule gets the batched target x and an object w for the form of the operator. With it,
``w.scatter_add(x, ..)`` makes a new tensor for ``index_add`` and writes in place for
``index_add_``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._core.axes import stacked_dim
from forall._vmap.batched_indices import (
    MASKS,
    Places,
    along,
    examples_of,
    flat,
    in_order,
    is_number,
    lined,
    taken,
)
from forall._vmap.batched_tensor import wrap
from forall._vmap.failing_example import check_fits
from forall._vmap.memory_layout import asks_first, expanded_inside
from forall._vmap.mutation.in_place import writable
from forall._vmap.registry import register
from forall._vmap.rule_makers.basic import (
    Stack,
    front,
    is_mapped,
    lower,
    stacked,
)

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten
Tensor = torch.Tensor


class Writing:
    """The form in which an operator writes, in place or as a new tensor, as methods of Tensor."""

    __slots__ = ("ending", "size")

    def __init__(self, size: int, in_place: bool) -> None:
        self.size = size
        self.ending = "_" if in_place else ""

    def __getattr__(self, name: str) -> Callable:
        return getattr(Tensor, name + self.ending)


def writes(rule: Callable) -> tuple[Callable, Callable]:
    """Return the handlers (functional, in place) made of ``rule(w, x, *args)``.

    x is (B, *S), where S has rank 1 at least.
    """

    def handler(in_place: bool) -> Callable:
        def handle(level: Any, func: Any, args: tuple, kwargs: dict) -> Any:
            x, *rest = args
            data = [*rest, *kwargs.values()]
            stack = writable(level, func, x, data) if in_place else stacked(x, level)
            target = stack if stack.dim() > 1 else stack.unsqueeze(1)
            given = [_taken(a, level) for a in rest]
            named = {k: _taken(a, level) for k, a in kwargs.items()}
            out = rule(Writing(level.size, in_place), target, *given, **named)
            return x if in_place else wrap(out.reshape(stack.shape), 0, level)

        return handle

    return asks_first(handler(False), expanded_inside), handler(True)


def _taken(a: Any, level: Any) -> Any:
    if isinstance(a, (list, tuple)):
        return taken(a, level, mask=len(a) == 1)
    return Stack(front(a)) if is_mapped(a, level) else lower(a, level)


def _dim(x: Tensor, dim: int) -> int:
    return stacked_dim(dim, x.dim() - 1)


def scattering(name: str) -> Callable:
    """Return the rule of ``x.name(dim, index, source, ..)``, where all have the target's rank."""

    def rule(w: Writing, x: Tensor, dim: int, index: Any, source: Any, *args: Any, **kwargs: Any):
        if isinstance(source, (Stack, Tensor)):
            source = lined(source, w.size)
        return getattr(w, name)(x, _dim(x, dim), lined(index, w.size), source, *args, **kwargs)

    return rule


def by_rows(name: str, instead: Callable) -> Callable:
    """Return the rule of ``x.name(dim, index, source, ..)`` with a 1-d index into ``dim``.

    ``instead(w, x, dim, index, source, ..)`` is called if the index is batched.
    """

    def rule(w: Writing, x: Tensor, dim: int, index: Any, source: Any, *args: Any, **kwargs: Any):
        dim = _dim(x, dim)
        source = lined(source, w.size)
        if not isinstance(index, Stack):
            return getattr(w, name)(x, dim, index, source, *args, **kwargs)
        return instead(w, x, dim, lined(index, w.size), source, *args, **kwargs)

    return rule


def _add(w, x, dim, index, source, *, alpha=1):
    source = source if alpha == 1 else source * alpha
    return w.scatter_add(x, dim, along(index, dim, source.shape), source)


def _copy(w, x, dim, index, source):
    return w.scatter(x, dim, along(index, dim, source.shape), source)


def _reduce(w, x, dim, index, source, reduce, *, include_self=True):
    places = along(index, dim, source.shape)
    return w.scatter_reduce(x, dim, places, source, reduce, include_self=include_self)


def _fill(w, x, dim, index, value):
    index = along(lined(index, w.size), dim, x.shape)
    index = torch.where(index < 0, index + x.shape[dim], index)  # scatter counts from 0 only
    if isinstance(value, (Stack, Tensor)):
        value = value.v if isinstance(value, Stack) else value
        check_fits(value, x.dtype)
        value = value.reshape(-1, *(1,) * (x.dim() - 1)).to(dtype=x.dtype, device=x.device)
        value = value.expand(index.shape)
    return w.scatter(x, dim, index, value)


def _index_fill(w, x, dim, index, value):
    if isinstance(index, Stack) or isinstance(value, Stack):
        return _fill(w, x, _dim(x, dim), index, value)
    return w.index_fill(x, _dim(x, dim), index, value)


def _by_mask(w, x, mask, values, accumulate):
    """Run ``x[mask] = values`` in order, with shapes that do not depend on the mask's values."""
    rest = x.shape[mask.dim() :]
    v = values.v if isinstance(values, Stack) else values.unsqueeze(0)
    v = v.reshape(v.shape[0], *(1,) * (len(rest) + 2 - v.dim()), *v.shape[1:])
    if v.shape[1] == 1:
        filling = v.reshape(v.shape[0], *(1,) * (mask.dim() - 1), *v.shape[2:])
    else:
        fits = flat(mask).sum(1) == v.shape[1]
        aten._assert_async.msg(fits.all(), "x[mask] = values: not as many values as true entries")
        v = v.expand(x.shape[0], v.shape[1], *rest).flatten(1)
        everywhere = mask.reshape(*mask.shape, *(1,) * len(rest)).expand(x.shape)
        filling = in_order(everywhere, v).reshape(x.shape)
    mask = mask.reshape(*mask.shape, *(1,) * len(rest)).to(torch.bool)
    out = torch.where(mask, x + filling if accumulate else filling.to(x.dtype), x)
    return x.copy_(out) if w.ending else out


def _index_put(w, x, indices, values, accumulate=False, unsafe=False):
    head = indices[0]
    if len(indices) == 1 and isinstance(head, Stack) and head.v.dtype in MASKS:
        return _by_mask(w, x, head.v, values, accumulate)
    places = Places(w.size, indices)
    rank = x.dim() - 1 - places.consumed + places.rank
    v = values.v if isinstance(values, Stack) else values.unsqueeze(0)
    v = v.reshape(v.shape[0], *(1,) * (rank - v.dim() + 1), *v.shape[1:])
    if shift := places.shift():
        v = v.movedim(*shift)
    v = v.to(x.device) if is_number(values) else v
    form = aten.index_put_.default if w.ending else aten.index_put.default
    return form(x, places.on_examples(w.size, x.device), v, accumulate)


def _put(w, x, index, source, accumulate=False):
    """Run ``x.put(index, source)``, which takes x, index and source as flattened."""
    flat = x.flatten(1)
    rows = [examples_of(w.size, x.device, 1), lined(index, w.size).flatten(1)]
    source = lined(source, w.size).flatten(1)
    if not w.ending:
        return flat.index_put(rows, source, accumulate)
    x.copy_(flat.index_put(rows, source, accumulate).reshape(x.shape))
    return x


def _pairs(ops: dict[tuple[Any, ...], Callable]) -> dict[Any, Callable]:
    """Return the handlers of both forms for pairs (functional, in place) of operators."""
    return {
        op: handler
        for pair, rule in ops.items()
        for op, handler in zip(pair, writes(rule), strict=True)
        if op is not None
    }


register(
    _pairs(
        {
            (aten.scatter.src, aten.scatter_.src): scattering("scatter"),
            (aten.scatter.value, aten.scatter_.value): scattering("scatter"),
            (aten.scatter.reduce, aten.scatter_.reduce): scattering("scatter"),
            (aten.scatter.value_reduce, aten.scatter_.value_reduce): scattering("scatter"),
            (aten.scatter_add.default, aten.scatter_add_.default): scattering("scatter_add"),
            (aten.scatter_reduce.two, aten.scatter_reduce_.two): scattering("scatter_reduce"),
            (aten.index_add.default, aten.index_add_.default): by_rows("index_add", _add),
            (aten.index_copy.default, aten.index_copy_.default): by_rows("index_copy", _copy),
            (aten.index_reduce.default, aten.index_reduce_.default): by_rows(
                "index_reduce", _reduce
            ),
            (aten.index_fill.int_Scalar, aten.index_fill_.int_Scalar): _index_fill,
            (aten.index_fill.int_Tensor, aten.index_fill_.int_Tensor): _index_fill,
            (aten.index_put.default, aten.index_put_.default): _index_put,
            (aten._unsafe_index_put.default, None): _index_put,
            (aten._index_put_impl.default, aten._index_put_impl_.default): _index_put,
            (aten.put.default, aten.put_.default): _put,
        }
    )
)
