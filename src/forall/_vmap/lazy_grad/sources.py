"""Sources of lazy gradients (`LazyGrad`): operators with large results of little data."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import torch

from forall._compat.dispatch_state import has_users_tangents
from forall._compat.shapes import broadcast_shapes
from forall._compat.wrapper_tensor import Wrapper
from forall._core import collective_ops
from forall._core.axes import fold_axis, pad_rank
from forall._core.levels import stack
from forall._vmap.batched_tensor import BatchedTensor, wrap_stack
from forall._vmap.lazy_grad.lazy_tensor import (
    DeferredSum,
    LazyGrad,
    can_propagate_linear,
    count_result_entries,
    flatten_args,
    infer_convolution_shape,
    is_linear,
    make_lazy_sum,
    propagate_linear,
)
from forall._vmap.rule_makers.basic import (
    MappedStack,
    expand_to_stack,
    is_mapped,
    lower_shared,
)
from forall._vmap.rules.embedding import compute_row_grads
from forall._vmap.rules.grouped_mm import sum_grouped_products

if TYPE_CHECKING:
    from collections.abc import Callable

    from forall._vmap.vmap_level import VmapLevel

aten = torch.ops.aten
Tensor = torch.Tensor
WORTH = 1 << 14  # entries of all examples from which a lazy result is worth it


def make_lazy_result(level: VmapLevel, func: Any, args: tuple, kwargs: dict) -> Any:
    """The lazy result of an operator in a backward pass under an ended level; None if not lazy."""
    operands = flatten_args(args)
    found = [a for a in operands if type(a) is LazyGrad and a.level.root is level.root]
    if found:
        if func is aten.detach.default:
            return found[0].graph_free()
        if func in _ADDED_UP and _has_all_examples(level, operands):
            total = _add_up_examples(level, func, args[0], number=args[-2])
            if total is not None:
                return wrap_stack(total, _ADDED_UP[func], level)
        lazy = all(map(can_propagate_linear, found))
        plain = lazy and not kwargs and _has_all_examples(level, operands)
        if plain and is_linear(level, func, args):
            new = propagate_linear(level, func, args)
            if new is not None:
                return new
        for a in found:
            if type(a) is LazyGrad:  # it may have been materialized with another
                a.materialize()
    source = _SOURCES.get(func)
    if source is None or kwargs or has_users_tangents() or not _has_all_examples(level, operands):
        return None
    return source(level, func, args) if _are_plain(level, operands) else None


# Collectives that add up the examples, with the axis of the sum along which their results lie.
_ADDED_UP = {
    collective_ops.PSUM: None,
    collective_ops.PSUM_HERE: None,
    collective_ops.PSUM_SCATTER: 0,
}


def _add_up_examples(level: VmapLevel, func: Any, g: Any, number: int) -> Tensor | None:
    """Return the sum over the examples of the axis with this number; None if it must be made."""
    axis = level.axis
    if axis is None or axis.number != number:
        return None
    if axis.ranks is not None and func is not collective_ops.PSUM_HERE:
        return None
    if axis.local_size != level.size or g.records_on_value:
        return None
    return g.deferred.sum_examples() if type(g.deferred) is DeferredSum else None


def _has_all_examples(level: VmapLevel, operands: list) -> bool:
    """True if all examples of the level take part, and it has no sub-levels."""
    if stack.diverged or level.root is not level or vars(level).get("sub_levels"):  # has sub-levels
        return False
    return not any(isinstance(a, Wrapper) and _has_sub_levels(a) for a in operands)


def _has_sub_levels(t: Any) -> bool:
    while isinstance(t, Wrapper) and type(t) is not LazyGrad:
        if t.level.root is not t.level:
            return True
        t = t.value
    return False


def _are_plain(level: VmapLevel, operands: list) -> bool:
    """True if no value has a history or a lazy bit that is not the wrapper's."""
    if level.records_on_value:
        return False
    mine = [a for a in operands if type(a) is BatchedTensor and a.level is level]
    return not any(a.value.is_complex() or a.value.is_neg() for a in mine)


def _make_source(
    level: VmapLevel, func: Any, args: tuple, shape: Any, add_up: Callable
) -> LazyGrad:
    """A lazy result of this shape, in the dtype of the first argument."""
    like = torch.empty(shape, dtype=args[0].dtype, device="meta")
    return make_lazy_sum(level, like, args, lambda: level.run_now(func, args, {}), add_up)


def _is_worth_it(level: VmapLevel, entries: int, *operands: Any) -> bool:
    """True if a lazy result with so many entries for each example is worth it."""
    return level.size * entries >= WORTH and all(entries > a.numel() for a in operands)


def _lazy_linear(level: VmapLevel, func: Any, args: tuple) -> BatchedTensor | None:
    """The lazy result of a linear operator that adds zeros around a value, or parts beside it."""
    mapped = [a for a in flatten_args(args) if is_mapped(a, level)]
    if not mapped or not is_linear(level, func, args):
        return None
    return (
        propagate_linear(level, func, args)
        if _is_worth_it(level, count_result_entries(func, args), *mapped)
        else None
    )


def _lazy_matmul(level: VmapLevel, func: Any, args: tuple) -> BatchedTensor | None:
    """(*, V, S) @ (*, S, D): summed over examples it is one product, whose S has all of theirs."""
    left, right = args
    shape = (*left.shape[:-1], right.shape[-1])

    def add_up() -> Tensor:
        a, b = (expand_to_stack(x, level) for x in args)
        a, b = a.mT.movedim(0, -3).flatten(-3, -2), b.movedim(0, -3).flatten(-3, -2)
        return func(a.mT, b)

    return _lazy_product(level, func, args, shape, add_up)


def _lazy_mul(level: VmapLevel, func: Any, args: tuple) -> BatchedTensor | None:
    """The product of two tensors, both broadcast: its sum over examples is an einsum."""
    left, right = args
    if not (isinstance(left, Tensor) and isinstance(right, Tensor)) or right.numel() <= 1:
        return None  # formulas of forward mode also multiply a number by a tensor
    shape = broadcast_shapes(left.shape, right.shape)

    def dims(a: Tensor) -> list[int]:
        return [d for d, n in enumerate(a.shape, len(shape) - a.dim()) if n > 1]

    def add_up() -> Tensor:
        operands: list[Any] = []
        for a in args:
            v = expand_to_stack(a, level)
            operands += (v.reshape(len(v), *(n for n in a.shape if n > 1)), [len(shape), *dims(a)])
        out = [d for d, n in enumerate(shape) if n > 1]
        return torch.einsum(*operands, out).reshape(shape)

    return _lazy_product(level, func, args, shape, add_up)


def _lazy_product(
    level: VmapLevel, func: Any, args: tuple, shape: Any, add_up: Callable
) -> BatchedTensor | None:
    """A lazy product of two mapped tensors, or of a mapped one with one that is shared."""
    mapped = [a for a in args if is_mapped(a, level)]
    if args[0].dtype != args[1].dtype or not _is_worth_it(level, prod(shape), *mapped):
        return None
    if len(mapped) == 2:
        return _make_source(level, func, args, shape, add_up)
    return propagate_linear(level, func, args) if is_linear(level, func, args) else None


def _lazy_grouped_mm(level: VmapLevel, func: Any, args: tuple) -> LazyGrad | None:
    """(M, S), (S, N) -> (G, M, N), summed over in groups: in the sum, those of all examples."""
    left, right, *ends = args
    if len(ends) != 1 or not left.dim() == right.dim() == 2 or left.shape[1] != right.shape[0]:
        return None
    if not (is_mapped(left, level) and is_mapped(right, level)):
        return None
    shape = (len(ends[0]), len(left), right.shape[1])
    if left.dtype != right.dtype or not _is_worth_it(level, prod(shape), left, right):
        return None

    def add_up() -> Tensor:
        mapped = is_mapped(ends[0], level)
        offs = (
            MappedStack(expand_to_stack(ends[0], level)) if mapped else lower_shared(ends[0], level)
        )
        return sum_grouped_products(
            expand_to_stack(left, level), expand_to_stack(right, level), offs
        )

    return _make_source(level, func, args, shape, add_up)


def _lazy_weight_grad(level: VmapLevel, func: Any, args: tuple) -> tuple | None:
    """The weight's gradient from all images of all examples at once; the others as they are."""
    g, x, w, *how, mask = args
    if not (is_mapped(g, level) and is_mapped(x, level) and mask[1]) or is_mapped(w, level):
        return None
    if level.size * max(w.numel(), x.numel()) < WORTH:  # each image alone takes patches of it
        return None
    alone = (*args[:-1], [False, True, False])

    def add_up() -> Tensor:
        images = (expand_to_stack(a, level).flatten(0, 1) for a in (g, x))
        return func(*images, lower_shared(w, level), *how, alone[-1])[1]

    def make_it() -> Any:
        return level.run_now(func, alone, {})[1]

    like = torch.empty(w.shape, dtype=w.dtype, device="meta")
    others = (None, None, None)
    if mask[0] or mask[2]:
        others = level.run_now(func, (*args[:-1], [mask[0], False, mask[2]]), {})
    return others[0], make_lazy_sum(level, like, (g, x, w), make_it, add_up), others[2]


def _lazy_convolution(level: VmapLevel, func: Any, args: tuple) -> LazyGrad | None:
    """A convolution of two mapped tensors, as a second pass has it for a weight's gradient."""
    x, w, bias, *how, transposed, padding, groups = args
    if transposed or bias is not None or not (is_mapped(x, level) and is_mapped(w, level)):
        return None
    shape = infer_convolution_shape(*args)
    if level.size * max(prod(shape), x.numel(), w.numel()) < WORTH:
        return None

    def channels(v: Tensor, groups: int) -> Tensor:
        """(B, N, G * C, *) -> (N, G * B * C, *): what is summed over, of all examples."""
        v = v.unflatten(2, (groups, -1)).movedim(0, 2)
        return v.flatten(1, 3)

    def add_up() -> Tensor:
        images, kernels = (
            channels(expand_to_stack(x, level), groups),
            channels(expand_to_stack(w, level), 1),
        )
        return func(images, kernels, None, *how, False, padding, groups)

    return _make_source(level, func, args, shape, add_up)


def _lazy_embedding_grad(level: VmapLevel, func: Any, args: tuple) -> LazyGrad | None:
    g, index, rows, padding, by_frequency = args
    if by_frequency or not is_mapped(g, level) or not _is_worth_it(level, rows * g.shape[-1], g):
        return None

    def add_up() -> Tensor:
        return func(
            expand_to_stack(g, level), expand_to_stack(index, level), rows, padding, by_frequency
        )

    return _make_source(level, func, args, (rows, g.shape[-1]), add_up)


def _lazy_embedding_bag_grad(level: VmapLevel, func: Any, args: tuple) -> LazyGrad | None:
    g, indices, offsets, _, count, best, rows, by_frequency, mode, sparse, own, *padding = args
    if by_frequency or sparse or not is_mapped(g, level):
        return None
    if not _is_worth_it(level, rows * g.shape[-1], g):
        return None

    def add_up() -> Tensor:
        given = (expand_to_stack(a, level) for a in (g, indices, offsets, count, best))
        weights = None if own is None else expand_to_stack(own, level)
        at, values = compute_row_grads(*given, mode, weights, *(padding or [-1]))
        at, values = at.flatten(0, 1), values.flatten(0, 1)
        into = values.new_zeros(rows, values.shape[-1])
        if at.dim() == 2:  # for the largest, each entry has a row of its own
            return into.scatter_add(0, at, values)
        return into.index_add(0, at, values)

    return _make_source(level, func, args, (rows, g.shape[-1]), add_up)


def _lazy_scatter(level: VmapLevel, func: Any, args: tuple) -> LazyGrad | None:
    """Values added to a tensor that is the same for all, at indices of each example."""
    into, values, add_up = _PLACES[func](level, *args)
    if add_up is None or is_mapped(into, level) or into.dtype != values.dtype:
        return None
    if not is_mapped(values, level) or not _is_worth_it(level, into.numel(), values):
        return None

    def all_in() -> Tensor:
        return add_up(lower_shared(into, level) * level.size, expand_to_stack(values, level))

    return _make_source(level, func, args, into.shape, all_in)


def _sum_index_put(
    level: VmapLevel, into: Tensor, indices: list, values: Tensor, add: bool = False
):
    at = [d for d, i in enumerate(indices) if i is not None]
    given = [indices[d] for d in at]
    if not add or not at or any(i.dtype in (torch.bool, torch.uint8) for i in given):
        return into, values, None
    shape = broadcast_shapes(*(i.shape for i in given))
    first = at[0] if at == [*range(at[0], at[-1] + 1)] else 0
    rest = [n for d, n in enumerate(into.shape) if d not in at]
    if tuple(values.shape) != (*rest[:first], *shape, *rest[first:]):
        return into, values, None

    def place(i: Any) -> Any:
        if not is_mapped(i, level):
            return lower_shared(i, level)
        return pad_rank(expand_to_stack(i, level), len(shape))

    def add_up(into: Tensor, values: Tensor) -> Tensor:
        places = [None if i is None else place(i) for i in indices]
        if not any(is_mapped(i, level) for i in given):
            return aten.index_put.default(into, places, values.sum(0), True)
        return aten.index_put.default(into, places, values.movedim(0, first), True)

    return into, values, add_up


def _sum_index_add(level: VmapLevel, into: Tensor, dim: int, index: Tensor, values: Tensor):
    if index.dim() != 1 or not into.dim():
        return into, values, None
    dim %= into.dim()

    def add_up(into: Tensor, values: Tensor) -> Tensor:
        rows = expand_to_stack(index, level).reshape(-1)
        return torch.index_add(into, dim, rows, fold_axis(values, dim))

    return into, values, add_up


def _sum_scatter_add(level: VmapLevel, into: Tensor, dim: int, index: Tensor, values: Tensor):
    if index.shape != values.shape or not into.dim():
        return into, values, None
    dim %= into.dim()

    def flatten_into_dim(v: Tensor) -> Tensor:
        return fold_axis(v, dim)

    def add_up(into: Tensor, values: Tensor) -> Tensor:
        return torch.scatter_add(
            into, dim, flatten_into_dim(expand_to_stack(index, level)), flatten_into_dim(values)
        )

    return into, values, add_up


def _sum_put(level: VmapLevel, into: Tensor, index: Tensor, values: Tensor, add: bool = False):
    if not add:
        return into, values, None
    return (
        into,
        values,
        lambda into, values: torch.put(
            into, expand_to_stack(index, level), values, accumulate=True
        ),
    )


_PLACES = {
    aten.index_put.default: _sum_index_put,
    aten.index_add.default: _sum_index_add,
    aten.scatter_add.default: _sum_scatter_add,
    aten.put.default: _sum_put,
}
_SOURCES: dict[Any, Callable] = {
    aten.mm.default: _lazy_matmul,
    aten.bmm.default: _lazy_matmul,
    aten._grouped_mm.default: _lazy_grouped_mm,
    aten.mul.Tensor: _lazy_mul,
    aten.convolution.default: _lazy_convolution,
    aten.convolution_backward.default: _lazy_weight_grad,
    aten.embedding_dense_backward.default: _lazy_embedding_grad,
    aten._embedding_bag_backward.default: _lazy_embedding_bag_grad,
    **dict.fromkeys(_PLACES, _lazy_scatter),
    **dict.fromkeys(
        (
            aten.cat.default,
            aten.stack.default,
            aten.select_backward.default,
            aten.slice_backward.default,
            aten.diagonal_backward.default,
            aten.constant_pad_nd.default,
        ),
        _lazy_linear,
    ),
}
