"""Sources of lazy gradients (`Unmade`): operators with large results of little data."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import torch

from forall._compat.dispatch_state import users_tangents
from forall._compat.shapes import broadcast_shapes
from forall._compat.wrapper_tensor import Wrapper
from forall._core.levels import stack
from forall._vmap.batched_tensor import Batched
from forall._vmap.lazy_grad.lazy_tensor import (
    DEPTH,
    Unmade,
    entries,
    flat,
    is_linear,
    passed,
    pending,
    shape_of_convolution,
)
from forall._vmap.rule_makers.basic import (
    Stack,
    is_mapped,
    lower,
    stacked,
)
from forall._vmap.rules.embedding import rows_of_bags
from forall._vmap.rules.grouped_mm import summed as products_in_groups

if TYPE_CHECKING:
    from collections.abc import Callable

    from forall._vmap.vmap_level import VmapLevel

aten = torch.ops.aten
Tensor = torch.Tensor
WORTH = 1 << 14  # entries of all examples from which a lazy result is worth it


def unmade(level: VmapLevel, func: Any, args: tuple, kwargs: dict) -> Any:
    """The lazy result of an operator in a backward pass under an ended level; None if not lazy."""
    operands = flat(args)
    found = [a for a in operands if type(a) is Unmade and a.level.root is level.root]
    if found:
        if func is aten.detach.default:
            return found[0].graph_free()
        shallow = all(a.depth < DEPTH for a in found)
        plain = shallow and not kwargs and _is_of_all(level, operands)
        if plain and is_linear(level, func, args):
            new = passed(level, func, args)
            if new is not None:
                return new
        for a in found:
            if type(a) is Unmade:  # it may have been materialized with another
                a.made()
    source = _SOURCES.get(func)
    if source is None or kwargs or users_tangents() or not _is_of_all(level, operands):
        return None
    return source(level, func, args) if _are_plain(level, operands) else None


def _is_of_all(level: VmapLevel, operands: list) -> bool:
    """True if all examples of the level take part, and it has no sub-levels."""
    if stack.parted or level.root is not level or vars(level).get("made"):  # has sub-levels
        return False
    return not any(isinstance(a, Wrapper) and _has_parts(a) for a in operands)


def _has_parts(t: Any) -> bool:
    while isinstance(t, Wrapper) and type(t) is not Unmade:
        if t.level.root is not t.level:
            return True
        t = t.value
    return False


def _are_plain(level: VmapLevel, operands: list) -> bool:
    """True if no value has a history or a lazy bit that is not the wrapper's."""
    if level.records_values:
        return False
    mine = [a for a in operands if type(a) is Batched and a.level is level]
    return not any(a.value.is_complex() or a.value.is_neg() for a in mine)


def _begins(level: VmapLevel, func: Any, args: tuple, shape: Any, add_up: Callable) -> Unmade:
    """A lazy result of this shape, in the dtype of the first argument."""
    like = torch.empty(shape, dtype=args[0].dtype, device="meta")
    return pending(level, like, args, lambda: level.as_it_is(func, args, {}), add_up)


def _pays(level: VmapLevel, entries: int, *operands: Any) -> bool:
    """True if a lazy result with so many entries for each example is worth it."""
    return level.size * entries >= WORTH and all(entries > a.numel() for a in operands)


def _linear(level: VmapLevel, func: Any, args: tuple) -> Batched | None:
    """The lazy result of a linear operator that adds zeros around a value, or parts beside it."""
    mapped = [a for a in flat(args) if is_mapped(a, level)]
    if not mapped or not is_linear(level, func, args):
        return None
    return passed(level, func, args) if _pays(level, entries(func, args), *mapped) else None


def _product(level: VmapLevel, func: Any, args: tuple) -> Batched | None:
    """(*, V, S) @ (*, S, D): summed over examples it is one product, whose S has all of theirs."""
    left, right = args
    shape = (*left.shape[:-1], right.shape[-1])

    def add_up() -> Tensor:
        a, b = (stacked(x, level) for x in args)
        a, b = a.mT.movedim(0, -3).flatten(-3, -2), b.movedim(0, -3).flatten(-3, -2)
        return func(a.mT, b)

    return _of_two(level, func, args, shape, add_up)


def _multiplied(level: VmapLevel, func: Any, args: tuple) -> Batched | None:
    """The product of two tensors, both broadcast: its sum over examples is an einsum."""
    left, right = args
    if not isinstance(right, Tensor) or right.numel() <= 1:
        return None
    shape = broadcast_shapes(left.shape, right.shape)

    def dims(a: Tensor) -> list[int]:
        return [d for d, n in enumerate(a.shape, len(shape) - a.dim()) if n > 1]

    def add_up() -> Tensor:
        operands: list[Any] = []
        for a in args:
            v = stacked(a, level)
            operands += (v.reshape(len(v), *(n for n in a.shape if n > 1)), [len(shape), *dims(a)])
        out = [d for d, n in enumerate(shape) if n > 1]
        return torch.einsum(*operands, out).reshape(shape)

    return _of_two(level, func, args, shape, add_up)


def _of_two(
    level: VmapLevel, func: Any, args: tuple, shape: Any, add_up: Callable
) -> Batched | None:
    """A lazy product of two mapped tensors, or of a mapped one with one that is shared."""
    mapped = [a for a in args if is_mapped(a, level)]
    if args[0].dtype != args[1].dtype or not _pays(level, prod(shape), *mapped):
        return None
    if len(mapped) == 2:
        return _begins(level, func, args, shape, add_up)
    return passed(level, func, args) if is_linear(level, func, args) else None


def _in_groups(level: VmapLevel, func: Any, args: tuple) -> Unmade | None:
    """(M, S), (S, N) -> (G, M, N), summed over in groups: in the sum, those of all examples."""
    left, right, *ends = args
    if len(ends) != 1 or not left.dim() == right.dim() == 2 or left.shape[1] != right.shape[0]:
        return None
    if not (is_mapped(left, level) and is_mapped(right, level)):
        return None
    shape = (len(ends[0]), len(left), right.shape[1])
    if left.dtype != right.dtype or not _pays(level, prod(shape), left, right):
        return None

    def add_up() -> Tensor:
        mapped = is_mapped(ends[0], level)
        offs = Stack(stacked(ends[0], level)) if mapped else lower(ends[0], level)
        return products_in_groups(stacked(left, level), stacked(right, level), offs)

    return _begins(level, func, args, shape, add_up)


def _convolution(level: VmapLevel, func: Any, args: tuple) -> tuple | None:
    """The weight's gradient from all images of all examples at once; the others as they are."""
    g, x, w, *how, mask = args
    if not (is_mapped(g, level) and is_mapped(x, level) and mask[1]) or is_mapped(w, level):
        return None
    if level.size * max(w.numel(), x.numel()) < WORTH:  # each image alone takes patches of it
        return None
    alone = (*args[:-1], [False, True, False])

    def add_up() -> Tensor:
        images = (stacked(a, level).flatten(0, 1) for a in (g, x))
        return func(*images, lower(w, level), *how, alone[-1])[1]

    def make_it() -> Any:
        return level.as_it_is(func, alone, {})[1]

    like = torch.empty(w.shape, dtype=w.dtype, device="meta")
    others = (None, None, None)
    if mask[0] or mask[2]:
        others = level.as_it_is(func, (*args[:-1], [mask[0], False, mask[2]]), {})
    return others[0], pending(level, like, (g, x, w), make_it, add_up), others[2]


def _correlated(level: VmapLevel, func: Any, args: tuple) -> Unmade | None:
    """A convolution of two mapped tensors, as a second pass has it for a weight's gradient."""
    x, w, bias, *how, transposed, padding, groups = args
    if transposed or bias is not None or not (is_mapped(x, level) and is_mapped(w, level)):
        return None
    shape = shape_of_convolution(*args)
    if level.size * max(prod(shape), x.numel(), w.numel()) < WORTH:
        return None

    def channels(v: Tensor, groups: int) -> Tensor:
        """(B, N, G * C, *) -> (N, G * B * C, *): what is summed over, of all examples."""
        v = v.unflatten(2, (groups, -1)).movedim(0, 2)
        return v.flatten(1, 3)

    def add_up() -> Tensor:
        images, kernels = channels(stacked(x, level), groups), channels(stacked(w, level), 1)
        return func(images, kernels, None, *how, False, padding, groups)

    return _begins(level, func, args, shape, add_up)


def _table(level: VmapLevel, func: Any, args: tuple) -> Unmade | None:
    g, index, rows, padding, by_frequency = args
    if by_frequency or not is_mapped(g, level) or not _pays(level, rows * g.shape[-1], g):
        return None

    def add_up() -> Tensor:
        return func(stacked(g, level), stacked(index, level), rows, padding, by_frequency)

    return _begins(level, func, args, (rows, g.shape[-1]), add_up)


def _bags(level: VmapLevel, func: Any, args: tuple) -> Unmade | None:
    g, indices, offsets, _, count, best, rows, by_frequency, mode, sparse, own, *padding = args
    if by_frequency or sparse or not is_mapped(g, level):
        return None
    if not _pays(level, rows * g.shape[-1], g):
        return None

    def add_up() -> Tensor:
        given = (stacked(a, level) for a in (g, indices, offsets, count, best))
        weights = None if own is None else stacked(own, level)
        at, values = rows_of_bags(*given, mode, weights, *(padding or [-1]))
        at, values = at.flatten(0, 1), values.flatten(0, 1)
        into = values.new_zeros(rows, values.shape[-1])
        if at.dim() == 2:  # for the largest, each entry has a row of its own
            return into.scatter_add(0, at, values)
        return into.index_add(0, at, values)

    return _begins(level, func, args, (rows, g.shape[-1]), add_up)


def _put_in(level: VmapLevel, func: Any, args: tuple) -> Unmade | None:
    """Values added to a tensor that is the same for all, at indices of each example."""
    into, values, add_up = _PLACES[func](level, *args)
    if add_up is None or is_mapped(into, level) or into.dtype != values.dtype:
        return None
    if not is_mapped(values, level) or not _pays(level, into.numel(), values):
        return None

    def all_in() -> Tensor:
        return add_up(lower(into, level) * level.size, stacked(values, level))

    return _begins(level, func, args, into.shape, all_in)


def _by_index(level: VmapLevel, into: Tensor, indices: list, values: Tensor, add: bool = False):
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
            return lower(i, level)
        v = stacked(i, level)
        return v.reshape(len(v), *(1,) * (len(shape) - i.dim()), *i.shape)

    def add_up(into: Tensor, values: Tensor) -> Tensor:
        places = [None if i is None else place(i) for i in indices]
        if not any(is_mapped(i, level) for i in given):
            return aten.index_put.default(into, places, values.sum(0), True)
        return aten.index_put.default(into, places, values.movedim(0, first), True)

    return into, values, add_up


def _by_rows(level: VmapLevel, into: Tensor, dim: int, index: Tensor, values: Tensor):
    if index.dim() != 1 or not into.dim():
        return into, values, None
    dim %= into.dim()

    def add_up(into: Tensor, values: Tensor) -> Tensor:
        rows = stacked(index, level).reshape(-1)
        return torch.index_add(into, dim, rows, values.movedim(0, dim).flatten(dim, dim + 1))

    return into, values, add_up


def _by_entries(level: VmapLevel, into: Tensor, dim: int, index: Tensor, values: Tensor):
    if index.shape != values.shape or not into.dim():
        return into, values, None
    dim %= into.dim()

    def along(v: Tensor) -> Tensor:
        return v.movedim(0, dim).flatten(dim, dim + 1)

    def add_up(into: Tensor, values: Tensor) -> Tensor:
        return torch.scatter_add(into, dim, along(stacked(index, level)), along(values))

    return into, values, add_up


def _by_number(level: VmapLevel, into: Tensor, index: Tensor, values: Tensor, add: bool = False):
    if not add:
        return into, values, None
    return (
        into,
        values,
        lambda into, values: torch.put(into, stacked(index, level), values, accumulate=True),
    )


_PLACES = {
    aten.index_put.default: _by_index,
    aten.index_add.default: _by_rows,
    aten.scatter_add.default: _by_entries,
    aten.put.default: _by_number,
}
_SOURCES: dict[Any, Callable] = {
    aten.mm.default: _product,
    aten.bmm.default: _product,
    aten._grouped_mm.default: _in_groups,
    aten.mul.Tensor: _multiplied,
    aten.convolution.default: _correlated,
    aten.convolution_backward.default: _convolution,
    aten.embedding_dense_backward.default: _table,
    aten._embedding_bag_backward.default: _bags,
    **dict.fromkeys(_PLACES, _put_in),
    **dict.fromkeys(
        (
            aten.cat.default,
            aten.stack.default,
            aten.select_backward.default,
            aten.slice_backward.default,
            aten.diagonal_backward.default,
            aten.constant_pad_nd.default,
        ),
        _linear,
    ),
}
