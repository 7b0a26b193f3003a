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
from forall._compat.documented_error import documented_error
from forall._compat.op_schema import map_arguments
from forall._compat.wrapper_tensor import make_wrapper
from forall._core.levels import is_recorded_on_value, run_outside
from forall._core.version_counter import VersionCount
from forall._vmap.batched_tensor import BatchedTensor, get_source_versions
from forall._vmap.rule_makers.basic import is_mapped, lower_shared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from forall._vmap.vmap_level import VmapLevel

aten = torch.ops.aten
Tensor = torch.Tensor


class Deferred:
    """The computation of a lazy gradient, with the versions of what it reads."""

    __slots__ = ("counts",)

    def __init__(self, operands: Iterable[Tensor]) -> None:
        self.counts = [c for a in operands for c in _get_versions(a)]

    def make(self) -> Any:
        """Compute the value, whatever has been written since."""
        raise NotImplementedError

    def propagate(self, level: VmapLevel, func: Any, args: tuple) -> Any:
        """Apply an operator to a lazy gradient lazily; return None if it needs the value."""
        raise NotImplementedError

    def compute(self) -> Any:
        """Compute the value, while the gradient stays lazy."""
        self.check_versions()
        with functions_off():
            return self.make()

    def sum_examples(self) -> Tensor:
        """The sum over examples, one level down."""
        return sum_examples(self.compute())

    def check_versions(self) -> None:
        if not all(count.has_no_writes() for count in self.counts):
            raise documented_error(RuntimeError, "modified-since")(
                "What a gradient is made from has been modified by an inplace operation while it "
                "was still needed.\n"
                "Write into a clone of it (.clone()), or after the last backward pass."
            )


class LazyGrad(BatchedTensor):
    """A gradient that is not computed yet; once it is, it is a `BatchedTensor` like any other.

    What it is known by until then depends on the kind of `Deferred`: its sum over the examples, or
    the factors of a product.
    """

    deferred: Deferred
    records_on_value: bool  # whether a derivative hangs on the values of the operands

    @property
    def value(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.materialize().value

    @property
    def axis(self) -> int | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.materialize().axis

    def graph_free(self) -> BatchedTensor:
        with functions_off():
            return self.deferred.propagate(self.level, aten.alias.default, (self,))

    def materialize(self) -> BatchedTensor:
        made = self.deferred.compute()
        with functions_off():
            value, axis = _copy_to_strides(self, made)
        own = vars(self)
        del own["deferred"], own["records_on_value"]
        _set_class(self, BatchedTensor)
        own.update(value=value, axis=axis, family=made.family, chain=made.chain)
        if made.family is not None:
            made.family.add(self)
        return self


_set_class = vars(object)["__class__"].__set__  # wrappers show another class than theirs


def make_lazy_grad(
    level: VmapLevel, like: Tensor, operands: Sequence[Tensor], deferred: Deferred
) -> LazyGrad:
    """Make a lazy gradient that is computed of ``operands``; ``like`` shows an example of it."""
    shape, strides, dtype = like.shape, like.stride(), like.dtype
    new = make_wrapper(LazyGrad, shape, strides, 0, None, dtype, like.layout, operands[0].device)
    new.level, new.deferred = level, deferred
    new.records_on_value = any(
        a.records_on_value if type(a) is LazyGrad else is_recorded_on_value(a) for a in operands
    )
    return new


def _copy_to_strides(shown: Tensor, made: BatchedTensor) -> tuple[Tensor, int | None]:
    """The value of ``made``, in the strides that autograd has seen."""
    if made.axis is None or made.stride() == shown.stride():
        return made.value, made.axis
    size, room = made.value.shape[made.axis], 1
    for n, step in zip(shown.shape, shown.stride(), strict=True):
        room += (n - 1) * step
    with run_outside(made.level):
        value = made.value.new_empty_strided((size, *shown.shape), (room, *shown.stride()))
        return value.copy_(made.value.movedim(made.axis, 0)), 0


DEPTH = 50  # nested calls that Python's stack has room for


class DeferredSum(Deferred):
    """A gradient whose sum over the examples is known without it."""

    __slots__ = ("add_up", "depth", "held", "make_it", "parts")

    def __init__(
        self, level: VmapLevel, operands: Sequence[Tensor], make_it: Callable, add_up: Callable
    ) -> None:
        super().__init__(operands)
        self.make_it, self.add_up = make_it, add_up
        self.held = sum(_count_held_numbers(a, level) for a in operands)  # how many numbers
        nested = [a.deferred.depth for a in operands if _is_deferred_sum(a)]
        self.depth = 1 + max(nested, default=0)  # of nested lazy operands
        self.parts: tuple = ()  # the terms of the sum that it is, if it is one

    def make(self) -> Any:
        return self.make_it()

    def propagate(self, level: VmapLevel, func: Any, args: tuple) -> Any:
        return propagate_linear(level, func, args)

    def sum_examples(self) -> Tensor:
        self.check_versions()
        with functions_off():
            return self.add_up()


def _is_deferred_sum(a: Any) -> bool:
    return type(a) is LazyGrad and type(a.deferred) is DeferredSum


def can_propagate_linear(a: LazyGrad) -> bool:
    """True if an operator that is linear in a lazy gradient can be applied to it lazily."""
    return type(a.deferred) is DeferredSum and a.deferred.depth < DEPTH


def sum_examples(g: BatchedTensor) -> Tensor:
    """The sum over the examples of an ended level."""
    if type(g) is LazyGrad:
        return g.deferred.sum_examples()
    return g.value * g.level.size if g.axis is None else g.value.sum(g.axis)


def flatten_args(args: tuple) -> list:
    found = []
    for a in args:
        found += a if isinstance(a, (list, tuple)) else (a,)
    return found


def make_lazy_sum(
    level: VmapLevel, like: Tensor, given: tuple, make_it: Callable, add_up: Callable
) -> LazyGrad:
    """Make a lazy gradient of the operands ``given`` whose sum over the examples is known."""
    operands = [a for a in flatten_args(given) if isinstance(a, Tensor)]
    return make_lazy_grad(level, like, operands, DeferredSum(level, operands, make_it, add_up))


def _count_held_numbers(a: Tensor, level: VmapLevel) -> int:
    if type(a) is LazyGrad and type(a.deferred) is DeferredSum:
        return a.deferred.held
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
IN_ZEROS = (
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
    **dict.fromkeys(IN_ZEROS, lambda _, shape, *rest: shape),
    **dict.fromkeys(_OF_TWO_ALIKE, _infer_pointwise_shape),
    **dict.fromkeys(_AS_IT_WAS, lambda x, *rest: x.shape),
    aten.mm.default: _infer_product_shape,
    aten.bmm.default: _infer_product_shape,
    aten.cat.default: _infer_cat_shape,
    aten.stack.default: _infer_stack_shape,
}
_LIE_IN_ORDER = frozenset((*IN_ZEROS, aten.mm.default, aten.bmm.default))  # for all operands


# --- what is linear ----------------------------------------------------------------------------

# Views that have each entry of a tensor once.
REARRANGEMENTS = {
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
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
}
# Linear in the first argument; the others are no tensors.
_OF_ONE = REARRANGEMENTS | {
    aten.expand.default,
    aten.diagonal.default,
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


def propagate_linear(level: VmapLevel, func: Any, args: tuple) -> Any:
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
        return make_lazy_sum(level, like, args, make_it, add_up)
    totals = functools.cache(add_up)
    found = [
        None
        if x is None
        else make_lazy_sum(
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
    parts = tuple(p for a in args for p in (a.deferred.parts if _is_lazy_sum(a) else (a,)))

    def add_up() -> Tensor:
        return functools.reduce(torch.add, (_sum_term(p, level) for p in parts))

    def make_it() -> Any:
        found = parts[0].deferred.compute() if type(parts[0]) is LazyGrad else parts[0]
        for p in parts[1:]:
            p = p.deferred.compute() if type(p) is LazyGrad else p
            found = level.run_now(aten.add.Tensor, (found, p), {})
        return found

    new = make_lazy_sum(level, make_meta_result(aten.add.Tensor, args), args, make_it, add_up)
    deferred: Any = new.deferred
    deferred.parts, deferred.depth = parts, deferred.depth - 1
    deferred.counts = [
        c for a in args for c in (a.deferred.counts if _is_lazy_sum(a) else _get_versions(a))
    ]
    worth = deferred.held <= 2 * level.size * new.numel()  # which is what adding two of them takes
    return new if worth else new.materialize()


def _is_lazy_sum(a: Any) -> bool:
    return _is_deferred_sum(a) and bool(a.deferred.parts)
