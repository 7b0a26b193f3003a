"""Values of sub-levels: restricted to the examples that run, and merged, seen by autograd.

See NOTE [parts].
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._compat.devices import copy_index_to
from forall._compat.dispatch_state import (
    apply_own_function,
    functions_off,
    has_tangent,
    is_forward_enabled,
    is_forward_mode_on,
    no_dispatch,
)
from forall._compat.wrapper_tensor import Wrapper
from forall._core.axes import move_axis_to_front
from forall._core.levels import find_innermost_of, graph_free, lift, run_outside
from forall._core.sparse_operands import expand_examples, is_sparse
from forall._vmap.active_set.sub_level import (
    SubLevel,
    covers_examples,
    intersect_examples,
    unite_examples,
)
from forall._vmap.batched_tensor import BatchedTensor, wrap_stack

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Tensor = torch.Tensor


# --- values, below autograd ----------------------------------------------------------------------


def is_value_of_root(t: Any, root: Any) -> bool:
    return isinstance(t, BatchedTensor) and t.level.root is root


def select_examples(b: BatchedTensor, some: Any) -> BatchedTensor:
    """Select the examples of ``some`` out of a value of a level that covers it."""
    value, axis = b.value, b.axis
    if axis is None:
        return wrap_stack(graph_free(value), None, some)
    places = copy_index_to(some.examples.find_positions_in(b.level.examples), value.device)
    if isinstance(value, Wrapper):
        return wrap_stack(value.index_select(axis, places), axis, some)
    with no_dispatch():
        return wrap_stack(value.index_select(axis, places), axis, some)


def _expand_to_stack(t: Tensor, level: Any) -> Tensor:
    """(n, *S): a value of the sub-level ``level``, or one from outside that is the same for all."""
    value, axis = (t.value, t.axis) if type(t) is BatchedTensor and t.level is level else (t, None)
    if axis is None:
        return expand_examples(value, level.size)
    return move_axis_to_front(value, axis)


def unite_parts(parts: list[tuple[Any, Tensor]], level: Any) -> BatchedTensor:
    """Unite values of sub-levels into one of ``level``, zero for the examples of none."""
    if not parts:
        raise UndefinedForExamples(level, level)
    return scatter_parts(
        [p for p, _ in parts], torch.cat([_expand_to_stack(t, p) for p, t in parts]), level
    )


def scatter_parts(parts: list, together: Tensor, level: Any) -> BatchedTensor:
    """Put the values of sub-levels, laid one after another, into one value of ``level``."""
    order = copy_index_to(_get_part_order(parts, level), together.device)
    if together.shape[0] == level.size:
        return wrap_stack(together.index_select(0, order), 0, level)
    if is_sparse(together):  # which index_copy does not take
        blank = together.new_zeros((1, *together.shape[1:]))
        places = torch.full((level.size,), len(together), device=order.device)
        places = places.index_copy(0, order, torch.arange(len(together), device=order.device))
        return wrap_stack(torch.cat([together, blank]).index_select(0, places), 0, level)
    out = together.new_zeros((level.size, *together.shape[1:]))
    return wrap_stack(out.index_copy(0, order, together), 0, level)


def unite_two_parts(parts: list[tuple[Any, Tensor]], level: Any) -> BatchedTensor:
    """Unite the values of two sub-levels that make up ``level``; both are plain, dense, alike."""
    (p, a), (q, b) = [(p, _expand_to_stack(t, p)) for p, t in parts]
    out, whole = a.new_empty((level.size, *a.shape[1:])), level.examples
    for some, values in ((p, a), (q, b)):
        places = some.examples.find_positions_in(whole)
        out.index_copy_(0, copy_index_to(places, out.device), values)
    return wrap_stack(out, 0, level)


def _get_part_order(parts: list, level: Any) -> Tensor:
    """The positions in ``level`` of the examples of sub-levels, one sub-level after another.

    If the sub-levels have all of its examples, the inverse: the positions of its examples in
    theirs.
    """
    whole = level.examples
    keys = [p.examples.members for p in parts]
    if whole.part_order is None or whole.part_order[0] != keys:
        with no_dispatch(), functions_off():
            order = torch.cat([p.examples.find_positions_in(whole) for p in parts])
            if order.shape[0] == level.size:
                order = torch.empty_like(order).index_copy_(0, order, torch.arange(level.size))
            whole.part_order = keys, order
    return whole.part_order[1]


# --- narrow --------------------------------------------------------------------------------------


def _is_recorded(t: Any) -> bool:
    """True if autograd, or a forward mode that is on, must see what becomes of this tensor."""
    return (t.requires_grad and torch.is_grad_enabled()) or (
        is_forward_mode_on() and is_forward_enabled() and has_tangent(t)
    )


def is_stale(t: Any) -> bool:
    """True if a tensor belongs to more, or other, examples than those that run."""
    while isinstance(t, Wrapper):
        level = t.level
        if level.acting_level is not level and level.active:
            return True
        t = t.value
    return False


def has_only_some_examples(t: Any) -> bool:
    """True if a tensor has values of some of the examples that run, and of no others."""
    return any(
        not covers_examples(b.level, b.level.acting_level)
        for b in iter_layers(t)
        if type(b) is BatchedTensor
    )


def iter_stale_levels(t: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield root, own level and acting level for each level of a tensor that does not act now."""
    for b in iter_layers(t):
        level = b.level
        if level.acting_level is not level and level.active:
            yield level.root, level, level.acting_level


def is_restricted_by_alias(t: Any) -> bool:
    """True if restricting makes no copy: the memory is older than the call and shared by all."""
    return all(
        b.axis is None and b.is_external
        for b in iter_layers(t)
        if b.level.acting_level is not b.level and b.level.active
    )


def restrict_to_running(t: Tensor) -> Tensor:
    """Restrict a tensor to the examples that run, recorded on every level that it is a value of."""
    with functions_off():
        return _restrict_to_running(t)


def _restrict_to_running(t: Any) -> Tensor:
    level = t.level
    if level.acting_level is level or not level.active:
        made = level.apply_to_inner([t], _restrict_to_running) if is_stale(t.value) else t
    else:
        some = level.acting_level
        if not covers_examples(level, some):
            raise UndefinedForExamples(t, some)
        if t.axis is not None and type(t.value) is Tensor:
            made = select_examples(t, some)
        else:
            with run_outside(level):
                made = _restrict_value(t, some)
    if made is t or not _is_recorded(t):
        return made
    return apply_own_function(
        RestrictExamples, t, [made], [b.level.acting_level for b in iter_layers(t)]
    )


def _restrict_value(t: Any, some: Any) -> BatchedTensor:
    made = select_examples(t, some)
    if t.axis is None:
        if t.is_external:
            made.is_external, made.source_version = True, t.source_version
        else:  # these examples may write into it
            made.value = made.value.clone()
    if is_stale(made.value):
        made.value = _restrict_to_running(made.value)
    return made


def iter_layers(t: Any) -> Iterator[Any]:
    while isinstance(t, Wrapper):
        yield t
        t = t.value


class RestrictExamples(torch.autograd.Function):
    """The autograd node that restricts a value to the examples of these levels."""

    @staticmethod
    def forward(t, made, levels):
        return made[0]

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, _, ctx.levels = inputs

    @staticmethod
    def backward(ctx, g):
        for level in ctx.levels:
            g = restrict_gradient(g, level)
        return g, None, None  # of some examples only, see NOTE [parts]

    @staticmethod
    def jvp(ctx, t, *_):
        if t is None:
            return None
        own = any(_is_restriction_copy(t, level) for level in ctx.levels)
        for level in ctx.levels:
            some = restrict_to_level(t, level)
            t = make_zeros_for(t, level) if some is None else some
        return t if own else t.clone()  # these examples may write into it


def _is_restriction_copy(t: Any, some: Any) -> bool:
    """True if `restrict_to_level` returns a copy, also where a tape runs on other values."""
    if not isinstance(t, Wrapper) or not t.level.ends:
        return False
    return any(
        b.axis is not None and b.level is not some
        for b in iter_layers(t)
        if is_value_of_root(b, some.root)
    )


class UndefinedForExamples(BaseException):
    """A value is used by examples for which it was never computed."""

    def __init__(self, t: Any, level: Any) -> None:
        super().__init__(
            f"vmap: a value of {t.level.size} examples is used by {level.size}, not all of which "
            "computed it."
        )


# --- merge ---------------------------------------------------------------------------------------


def merge_parts(parts: list[tuple[Any, Tensor]], level: Any) -> Tensor:
    """Merge values of disjoint sub-levels into one of ``level``, zero for the other examples."""
    with functions_off():
        return _merge_parts(parts, level)


def _merge_parts(parts: list[tuple[Any, Tensor]], level: Any) -> Tensor:
    inner = find_innermost_of(tuple(t for _, t in parts))
    if inner is None or inner.root is level.root or inner.is_outside(level):
        parts = [(p, _lift_to_part(t, p)) for p, t in parts]
        with run_outside(level):
            made = unite_parts(parts, level)
    else:  # values of a level inside, each over one of the sub-levels
        parts = [(p, lift(t, inner)) for p, t in parts]
        tensors = [t for _, t in parts]
        levels = [p for p, _ in parts]
        made = inner.apply_to_inner(
            tensors, lambda *v: _merge_parts([*zip(levels, v, strict=True)], level)
        )
    if not any(_is_recorded(t) for _, t in parts):
        return made
    return apply_own_function(
        MergeExamples, [made], level, [p for p, _ in parts], *(t for _, t in parts)
    )


def _lift_to_part(t: Tensor, part: Any) -> Any:
    """Return a value of ``part``, also where a tangent program runs on a value of more examples."""
    lifted = lift(t, part)
    return lifted if lifted.level is part else _restrict_to_level(lifted, part)


class MergeExamples(torch.autograd.Function):
    """The autograd node that merges values of sub-levels into one of their union."""

    @staticmethod
    def forward(made, level, levels, *tensors):
        return made[0]

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.level, ctx.levels, *_ = inputs

    @staticmethod
    def backward(ctx, g):
        return None, None, None, *(restrict_to_level(g, level) for level in ctx.levels)

    @staticmethod
    def jvp(ctx, _made, _level, _levels, *tangents):
        given = [(p, t) for p, t in zip(ctx.levels, tangents, strict=True) if t is not None]
        return merge_parts(given, ctx.level) if given else None


def fit_gradient(t: Any, level: Any) -> Any:
    """A gradient of some of a root's examples as one of ``level``, zero for its other examples."""
    if find_level_of_root(t, level) in (None, level):
        return t
    found = restrict_to_level(t, level)
    if found is None:
        return torch.zeros_like(t)  # of values that no example of the level has
    own = find_level_of_root(found, level)
    return found if own is level else merge_parts([(own, found)], level)


def find_level_of_root(t: Any, level: Any) -> Any:
    """The level of a value that has the root of ``level``; None if there is none."""
    return next((b.level for b in iter_layers(t) if is_value_of_root(b, level.root)), None)


def restrict_to_level(t: Tensor, some: Any) -> Tensor | None:
    """Restrict a value to the examples of ``some`` that it has; None if it has none of them."""
    with functions_off():
        return _restrict_to_level(t, some)


def _restrict_to_level(t: Any, some: Any) -> Any:
    if not isinstance(t, Wrapper):
        return t
    if is_value_of_root(t, some.root):
        both = intersect_examples(t.level, some)
        if both is None or both is t.level:
            return None if both is None else t
        with run_outside(some):
            made = select_examples(t, both)
    else:
        inner = _restrict_to_level(t.value, some) if _has_root(t.value, some.root) else t.value
        if inner is None or (inner is t.value and t.level.ends):  # a tape runs on other values
            return None if inner is None else t
        made = t.level.apply_to_inner([t], lambda value: _restrict_to_level(value, some))
    return apply_own_function(RestrictExamples, t, [made], [some]) if _is_recorded(t) else made


def restrict_gradient(t: Any, some: Any) -> Any:
    """Restrict a gradient to ``some``; user code may make one of no level, which is lifted."""
    if t is None:
        return None
    if some is not some.root and find_level_of_root(t, some) is None:
        return lift(t, some)
    return restrict_to_level(t, some)


def restrict_users_gradients(given: Iterable[Any], found: Any) -> Any:
    """Restrict gradients made by user code to the examples of those that it was given."""
    asked: dict[Any, Any] = {}
    for b in (b for g in given for b in iter_layers(g) if type(b) is BatchedTensor):
        root = b.level.root
        asked[root] = unite_examples(asked[root], b.level) if root in asked else b.level
    for some in asked.values():
        if some is not some.root:
            with functions_off():
                found = (
                    tuple(restrict_gradient(t, some) for t in found)
                    if isinstance(found, tuple)
                    else restrict_gradient(found, some)
                )
    return found


def make_zeros_for(t: Any, some: Any) -> Any:
    """Zeros like ``t`` for examples of which it has none."""
    if is_value_of_root(t, some.root):
        with functions_off(), run_outside(some):
            return wrap_stack(t.value.new_zeros(t.shape), None, some)
    return t.level.apply_to_inner([t], lambda value: make_zeros_for(value, some))


def _has_root(t: Any, root: Any) -> bool:
    while isinstance(t, Wrapper):
        if is_value_of_root(t, root):
            return True
        t = t.value
    return False


def _restrict_from_root(level: SubLevel, tensor: Tensor) -> Tensor:
    """Restrict a value of the root, which has all examples, to those of a sub-level."""
    found = restrict_to_level(tensor, level)
    assert found is not None  # noqa: S101 - it is one of all examples
    return found


SubLevel.restrict_value = _restrict_from_root
