"""The operators of collectives over a named axis: their schemas, derivatives and kernels.

Each takes one example ``x``, the number of the axis and its size. The vmap level that has the axis
answers with its stacks, other levels pass the operator on (`_vmap.rules.across_examples`). Only a
tensor of no level reaches a kernel, so it is the same for all examples.

NOTE [derivatives of collectives]
    The derivative of a collective is that of the program over all examples: what one example's
    result depends on in another example comes back to that one. So the pull-back of a linear
    collective is its transpose, which is a collective too, and its push-forward is itself.

NOTE [a sum over ranks]
    A sum over the examples of all ranks is three steps: `PSUM_HERE` adds up the examples of this
    rank, `rank_ops.SUM` the sums of all ranks, and `SHARE` gives the total to each example. Between
    the first and the last, values are of the rank and not of its examples. So the tensors of a tree
    can be one message without a copy of all examples' entries. `PSUM_HERE` and `SHARE` are each
    other's transpose.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from forall._compat.dispatch_state import apply_own_function, below_autograd, has_tangent
from forall._compat.documented_error import documented_error
from forall._compat.wrapper_tensor import Wrapper
from forall._core.levels import lift

if TYPE_CHECKING:
    from collections.abc import Callable

    from forall._core.levels import Level

Tensor = torch.Tensor
_library = torch.library.Library("forall", "FRAGMENT")


def _define(name: str, more: str = "") -> Any:
    _library.define(f"{name}(Tensor x, {more}int axis, SymInt size) -> Tensor")
    return getattr(torch.ops.forall, name).default


PSUM = _define("psum")  # (*S) -> (*S)
PMEAN = _define("pmean")
PMAX = _define("pmax")
PMIN = _define("pmin")
ALL_GATHER = _define("all_gather")  # (*S) -> (N, *S)
PSUM_SCATTER = _define("psum_scatter")  # (N, *S) -> (*S)
ALL_TO_ALL = _define("all_to_all")  # (N, *S) -> (N, *S)
PPERMUTE = _define("ppermute", "int[] sources, int[] targets, ")  # (*S) -> (*S)
# See NOTE [a sum over ranks]; their size is the number of this rank's examples.
PSUM_HERE = _define("psum_here")  # (*S) -> (*S) of the rank
SHARE = _define("share")  # (*S) of the rank -> (*S)


def psum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that `psum` of shared values has, which is that of `torch.sum`."""
    return dtype if dtype.is_floating_point or dtype.is_complex else torch.int64


# --- derivatives -------------------------------------------------------------------------------


def _same(*rest: Any) -> tuple:
    return rest


def swap(sources: list[int], targets: list[int], *rest: Any) -> tuple:
    """Return these arguments with the first two in each other's place: sent back."""
    return (targets, sources, *rest)


# The transpose of each linear collective: the operator, and its further arguments.
_TRANSPOSES: dict[Any, tuple[Any, Callable[..., tuple]]] = {
    PSUM: (PSUM, _same),
    PMEAN: (PMEAN, _same),
    ALL_GATHER: (PSUM_SCATTER, _same),
    PSUM_SCATTER: (ALL_GATHER, _same),
    ALL_TO_ALL: (ALL_TO_ALL, _same),
    PPERMUTE: (PPERMUTE, swap),
    PSUM_HERE: (SHARE, _same),
    SHARE: (PSUM_HERE, _same),
}
_OF_AXES = frozenset({*_TRANSPOSES, PMAX, PMIN})


def _find_level(output: Tensor, op: Any, rest: tuple) -> Level | None:
    """Return the level that has the axis, which a derivative of no level is lifted to."""
    if op not in _OF_AXES:
        return None
    while isinstance(output, Wrapper):
        axis = output.level.root.axis
        if axis is not None and axis.number == rest[-2]:
            return output.level.root
        output = output.value
    return None


class LinearCollective(torch.autograd.Function):
    """The node of a linear collective. See NOTE [derivatives of collectives]."""

    @staticmethod
    def forward(_x, made, _op, _rest):
        return made[0]

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, _, ctx.op, ctx.rest = inputs
        ctx.level = _find_level(output, ctx.op, ctx.rest)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, g):
        if g is None:
            return None, None, None, None
        op, arrange = _TRANSPOSES[ctx.op]
        return op(lift(g, ctx.level), *arrange(*ctx.rest)), None, None, None

    @staticmethod
    def jvp(ctx, t, *_):
        return None if t is None else ctx.op(lift(t, ctx.level), *ctx.rest)


class ExtremeCollective(torch.autograd.Function):
    """The node of the largest or smallest value; examples that share it share its derivative."""

    @staticmethod
    def forward(_x, made, _op, _rest):
        return made[0]

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, _, op, ctx.rest = inputs
        ctx.level = _find_level(output, op, ctx.rest)
        ctx.save_for_backward(x, output)
        ctx.save_for_forward(x, output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, g):
        if g is None:
            return None, None, None, None
        hits, count = _count_hits(*ctx.saved_tensors, ctx.rest)
        return torch.where(hits, PSUM(lift(g, ctx.level), *ctx.rest) / count, 0), None, None, None

    @staticmethod
    def jvp(ctx, t, *_):
        if t is None:
            return None
        hits, count = _count_hits(*ctx.saved_tensors, ctx.rest)
        return PSUM(torch.where(hits, lift(t, ctx.level), 0), *ctx.rest) / count


def _count_hits(x: Tensor, y: Tensor, rest: tuple) -> tuple[Tensor, Tensor]:
    """Return for which examples ``x`` is the extreme value ``y``, and how many there are."""
    hits = find_hits(x, y)
    return hits, PSUM(hits, *rest)


def find_hits(x: Tensor, y: Tensor) -> Tensor:
    """Return where ``x`` is the extreme value ``y``, which may be NaN."""
    return (x == y) | (x.isnan() & y.isnan())


def add_node(op: Any, node: type) -> None:
    """Record an operator of this library by this node."""
    _NODES[op] = node
    _library.impl(op._opname, _make_autograd_kernel(op), "Autograd")


def add_linear(op: Any, transpose: Any, arrange: Callable[..., tuple] = _same) -> None:
    """Give a linear operator of this library its transpose, and with it its derivatives."""
    _TRANSPOSES[op] = (transpose, arrange)
    add_node(op, LinearCollective)


_NODES: dict[Any, type] = dict.fromkeys(_TRANSPOSES, LinearCollective)
_NODES |= dict.fromkeys((PMAX, PMIN), ExtremeCollective)


def record(op: Any, x: Tensor, made: Tensor, rest: tuple) -> Tensor:
    """Return the result of ``op(x, *rest)``, which is ``made``, with its history and tangent.

    It is not made in the node: there the tangents and the history that a value holds would be cut.
    """
    moves = forward_ad._current_level >= 0 and has_tangent(x)
    if moves or (x.requires_grad and torch.is_grad_enabled()):
        return apply_own_function(_NODES[op], x, [made], op, rest)
    return made


def _make_autograd_kernel(op: Any) -> Callable:
    def kernel(x: Tensor, *rest: Any) -> Tensor:
        with below_autograd():
            made = op(x, *rest)
        return record(op, x, made, rest)

    return kernel


for _op in _NODES:
    _library.impl(_op._opname, _make_autograd_kernel(_op), "Autograd")


# --- kernels -----------------------------------------------------------------------------------


def sum_shared(x: Tensor, size: Any) -> Tensor:
    """Return the sum over examples that all have ``x``."""
    return x.to(psum_dtype(x.dtype)) * size


def gather_shared(x: Tensor, size: Any) -> Tensor:
    """Return what examples that all have ``x`` gather: (*S) -> (N, *S)."""
    return x.expand(size, *x.shape).clone(memory_format=torch.contiguous_format)


def _add_up(x: Tensor, axis: int, size: Any) -> Tensor:
    return sum_shared(x, size)


def _clone(x: Tensor, axis: int, size: Any) -> Tensor:
    return x.clone()


def _refuse(x: Tensor, *rest: Any) -> Tensor:
    raise documented_error(RuntimeError, "axis-name")(
        "A collective whose result differs between the examples was called on a tensor of none of "
        "them, after the call that named the axis.\nCall it inside the function."
    )


for _op, _kernel in (
    (PSUM, _add_up),
    (PSUM_HERE, _add_up),
    (SHARE, _clone),
    (PMEAN, _clone),
    (PMAX, _clone),
    (PMIN, _clone),
    (ALL_GATHER, lambda x, axis, size: gather_shared(x, size)),
    (PSUM_SCATTER, _refuse),
    (ALL_TO_ALL, _refuse),
    (PPERMUTE, _refuse),
):
    _library.impl(_op._opname, _kernel, "CompositeExplicitAutograd")
