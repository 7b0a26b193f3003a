"""Lazy gradients, which are summed over the examples before they are materialized.

The gradient of a tensor that all examples share is the sum of one gradient from each of them
(`boundary.Broadcast`). Each has the shape of the tensor: a matrix gets an outer product, a table
gets rows of zeros but for a few. For N examples these take N times the memory, and the time to go
through it. Their sum does not: the outer products add up to one product of matrices, and all rows
go into one table.

So an operator of a backward pass with such a result returns an `LazyGrad`, which knows its sum, and
is materialized when anything else is asked of it. An operator that is linear in an `LazyGrad`, and
has only shared operands besides, returns another: the sum of f(x) is f of the sum.

NOTE [only when the call has ended]
    While the call runs, each example's own gradient is what is asked for, or is read by what comes
    next. A gradient that passes through an ended call comes from outside, and all of it goes back
    there.
"""

from __future__ import annotations

import functools
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from forall._compat.dispatch_state import functions_off, no_dispatch
from forall._compat.op_schema import map_arguments
from forall._compat.wrapper_tensor import make_wrapper
from forall._core.levels import is_recorded_on_value
from forall._core.version_counter import VersionCount
from forall._vmap.batched_tensor import BatchedTensor, get_source_versions
from forall._vmap.rule_makers.basic import is_mapped, lower_shared

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forall._vmap.vmap_level import VmapLevel

aten = torch.ops.aten
Tensor = torch.Tensor


class LazyGrad(BatchedTensor):
    """A lazy gradient of an ended level; materialized, it is a `BatchedTensor` like any other."""

    make_it: Callable[[], Any]
    add_up: Callable[[], Tensor]
    counts: list[VersionCount]  # versions of its operands
    held: int  # how many numbers these hold
    records_on_value: bool  # whether a derivative hangs on their values
    depth: int  # how deep its lazy operands are nested
    parts: tuple[Any, ...]  # the terms of the sum that it is, if it is one

    @property
    def value(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.materialize().value

    @property
    def axis(self) -> int | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.materialize().axis

    def graph_free(self) -> BatchedTensor:
        with functions_off():
            return propagate_lazily(self.level, aten.alias.default, (self,))

    def compute_value(self) -> BatchedTensor:
        """Compute the value, while this one stays lazy."""
        self._check_versions()
        with functions_off():
            return self.make_it()

    def materialize(self) -> BatchedTensor:
        made = self.compute_value()
        with functions_off():
            value, axis = _copy_to_strides(self, made)
        own = vars(self)
        for name in _UNMADE:
            del own[name]
        _set_class(self, BatchedTensor)
        own.update(value=value, axis=axis, family=made.family, chain=made.chain)
        if made.family is not None:
            made.family.add(self)
        return self

    def sum_examples(self) -> Tensor:
        """The sum over examples, one level down."""
        self._check_versions()
        with functions_off():
            return self.add_up()

    def _check_versions(self) -> None:
        if not all(count.has_no_writes() for count in self.counts):
            raise RuntimeError(
                "What a gradient is made from has been modified by an inplace operation while it "
                "was still needed.\n"
                "Write into a clone of it (.clone()), or after the last backward pass."
            )


_set_class = vars(object)["__class__"].__set__  # wrappers show another class than theirs
_UNMADE = ("make_it", "add_up", "counts", "held", "records_on_value", "depth", "parts")


def _copy_to_strides(shown: Tensor, made: BatchedTensor) -> tuple[Tensor, int | None]:
    """The value of ``made``, in the strides that autograd has seen."""
    if made.axis is None or made.stride() == shown.stride():
        return made.value, made.axis
    size, room = made.value.shape[made.axis], 1
    for n, step in zip(shown.shape, shown.stride(), strict=True):
        room += (n - 1) * step
    value = made.value.new_empty_strided((size, *shown.shape), (room, *shown.stride()))
    return value.copy_(made.value.movedim(made.axis, 0)), 0


DEPTH = 50  # nested calls that Python's stack has room for


def sum_examples(g: BatchedTensor) -> Tensor:
    """The sum over the examples of an ended level."""
    if type(g) is LazyGrad:
        return g.sum_examples()
    return g.value * g.level.size if g.axis is None else g.value.sum(g.axis)


def flatten_args(args: tuple) -> list:
    found = []
    for a in args:
        found += a if isinstance(a, (list, tuple)) else (a,)
    return found


def make_lazy_grad(
    level: VmapLevel, like: Tensor, given: tuple, make_it: Callable, add_up: Callable
) -> LazyGrad:
    """Make a lazy gradient of the operands ``given``; ``like`` shows an example of it."""
    shape, strides, dtype = like.shape, like.stride(), like.dtype
    device = next(a.device for a in flatten_args(given) if isinstance(a, Tensor))
    new = make_wrapper(LazyGrad, shape, strides, 0, None, dtype, like.layout, device)
    new.level, new.make_it, new.add_up = level, make_it, add_up
    tensors = [a for a in flatten_args(given) if isinstance(a, Tensor)]
    lazy = [a for a in tensors if type(a) is LazyGrad]
    new.counts = [c for a in tensors for c in _get_versions(a)]
    new.held = sum(_count_held_numbers(a, level) for a in tensors)
    new.records_on_value = any(
        a.records_on_value if type(a) is LazyGrad else is_recorded_on_value(a) for a in tensors
    )
    new.depth, new.parts = 1 + max((a.depth for a in lazy), default=0), ()
    return new


def _count_held_numbers(a: Tensor, level: VmapLevel) -> int:
    if type(a) is LazyGrad:
        return a.held
    return a.numel() * (level.size if is_mapped(a, level) else 1)


def _get_versions(a: Tensor) -> list[VersionCount]:
    return [VersionCount(a), *(get_source_versions(a) if isinstance(a, BatchedTensor) else ())]


def make_meta_result(func: Any, args: tuple) -> Any:
    """Meta tensors that show one example of the results."""

    def meta(a: Any) -> Any:
        if not isinstance(a, Tensor):
            return a
        return torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="meta")

    with no_dispatch():  # nobody's mode is to see it
        shape = _infer_shape(func, args)
        tensors = [a for a in flatten_args(args) if isinstance(a, Tensor)]
        if shape is not None and (func in _LIE_IN_ORDER or all(map(_lies_in_order, tensors))):
            return torch.empty(shape, dtype=tensors[0].dtype, device="meta")
        values, _ = map_arguments(meta, args, {})
        return func(*values)


def count_result_entries(func: Any, args: tuple) -> int:
    """The number of entries of one example of a result."""
    shape = _infer_shape(func, args)
    return make_meta_result(func, args).numel() if shape is None else prod(shape)


def _lies_in_order(a: Tensor) -> bool:
    return a.is_contiguous()


def _infer_shape(func: Any, args: tuple) -> Sequence[int] | None:
    """The shape of a result of the arguments' dtype; None where torch is to be asked.

    Torch's kernels for meta tensors import sympy on their first use: half a second.
    """
    find = _SHAPES.get(func)
    if find is None or len({a.dtype for a in flatten_args(args) if isinstance(a, Tensor)}) > 1:
        return None
    return find(*args)


def _infer_product_shape(x: Tensor, y: Tensor) -> Sequence[int]:
    return (*x.shape[:-1], y.shape[-1])


def _infer_pointwise_shape(x: Tensor, y: Any, *_: Any) -> Sequence[int] | None:
    """The shape of a pointwise result; None for integers, whose dtype another number may change."""
    alike = not isinstance(y, Tensor) or y.shape == x.shape
    return x.shape if alike and not isinstance(y, complex) and x.is_floating_point() else None


def _infer_stack_shape(tensors: Sequence[Tensor], dim: int = 0) -> Sequence[int] | None:
    if len({a.shape for a in tensors}) > 1:
        return None
    shape = [*tensors[0].shape]
    shape.insert(dim + len(shape) + 1 if dim < 0 else dim, len(tensors))
    return shape


def _infer_cat_shape(tensors: Sequence[Tensor], dim: int = 0) -> Sequence[int] | None:
    shape = [*tensors[0].shape]
    dim = dim % max(len(shape), 1)
    rest = {(*a.shape[:dim], *a.shape[dim:][1:]) for a in tensors}
    if not shape or len(rest) > 1:  # empty ones of one dim fit anywhere
        return None
    shape[dim] = sum(a.shape[dim] for a in tensors)
    return shape


def infer_convolution_shape(
    x: Tensor, w: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, *rest: Any
) -> Sequence[int]:
    """The shape of the result of a convolution that is not transposed."""
    count = x.dim() - 2
    given = ([*v] * (count // len(v)) for v in (padding, dilation, stride))  # one for all, or each
    ways = zip(x.shape[2:], w.shape[2:], *given, strict=True)
    return (len(x), len(w), *((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, p, d, s in ways))


# Operators that put a value into zeros of a given shape.
_IN_ZEROS = (
    aten.select_backward.default,
    aten.slice_backward.default,
    aten.diagonal_backward.default,
)
_OF_TWO_ALIKE = (
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.mul.Tensor,
    aten.div.Tensor,
    aten.mul.Scalar,
    aten.div.Scalar,
    aten.tanh_backward.default,
    aten.sigmoid_backward.default,
    aten.threshold_backward.default,
    aten.gelu_backward.default,
    aten.silu_backward.default,
)
_AS_IT_WAS = (
    aten.clone.default,
    aten.neg.default,
    aten.flip.default,
    aten.roll.default,
    aten.tril.default,
    aten.triu.default,
)
_SHAPES: dict[Any, Callable[..., Sequence[int] | None]] = {
    **dict.fromkeys(_IN_ZEROS, lambda _, shape, *rest: shape),
    **dict.fromkeys(_OF_TWO_ALIKE, _infer_pointwise_shape),
    **dict.fromkeys(_AS_IT_WAS, lambda x, *rest: x.shape),
    aten.mm.default: _infer_product_shape,
    aten.bmm.default: _infer_product_shape,
    aten.cat.default: _infer_cat_shape,
    aten.stack.default: _infer_stack_shape,
}
_LIE_IN_ORDER = frozenset((*_IN_ZEROS, aten.mm.default, aten.bmm.default))  # for all operands


# --- what is linear ----------------------------------------------------------------------------

# Linear in the first argument; the others are no tensors.
_OF_ONE = {
    aten.alias.default,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.movedim.int,
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.expand.default,
    aten.diagonal.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.clone.default,
    aten.neg.default,
    aten.flip.default,
    aten.tril.default,
    aten.triu.default,
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.mean.default,
    aten.mean.dim,
    aten.mul.Scalar,
    aten.div.Scalar,
    aten.select_backward.default,
    aten.slice_backward.default,
    aten.diagonal_backward.default,
    aten.constant_pad_nd.default,
    aten.cumsum.default,
    aten.roll.default,
    aten.repeat.default,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unbind.int,
}
# Linear in the first argument; the others may be tensors that all examples share.
_IN_FIRST = {
    aten.div.Tensor,
    aten.index.Tensor,
    aten.index_select.default,
    aten.gather.default,
}
_OF_EACH = {aten.mul.Tensor, aten.mm.default, aten.bmm.default}  # bilinear
_SUMS = {aten.add.Tensor, aten.sub.Tensor, aten.cat.default, aten.stack.default}


def is_linear(level: VmapLevel, func: Any, args: tuple) -> bool:
    """True if the sum of the results over the examples is the operator's result of their sum."""
    if func in _OF_ONE:
        return func is not aten.constant_pad_nd.default or not any(args[2:])
    tensors = [a for a in flatten_args(args) if isinstance(a, Tensor)]
    mapped = [_is_mapped_or_lazy(a, level) for a in tensors]
    if func in _IN_FIRST or _is_backward(func):
        return tensors[0] is args[0] and mapped[0] and not any(mapped[1:])
    if func is aten.where.self:  # a shared operand counts once per example, as in a sum
        return not mapped[0] and _are_alike(tensors[1:])
    if func is aten.masked_fill.Scalar:
        return mapped == [True, False] and args[2] == 0
    if func in _OF_EACH:
        return mapped in ([True, False], [False, True])
    if func not in _SUMS:
        return False
    joins = func in (aten.cat.default, aten.stack.default)
    whole = all(isinstance(a, Tensor) for a in flatten_args(args[:1] if joins else args))
    return whole and _are_alike(tensors, shapes=func is not aten.cat.default)


def _are_alike(tensors: list[Tensor], shapes: bool = True) -> bool:
    """True if no operand is broadcast, or made another dtype."""
    one = not shapes or len({a.shape for a in tensors}) == 1
    return one and len({a.dtype for a in tensors}) == 1


@functools.cache
def _is_backward(func: Any) -> bool:
    """True for a backward operator of autograd: linear in its first argument, the cotangent."""
    schema = func._schema
    name = schema.name.removeprefix("aten::")
    return (
        name.endswith(("_backward", "_backward_data"))
        and schema.arguments[0].name.startswith("grad")
        and not any(word in name for word in ("sparse", "nested", "mkldnn"))
    )


def _is_mapped_or_lazy(a: Any, level: VmapLevel) -> bool:
    return (type(a) is LazyGrad and a.level is level) or is_mapped(a, level)


def propagate_lazily(level: VmapLevel, func: Any, args: tuple) -> Any:
    """Apply a linear operator to lazy gradients; None if the shape of its results is unknown."""
    if func is aten.add.Tensor:
        return _add_lazily(level, args)
    try:
        like = make_meta_result(func, args)
    except (NotImplementedError, RuntimeError):  # no kernel for meta tensors
        return None

    def get_operand_sum(a: Any) -> Any:
        if func in _SUMS or (func is aten.where.self and a is not args[0]):
            return _sum_term(a, level)
        return sum_examples(a) if _is_mapped_or_lazy(a, level) else lower_shared(a, level)

    def add_up() -> Any:
        given, _ = map_arguments(get_operand_sum, args, {})
        return func(*given)

    def make_it() -> Any:
        for a in flatten_args(args):
            if type(a) is LazyGrad:
                a.materialize()
        return level.run_now(func, args, {})

    if isinstance(like, Tensor):
        return make_lazy_grad(level, like, args, make_it, add_up)
    totals = functools.cache(add_up)
    found = [
        None
        if x is None
        else make_lazy_grad(
            level, x, args, _make_item_getter(make_it, n), _make_item_getter(totals, n)
        )
        for n, x in enumerate(like)
    ]
    return type(like)(found)


def _make_item_getter(all_of: Callable[[], Any], n: int) -> Callable[[], Any]:
    return lambda: all_of()[n]


def _sum_term(a: Any, level: VmapLevel) -> Any:
    """The sum over examples of one term, which may be the same for each example."""
    if not isinstance(a, Tensor):
        return a
    return sum_examples(a) if _is_mapped_or_lazy(a, level) else lower_shared(a, level) * level.size


def _add_lazily(level: VmapLevel, args: tuple) -> BatchedTensor:
    """One lazy sum of all terms, however many steps use a parameter, without nested sums."""
    parts = tuple(p for a in args for p in (a.parts if _is_lazy_sum(a) else (a,)))

    def add_up() -> Tensor:
        return functools.reduce(torch.add, (_sum_term(p, level) for p in parts))

    def make_it() -> Any:
        found = parts[0].compute_value() if type(parts[0]) is LazyGrad else parts[0]
        for p in parts[1:]:
            p = p.compute_value() if type(p) is LazyGrad else p
            found = level.run_now(aten.add.Tensor, (found, p), {})
        return found

    new = make_lazy_grad(level, make_meta_result(aten.add.Tensor, args), args, make_it, add_up)
    new.parts, new.depth = parts, new.depth - 1
    new.counts = [c for a in args for c in (a.counts if _is_lazy_sum(a) else _get_versions(a))]
    worth = new.held <= 2 * level.size * new.numel()  # which is what adding two of them takes
    return new if worth else new.materialize()


def _is_lazy_sum(a: Any) -> bool:
    return type(a) is LazyGrad and bool(a.parts)
