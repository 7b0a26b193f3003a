"""Values of sub-levels: restricted to the examples that run, and merged, seen by autograd.

See NOTE [parts].
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._compat.devices import on_device
from forall._compat.dispatch_state import (
    apply_function,
    forward_mode_runs,
    functions_off,
    has_tangent,
    is_forward_enabled,
    no_dispatch,
)
from forall._compat.wrapper_tensor import Wrapper
from forall._core.levels import deepest, graph_free, lift, outside
from forall._vmap.active_set.sub_level import (
    common,
    covers,
    places_in,
    union,
)
from forall._vmap.batched_tensor import Batched, wrap

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Tensor = torch.Tensor


# --- values, below autograd ----------------------------------------------------------------------


def is_of(t: Any, root: Any) -> bool:
    return isinstance(t, Batched) and t.level.root is root


def cut(b: Batched, some: Any) -> Batched:
    """Select the examples of ``some`` out of a value of a level that covers it."""
    value, axis = b.value, b.axis
    if axis is None:
        return wrap(graph_free(value), None, some)
    places = on_device(places_in(some, b.level), value.device)
    if isinstance(value, Wrapper):
        return wrap(value.index_select(axis, places), axis, some)
    with no_dispatch():
        return wrap(value.index_select(axis, places), axis, some)


def _stack(t: Tensor, level: Any) -> Tensor:
    """(n, *S): a value of the sub-level ``level``, or one from outside that is the same for all."""
    value, axis = (t.value, t.axis) if type(t) is Batched and t.level is level else (t, None)
    if axis is None:
        return value.unsqueeze(0).expand(level.size, *value.shape)
    return value.movedim(axis, 0) if axis else value


def united(parts: list[tuple[Any, Tensor]], level: Any) -> Batched:
    """Unite values of sub-levels into one of ``level``, zero for the examples of none."""
    if not parts:
        raise Undefined(level, level)
    return in_place_of([p for p, _ in parts], torch.cat([_stack(t, p) for p, t in parts]), level)


def in_place_of(parts: list, together: Tensor, level: Any) -> Batched:
    """Put the values of sub-levels, laid one after another, into one value of ``level``."""
    order = on_device(_order(parts, level), together.device)
    if together.shape[0] == level.size:
        return wrap(together.index_select(0, order), 0, level)
    out = together.new_zeros((level.size, *together.shape[1:]))
    return wrap(out.index_copy(0, order, together), 0, level)


def two_united(parts: list[tuple[Any, Tensor]], level: Any) -> Batched:
    """Unite the values of two sub-levels that make up ``level``; both are plain and alike."""
    (p, a), (q, b) = [(p, _stack(t, p)) for p, t in parts]
    out = a.new_empty((level.size, *a.shape[1:]))
    for some, values in ((p, a), (q, b)):
        out.index_copy_(0, on_device(places_in(some, level), out.device), values)
    return wrap(out, 0, level)


def _order(parts: list, level: Any) -> Tensor:
    """The positions in ``level`` of the examples of sub-levels, one sub-level after another.

    If the sub-levels have all of its examples, the inverse: the positions of its examples in
    theirs.
    """
    keys = [p.members for p in parts]
    if level.order is None or level.order[0] != keys:
        with no_dispatch(), functions_off():
            order = torch.cat([places_in(p, level) for p in parts])
            if order.shape[0] == level.size:
                order = torch.empty_like(order).index_copy_(0, order, torch.arange(level.size))
            level.order = keys, order
    return level.order[1]


# --- narrow --------------------------------------------------------------------------------------


def _is_recorded(t: Any) -> bool:
    """True if autograd, or a forward mode that is on, must see what becomes of this tensor."""
    return (t.requires_grad and torch.is_grad_enabled()) or (
        forward_mode_runs() and is_forward_enabled() and has_tangent(t)
    )


def is_stale(t: Any) -> bool:
    """True if a tensor belongs to more, or other, examples than those that run."""
    while isinstance(t, Wrapper):
        level = t.level
        if level.acting is not level and level.active:
            return True
        t = t.value
    return False


def is_partial(t: Any) -> bool:
    """True if a tensor has values of some of the examples that run, and of no others."""
    return any(not covers(b.level, b.level.acting) for b in layers(t) if type(b) is Batched)


def stale(t: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield root, own level and acting level for each level of a tensor that does not act now."""
    for b in layers(t):
        level = b.level
        if level.acting is not level and level.active:
            yield level.root, level, level.acting


def is_second_name(t: Any) -> bool:
    """True if restricting makes no copy: the memory is older than the call and shared by all."""
    return all(
        b.axis is None and b.older
        for b in layers(t)
        if b.level.acting is not b.level and b.level.active
    )


def narrow(t: Tensor) -> Tensor:
    """Restrict a tensor to the examples that run, recorded on every level that it is a value of."""
    with functions_off():
        return _narrow(t)


def _narrow(t: Any) -> Tensor:
    level = t.level
    if level.acting is level or not level.active:
        made = level.under([t], _narrow) if is_stale(t.value) else t
    else:
        some = level.acting
        if not covers(level, some):
            raise Undefined(t, some)
        if t.axis is not None and type(t.value) is Tensor:
            made = cut(t, some)
        else:
            with outside(level):
                made = _some_of(t, some)
    if made is t or not _is_recorded(t):
        return made
    return apply_function(Narrow, t, [made], [b.level.acting for b in layers(t)])


def _some_of(t: Any, some: Any) -> Batched:
    made = cut(t, some)
    if t.axis is None:
        if t.older:
            made.older, made.came = True, t.came
        else:  # these examples may write into it
            made.value = made.value.clone()
    if is_stale(made.value):
        made.value = _narrow(made.value)
    return made


def layers(t: Any) -> Iterator[Any]:
    while isinstance(t, Wrapper):
        yield t
        t = t.value


class Narrow(torch.autograd.Function):
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
            g = for_those(g, level)
        return g, None, None  # of some examples only, see NOTE [parts]

    @staticmethod
    def jvp(ctx, t, *_):
        if t is None:
            return None
        own = any(_is_copied(t, level) for level in ctx.levels)
        for level in ctx.levels:
            some = restricted(t, level)
            t = nothing(t, level) if some is None else some
        return t if own else t.clone()  # these examples may write into it


def _is_copied(t: Any, some: Any) -> bool:
    """True if `restricted` returns a copy, also where a tape runs on other values."""
    if not isinstance(t, Wrapper) or not t.level.ends:
        return False
    return any(b.axis is not None and b.level is not some for b in layers(t) if is_of(b, some.root))


class Undefined(BaseException):
    """A value is used by examples for which it was never computed."""

    def __init__(self, t: Any, level: Any) -> None:
        super().__init__(
            f"vmap: a value of {t.level.size} examples is used by {level.size}, not all of which "
            "computed it."
        )


# --- merge ---------------------------------------------------------------------------------------


def merged(parts: list[tuple[Any, Tensor]], level: Any) -> Tensor:
    """Merge values of disjoint sub-levels into one of ``level``, zero for the other examples."""
    with functions_off():
        return _merged(parts, level)


def _merged(parts: list[tuple[Any, Tensor]], level: Any) -> Tensor:
    inner = deepest(tuple(t for _, t in parts))
    if inner is None or inner.root is level.root or inner.is_outside(level):
        parts = [(p, lift(t, p)) for p, t in parts]
        with outside(level):
            made = united(parts, level)
    else:  # values of a level inside, each over one of the sub-levels
        parts = [(p, lift(t, inner)) for p, t in parts]
        tensors = [t for _, t in parts]
        levels = [p for p, _ in parts]
        made = inner.under(tensors, lambda *v: _merged([*zip(levels, v, strict=True)], level))
    if not any(_is_recorded(t) for _, t in parts):
        return made
    return apply_function(Merge, [made], level, [p for p, _ in parts], *(t for _, t in parts))


class Merge(torch.autograd.Function):
    """The autograd node that merges values of sub-levels into one of their union."""

    @staticmethod
    def forward(made, level, levels, *tensors):
        return made[0]

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.level, ctx.levels, *_ = inputs

    @staticmethod
    def backward(ctx, g):
        return None, None, None, *(restricted(g, level) for level in ctx.levels)

    @staticmethod
    def jvp(ctx, _made, _level, _levels, *tangents):
        given = [(p, t) for p, t in zip(ctx.levels, tangents, strict=True) if t is not None]
        return merged(given, ctx.level) if given else None


def fitted(t: Any, level: Any) -> Any:
    """A gradient of some of a root's examples as one of ``level``, zero for its other examples."""
    if examples_in(t, level) in (None, level):
        return t
    found = restricted(t, level)
    if found is None:
        return torch.zeros_like(t)  # of values that no example of the level has
    own = examples_in(found, level)
    return found if own is level else merged([(own, found)], level)


def examples_in(t: Any, level: Any) -> Any:
    """The level of a value that has the root of ``level``; None if there is none."""
    return next((b.level for b in layers(t) if is_of(b, level.root)), None)


def restricted(t: Tensor, some: Any) -> Tensor | None:
    """Restrict a value to the examples of ``some`` that it has; None if it has none of them."""
    with functions_off():
        return _restricted(t, some)


def _restricted(t: Any, some: Any) -> Any:
    if not isinstance(t, Wrapper):
        return t
    if is_of(t, some.root):
        both = common(t.level, some)
        if both is None or both is t.level:
            return None if both is None else t
        with outside(some):
            made = cut(t, both)
    else:
        inner = _restricted(t.value, some) if _has(t.value, some.root) else t.value
        if inner is None or (inner is t.value and t.level.ends):  # a tape runs on other values
            return None if inner is None else t
        made = t.level.under([t], lambda value: _restricted(value, some))
    return apply_function(Narrow, t, [made], [some]) if _is_recorded(t) else made


def for_those(t: Any, some: Any) -> Any:
    """Restrict a gradient to ``some``; user code may make one of no level, which is lifted."""
    if t is None:
        return None
    if some is not some.root and examples_in(t, some) is None:
        return lift(t, some)
    return restricted(t, some)


def for_those_asked(given: Iterable[Any], found: Any) -> Any:
    """Restrict gradients made by user code to the examples of those that it was given."""
    asked: dict[Any, Any] = {}
    for b in (b for g in given for b in layers(g) if type(b) is Batched):
        root = b.level.root
        asked[root] = union(asked[root], b.level) if root in asked else b.level
    for some in asked.values():
        if some is not some.root:
            with functions_off():
                found = (
                    tuple(for_those(t, some) for t in found)
                    if isinstance(found, tuple)
                    else for_those(found, some)
                )
    return found


def nothing(t: Any, some: Any) -> Any:
    """Zeros like ``t`` for examples of which it has none."""
    if is_of(t, some.root):
        with functions_off(), outside(some):
            return wrap(t.value.new_zeros(t.shape), None, some)
    return t.level.under([t], lambda value: nothing(value, some))


def _has(t: Any, root: Any) -> bool:
    while isinstance(t, Wrapper):
        if is_of(t, root):
            return True
        t = t.value
    return False
