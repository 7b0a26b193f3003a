"""The collectives: functions that combine the examples of a named axis."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from forall._api.execution.mapped_call import make_index
from forall._api.rank_axes import bind_axes
from forall._compat import pytree
from forall._compat.dispatch_state import (
    below_autograd,
    functions_off,
    in_torch_func,
    is_autocast,
    no_dispatch,
)
from forall._compat.documented_error import documented_error
from forall._compat.private_api import PLAIN
from forall._core import collective_ops as ops
from forall._core.bound_meshes import bound
from forall._core.errors import format_columns, format_short, type_name_of
from forall._core.find_axis import check_all_come, find_axis, find_bound_axis
from forall._core.levels import run_outside, stack
from forall._core.python_state import read_signature
from forall._divergence.batched_scalar import BatchedScalar, number_to_tensor
from forall._vmap.batched_tensor import BatchedTensor, wrap_stack
from forall._vmap.fast_path.api_calls import answer_call
from forall._vmap.fast_path.operators import can_use_fast_path
from forall._vmap.registry import HANDLERS

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from forall._core.named_axes import Axis

R = TypeVar("R")
Tensor = torch.Tensor
_NUMBERS = (int, float, complex)


def _take_bound_axes(func: Callable[..., R]) -> Callable[..., R]:
    """Make a collective run over the ranks of a bound mesh if a dim of it has the axis name."""
    signature = read_signature(func)

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not bound.meshes:
            return func(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        names = given["axis_name"]
        found: Callable = func
        for name in names if type(names) is tuple else (names,):
            dim = find_bound_axis(name)
            if dim is not None:
                found = bind_axes(found, (name,), dim)
        return found(*args, **kwargs)

    return call


def _find_one(verb: str, name: Hashable, x: Any) -> Axis:
    """Return the axis of a name, of which all examples have to come."""
    axis, root = find_axis(verb, name, x)
    if root.sub_level is not None or root.size != axis.local_size:
        check_all_come(verb, axis, root)
    return axis


def _apply(op: Any, t: Tensor, axis: Axis, *rest: Any) -> Tensor:
    rest = (*rest, axis.number, axis.size)
    if in_torch_func():
        raise documented_error(NotImplementedError, "compiled-axis")(
            f"{op._opname}(.., {axis.name!r}): a transform of torch.func runs inside the axis.\n"
            "It knows no named axes. Use forall's transform of the same name."
        )
    if can_use_fast_path():
        with functions_off():
            out = _answer_directly(op, t, rest, stack.top)
        if out is not None:
            return out
    return op(t, *rest)


def _answer_directly(op: Any, t: Any, rest: tuple, level: Any) -> Tensor | None:
    """Return the result, with its history, if its operand is a plain stack; else None."""
    if not (torch.is_grad_enabled() and t.requires_grad):
        return answer_call(op, (t, *rest), None, level, modes=1)
    if type(t) is not BatchedTensor or t.level is not level or stack.diverged or is_autocast():
        return None
    if type(t.value) not in PLAIN or t.value.requires_grad:
        return None
    with no_dispatch(), below_autograd():
        made = HANDLERS[op](level, op, (t, *rest), {})
    return ops.record(op, t, made, rest)


def _apply_to_each(
    op: Any, tensors: list[Tensor], axis: Axis, *rest: Any, before: int = 0, after: int = 0
) -> list[Tensor]:
    """Return the results of ``op``. Between ranks, tensors of one dtype are one message.

    ``before`` counts the leading dims of an argument that are the axis's, ``after`` those of a
    result; the dims that follow are made flat.
    """

    def apply(t: Tensor) -> Tensor:
        return _apply(op, t, axis, *rest)

    if axis.ranks is None:
        return [*map(apply, tensors)]
    return _apply_to_groups(apply, tensors, before, after)


def _apply_to_groups(
    apply: Callable[[Tensor], Tensor], tensors: list[Tensor], before: int = 0, after: int = 0
) -> list[Tensor]:
    """Return the results of ``apply``, which is called once for all tensors of one dtype."""
    made = [*tensors]
    for places in _find_alike(tensors):
        if len(places) == 1:
            made[places[0]] = apply(tensors[places[0]])
            continue
        shapes = [tensors[i].shape for i in places]
        sizes = [math.prod(shape[before:]) for shape in shapes]
        rows = [
            tensors[i].reshape((*shape[:before], size))
            for i, shape, size in zip(places, shapes, sizes, strict=True)
        ]
        out = apply(torch.cat(rows, before))
        for i, shape, part in zip(places, shapes, out.split(sizes, after), strict=True):
            made[i] = part.reshape((*out.shape[:after], *shape[before:]))
    return made


_SUMS = frozenset({ops.PSUM, ops.PMEAN})


def _sum_over_ranks(op: Any, tensors: list[Tensor], axis: Axis) -> list[Tensor]:
    """Return the sum or the mean of each tensor over the examples of all ranks.

    See NOTE [a sum over ranks] in `_core.collective_ops`. Tensors of one dtype are one message.
    """
    ranks = axis.ranks
    local = axis._replace(size=ranks.local)

    def add_up(x: Tensor) -> Tensor:
        total = ranks.add_up(x)
        return total / ranks.total if op is ops.PMEAN else total

    sums = [_apply(ops.PSUM_HERE, t, local) for t in tensors]
    return [_apply(ops.SHARE, t, local) for t in _apply_to_groups(add_up, sums)]


def _find_alike(tensors: list[Tensor]) -> list[list[int]]:
    """Return groups of places: the tensors of a group can be concatenated, once they are flat."""
    groups: dict[Any, list[int]] = {}
    with functions_off():  # to ask is no call that a level has to see
        for i, t in enumerate(tensors):
            can_join = t.layout is torch.strided and not t.is_nested
            groups.setdefault((t.dtype, t.device) if can_join else i, []).append(i)
    return [*groups.values()]


def _map_leaves(call: str, f: Callable[[list], list], x: Any) -> Any:
    """Return the tree ``x`` with the results of ``f``, of its tensors and Python's numbers."""
    if isinstance(x, torch.Tensor):
        return f([x])[0]
    leaves, spec = pytree.flatten(x)
    return pytree.unflatten(f([_check_leaf(call, leaf) for leaf in leaves]), spec)


def _to_tensor(t: Any) -> Tensor:
    return t if isinstance(t, torch.Tensor) else torch.as_tensor(t)


def _check_leaf(call: str, leaf: Any) -> Any:
    if type(leaf) is BatchedScalar:
        return number_to_tensor(leaf)
    if isinstance(leaf, (torch.Tensor, *_NUMBERS)):
        return leaf
    raise documented_error(TypeError, "collective-argument")(
        f"{call}: x must be a tensor or a number, or a tree of them.\n"
        f"{format_columns([('x', format_short(leaf), type_name_of(leaf))])}\n"
        "Pass its tensors in a tuple, a list or a dict."
    )


def _reduce(verb: str, op: Any, x: Any, axis_name: Any, on_number: Callable[[Any], Any]) -> Any:
    if type(axis_name) is tuple:
        axes = [_find_one(verb, name, x) for name in axis_name]
    else:
        axis = _find_one(verb, axis_name, x)
        if type(x) is BatchedTensor and axis.ranks is None:  # most often
            return _apply(op, x, axis)
        axes = [axis]

    def reduce_leaves(leaves: list) -> list:
        tensors = [t for t in leaves if isinstance(t, torch.Tensor)]
        for axis in axes:
            reduce = _apply_to_each if axis.ranks is None or op not in _SUMS else _sum_over_ranks
            tensors = reduce(op, tensors, axis)
        made = iter(tensors)
        return [next(made) if isinstance(t, torch.Tensor) else on_number(t) for t in leaves]

    return _map_leaves(f"{verb}(.., {axis_name!r})", reduce_leaves, x)


@_take_bound_axes
def psum(x: Any, axis_name: Hashable) -> Any:
    """The sum over the examples of an axis, the same for all of them: (*S) -> (*S).

    The law: in ``vmap(f, axis_name="b")`` it is ``xs.sum(0)`` of the stack ``xs``. Whole numbers
    and bools are summed as `torch.sum` does.

    A derivative inside is that of the program over all examples: ``grad`` of ``psum(loss(x), "b")``
    gives each example the derivative of the sum of all N results, each of which is that same sum.
    So it is N times the derivative of one of them. What is often meant is had in two ways: take
    the derivative outside, ``grad(lambda w: vmap(f, axis_name="b")(w, xs).mean())``, or sum
    derivatives, ``pmean(grad(local_loss)(w, x), "b")``.

    Args:
        x: a tensor, a number, or a tree of them. A number of Python's is multiplied by the size.
        axis_name: the `vmap` option of that name, or a tuple of several.

    Raises:
        NameError: if no axis has that name here.
        RuntimeError: where some examples alone come, in a branch or with a chunk_size.

    Cost: one sum over the stack of all examples.

    Source: ``jax.lax.psum``.

    Example:
        >>> forall.vmap(lambda x: x / psum(x, "b"), axis_name="b")(torch.tensor([1.0, 3.0]))
        tensor([0.2500, 0.7500])
    """
    return _reduce("psum", ops.PSUM, x, axis_name, lambda n: n * axis_size(axis_name))


@_take_bound_axes
def pmean(x: Any, axis_name: Hashable) -> Any:
    """The mean over the examples of an axis, the same for all of them: (*S) -> (*S).

    The law: in ``vmap(f, axis_name="b")`` it is ``xs.mean(0)`` of the stack ``xs``. The mean of
    whole numbers is in the default dtype of floating point numbers. Derivatives are as in `psum`.

    Args:
        x: a tensor, a number, or a tree of them.
        axis_name: the `vmap` option of that name, or a tuple of several.

    Raises:
        NameError: if no axis has that name here.
        RuntimeError: where some examples alone come, in a branch or with a chunk_size.

    Cost: one mean over the stack of all examples.

    Source: ``jax.lax.pmean``.

    Example:
        >>> def normalize(x):                                     # batch norm of one example
        ...     centered = x - pmean(x, "b")
        ...     return centered / pmean(centered**2, "b").sqrt()
        >>> forall.vmap(normalize, axis_name="b")(torch.tensor([1.0, 3.0]))
        tensor([-1.,  1.])
    """

    def to_float(t: Any) -> Any:
        if not isinstance(t, torch.Tensor):
            return t
        with functions_off():  # to ask is no call that a level has to see
            is_exact = not (t.is_floating_point() or t.is_complex())
        return t.to(torch.get_default_dtype()) if is_exact else t

    def on_number(n: Any) -> Any:
        return n if isinstance(n, complex) else float(n)

    return _reduce(
        "pmean",
        ops.PMEAN,
        _map_leaves(f"pmean(.., {axis_name!r})", lambda leaves: [*map(to_float, leaves)], x),
        axis_name,
        on_number,
    )


@_take_bound_axes
def pmax(x: Any, axis_name: Hashable) -> Any:
    """The largest value among the examples of an axis, entry by entry: (*S) -> (*S).

    The law: in ``vmap(f, axis_name="b")`` it is ``xs.amax(0)`` of the stack ``xs``. Its derivative
    goes to the largest; examples that share it get equal parts.

    Args:
        x: a tensor, a number, or a tree of them.
        axis_name: the `vmap` option of that name, or a tuple of several.

    Raises:
        NameError: if no axis has that name here.
        RuntimeError: where some examples alone come, in a branch or with a chunk_size.

    Cost: one maximum over the stack of all examples.

    Source: ``jax.lax.pmax``, which has no derivative.

    Example:
        >>> forall.vmap(lambda x: x - pmax(x, "b"), axis_name="b")(torch.tensor([1.0, 3.0]))
        tensor([-2.,  0.])
    """
    return _reduce("pmax", ops.PMAX, x, axis_name, lambda n: n)


@_take_bound_axes
def pmin(x: Any, axis_name: Hashable) -> Any:
    """The smallest value among the examples of an axis, entry by entry: (*S) -> (*S).

    The law: in ``vmap(f, axis_name="b")`` it is ``xs.amin(0)`` of the stack ``xs``. Its derivative
    goes to the smallest; examples that share it get equal parts.

    Args:
        x: a tensor, a number, or a tree of them.
        axis_name: the `vmap` option of that name, or a tuple of several.

    Raises:
        NameError: if no axis has that name here.
        RuntimeError: where some examples alone come, in a branch or with a chunk_size.

    Cost: one minimum over the stack of all examples.

    Source: ``jax.lax.pmin``, which has no derivative.

    Example:
        >>> forall.vmap(lambda x: x - pmin(x, "b"), axis_name="b")(torch.tensor([1.0, 3.0]))
        tensor([0., 2.])
    """
    return _reduce("pmin", ops.PMIN, x, axis_name, lambda n: n)


@_take_bound_axes
def all_gather(x: Any, axis_name: Hashable, dim: int = 0, tiled: bool = False) -> Any:
    """The values of all examples of an axis, for each of them: (*S) -> (N at dim, *S).

    The law: in ``vmap(f, axis_name="b")`` it is the stack ``xs`` itself, with dim 0 for ``dim``.
    Its transpose is `psum_scatter`.

    Args:
        x: a tensor, a number, or a tree of them.
        axis_name: the `vmap` option of that name.
        dim: where the examples go in the result.
        tiled: concatenate along ``dim`` instead: (.., n, ..) -> (.., N * n, ..).

    Raises:
        NameError: if no axis has that name here.
        IndexError: for a ``dim`` that the result does not have.
        RuntimeError: where some examples alone come, in a branch or with a chunk_size.

    Cost: one copy of the stack of all examples, which they share.

    Source: ``jax.lax.all_gather``.

    Example:
        >>> def log_softmax(x, ys):                               # against the others of the batch
        ...     return (x @ all_gather(ys, "b").T).log_softmax(0)[axis_index("b")]
        >>> x = torch.eye(2)
        >>> forall.vmap(log_softmax, axis_name="b")(x, 2 * x)
        tensor([-0.1269, -0.1269])
    """
    axis = _find_one("all_gather", axis_name, x)
    call = f"all_gather(.., {axis_name!r})"

    def gather_leaves(leaves: list) -> list[Tensor]:
        tensors = [*map(_to_tensor, leaves)]
        dims = [_wrap_dim(call, "dim", dim, t, 0 if tiled else 1) for t in tensors]
        gathered = _apply_to_each(ops.ALL_GATHER, tensors, axis, after=1)
        return [_move_front(out, at, tiled) for out, at in zip(gathered, dims, strict=True)]

    return _map_leaves(call, gather_leaves, x)


@_take_bound_axes
def psum_scatter(x: Any, axis_name: Hashable, scatter_dim: int = 0, tiled: bool = False) -> Any:
    """The sum over the examples of an axis, of which example i gets entry i.

    (N at scatter_dim, *S) -> (*S). The law: in ``vmap(f, axis_name="b")`` the results of all
    examples together are ``xs.sum(0)``, with ``scatter_dim`` in front. Its transpose is
    `all_gather`.

    Args:
        x: a tensor, or a tree of them.
        axis_name: the `vmap` option of that name.
        scatter_dim: the dim of ``x`` with an entry for each example.
        tiled: the dim has N equal parts instead, of which example i gets part i:
            (.., N * n, ..) -> (.., n, ..).

    Raises:
        NameError: if no axis has that name here.
        ValueError: if the dim has another size than the axis, or no multiple of it if tiled.
        IndexError: for a ``scatter_dim`` that ``x`` does not have.
        RuntimeError: where some examples alone come, in a branch or with a chunk_size.

    Cost: one sum over the stack of all examples.

    Source: ``jax.lax.psum_scatter``.

    Example:
        >>> xs = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> forall.vmap(lambda x: psum_scatter(x, "b"), axis_name="b")(xs)
        tensor([4., 6.])
    """
    axis = _find_one("psum_scatter", axis_name, x)

    def scatter_leaves(leaves: list) -> list[Tensor]:
        tensors = [*map(_to_tensor, leaves)]
        parts = [
            _split("psum_scatter", "scatter_dim", t, scatter_dim, axis, tiled) for t in tensors
        ]
        return _apply_to_each(ops.PSUM_SCATTER, parts, axis, before=1)

    return _map_leaves(f"psum_scatter(.., {axis_name!r})", scatter_leaves, x)


@_take_bound_axes
def all_to_all(
    x: Any, axis_name: Hashable, split_dim: int = 0, concat_dim: int = 0, tiled: bool = False
) -> Any:
    """Exchange entries: entry i of example j's result is entry j of example i's ``x``.

    The law: in ``vmap(f, axis_name="b")`` it is ``xs.transpose(0, 1)`` of the stack ``xs``, for
    both dims 0. Its transpose is itself, with the dims swapped.

    Args:
        x: a tensor, or a tree of them.
        axis_name: the `vmap` option of that name.
        split_dim: the dim of ``x`` with an entry for each example, which the result lacks.
        concat_dim: where the entries that come from the examples go in the result.
        tiled: ``split_dim`` has N equal parts instead, which are concatenated along ``concat_dim``.

    Raises:
        NameError: if no axis has that name here.
        ValueError: if ``split_dim`` has another size than the axis, or no multiple of it if tiled.
        IndexError: for a dim that ``x`` does not have.
        RuntimeError: where some examples alone come, in a branch or with a chunk_size.

    Cost: one copy of the stack of all examples.

    Source: ``jax.lax.all_to_all``.

    Example:
        >>> xs = torch.tensor([[1, 2], [3, 4]])
        >>> forall.vmap(lambda x: all_to_all(x, "b"), axis_name="b")(xs)
        tensor([[1, 3],
                [2, 4]])
    """
    axis = _find_one("all_to_all", axis_name, x)
    call = f"all_to_all(.., {axis_name!r})"

    def exchange_leaves(leaves: list) -> list[Tensor]:
        tensors = [*map(_to_tensor, leaves)]
        dims = [_wrap_dim(call, "concat_dim", concat_dim, t, 0) for t in tensors]
        parts = [_split("all_to_all", "split_dim", t, split_dim, axis, tiled) for t in tensors]
        exchanged = _apply_to_each(ops.ALL_TO_ALL, parts, axis, before=1, after=1)
        return [_move_front(out, at, tiled) for out, at in zip(exchanged, dims, strict=True)]

    return _map_leaves(call, exchange_leaves, x)


@_take_bound_axes
def ppermute(x: Any, axis_name: Hashable, perm: Sequence[tuple[int, int]]) -> Any:
    """Send values from example to example: (*S) -> (*S).

    The law: for each pair (source, target) of ``perm``, the result of example ``target`` is the
    ``x`` of example ``source``; examples that are no target get zeros. Its transpose sends back.

    Args:
        x: a tensor, a number, or a tree of them.
        axis_name: the `vmap` option of that name.
        perm: pairs of numbers of examples. Each number stands at most once on either side.

    Raises:
        NameError: if no axis has that name here.
        ValueError: for a number that no example has, and for one that stands twice on a side.
        RuntimeError: where some examples alone come, in a branch or with a chunk_size.

    Cost: one copy of the stack of all examples.

    Source: ``jax.lax.ppermute``.

    Example:
        >>> ring = [(0, 1), (1, 2), (2, 0)]
        >>> forall.vmap(lambda x: ppermute(x, "b", ring), axis_name="b")(torch.tensor([1, 2, 3]))
        tensor([3, 1, 2])
    """
    axis = _find_one("ppermute", axis_name, x)
    pairs = _check_perm(perm, axis)
    sources, targets = [s for s, _ in pairs], [t for _, t in pairs]

    def send_leaves(leaves: list) -> list[Tensor]:
        return _apply_to_each(ops.PPERMUTE, [*map(_to_tensor, leaves)], axis, sources, targets)

    return _map_leaves(f"ppermute(.., {axis_name!r})", send_leaves, x)


@_take_bound_axes
def axis_index(axis_name: Hashable) -> Tensor:
    """The number of the example along an axis: a tensor of shape () and dtype int64.

    The law: in ``vmap(f, axis_name="b")`` it is ``torch.arange(N)``, one entry per example. It
    counts over the whole call, also with a chunk_size and where examples have diverged.

    Raises:
        NameError: if no axis has that name here.

    Cost: one small tensor.

    Source: ``jax.lax.axis_index``.

    Example:
        >>> forall.vmap(lambda x: x * axis_index("b"), axis_name="b")(torch.ones(3))
        tensor([0., 1., 2.])
    """
    axis, root = find_axis("axis_index", axis_name)
    level = root.acting_level
    numbers = level.origin.numbers
    with run_outside(root), functions_off():
        if isinstance(numbers, range):
            examples = torch.arange(numbers.start, numbers.stop, device=axis.device)
        elif isinstance(numbers, list):
            examples = make_index(numbers, axis.device)
        else:
            examples = torch.arange(axis.size, device=axis.device)
    return wrap_stack(examples, 0, level)


def axis_size(axis_name: Hashable) -> int:
    """The number of examples that an axis has, over the whole call.

    Args:
        axis_name: the `vmap` option of that name, or a tuple of several: then the product.

    Raises:
        NameError: if no axis has that name here.

    Cost: none, it is a number of Python's.

    Source: ``jax.lax.axis_size``.

    Example:
        >>> forall.vmap(lambda x: x / axis_size("b"), axis_name="b")(torch.ones(4))
        tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """
    size = 1
    for name in axis_name if type(axis_name) is tuple else (axis_name,):
        dim = find_bound_axis(name)
        size *= find_axis("axis_size", name)[0].size if dim is None else dim.size()
    return size


def _move_front(out: Tensor, at: int, tiled: bool) -> Tensor:
    """Return ``out`` with its first dim at ``at``; if tiled, the dim there has all its entries."""
    out = out.movedim(0, at) if at else out
    return out.flatten(at, at + 1) if tiled else out


# --- checks ------------------------------------------------------------------------------------


def _wrap_dim(call: str, what: str, dim: int, t: Tensor, more: int) -> int:
    """Return a dim from the front, of a tensor with ``more`` dims than ``t``."""
    rank = t.dim() + more
    if -rank <= dim < rank:
        return dim % rank
    can = f"Give a dim in [{-rank}, {rank})." if rank else "A tensor of rank 0 has none."
    raise documented_error(IndexError, "collective-argument")(
        f"{call}: {what} is no dim of {'the result' if more else 'x'}.\n"
        f"{format_columns([('x', format_short(t)), (what, str(dim))])}\n{can}"
    )


def _split(verb: str, what: str, t: Tensor, dim: int, axis: Axis, tiled: bool) -> Tensor:
    """Return ``t`` with its parts for the examples in front: (N, *S)."""
    call = f"{verb}(.., {axis.name!r})"
    at = _wrap_dim(call, what, dim, t, 0)
    size, n = t.shape[at], axis.size
    fits = (n and size % n == 0) if tiled else size == n
    if not fits:
        cure = f"size {n}, or say tiled=True for equal parts of several entries."
        rows = [("x", format_short(t), f"{what}={dim}", f"size {size}")]
        rows += [("axis", repr(axis.name), "", f"size {n}")]
        raise documented_error(ValueError, "collective-argument")(
            f"{call}: the dim that is split does not fit the axis.\n"
            f"{format_columns(rows)}\n"
            f"Give it {f'a multiple of {n}: pad it.' if tiled else cure}"
        )
    if tiled:
        t = t.unflatten(at, (n, size // n))
    return t.movedim(at, 0) if at else t


_TWICE = "Use all_gather to send to several.", "Use psum or all_gather to get several."


def _check_perm(perm: Any, axis: Axis) -> list[tuple[int, int]]:
    pairs = [(pair[0], pair[1]) for pair in perm]
    for which, numbers, cure in (
        zip(("source", "target"), zip(*pairs, strict=True), _TWICE, strict=True) if pairs else ()
    ):
        seen = set()
        for n in numbers:
            if type(n) is not int or not 0 <= n < axis.size:
                can = f"Give ints in [0, {axis.size})."
                raise _make_perm_error(axis, f"a {which} is no example", n, can)
            if n in seen:
                raise _make_perm_error(axis, f"a {which} stands twice", n, cure)
            seen.add(n)
    return pairs


def _make_perm_error(axis: Axis, what: str, value: Any, cure: str) -> ValueError:
    rows = [("in perm", repr(value)), ("axis", f"{axis.name!r}, size {axis.size}")]
    return documented_error(ValueError, "collective-argument")(
        f"ppermute(.., {axis.name!r}, perm): in perm, {what}.\n{format_columns(rows)}\n{cure}"
    )
