"""Some of the examples of a level: who runs while examples have parted, and what they work on.

NOTE [parts]
    Where examples part, a `Part` acts in the place of its level, the *root*: a level of its own
    with the rows of some examples, so every rule is as it was. A tensor made for more examples is
    narrowed to those that run where an API call takes it (`narrow`), before autograd sees an
    operator; tensors of parts become one of their union by `merged`. Both are recorded.

    The derivative of `narrow` is the cotangent as it is: of some examples only. It goes on through
    the graph of the wider value, and what its formulas saved there is cut to its examples when they
    meet (`meet`); where two cotangents add up, their examples unite, zero where one has none. So a
    derivative is computed for the examples that want it, and no other's inf or nan gets into it.
    What meets below autograd is thus either a factor, which is cut, or a summand, which is
    completed (`meeting.SUMS`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from forall._batching.batched import Batched, wrap
from forall._batching.interpreter import VmapLevel
from forall._core.levels import deepest, graph_free, lift, outside
from forall._torch.dispatch import (
    apply_function,
    forward_mode_runs,
    functions_off,
    has_tangent,
    is_forward_enabled,
    no_dispatch,
)
from forall._torch.wrapper import Wrapper

if TYPE_CHECKING:
    from collections.abc import Iterator

Tensor = torch.Tensor


class Part(VmapLevel):
    """The examples ``rows`` (numbers in the root, ascending) of a level. See NOTE [parts]."""

    def __init__(self, root: VmapLevel, rows: Tensor) -> None:
        # Never a mode of its own: the root's mode asks who acts.
        self.of = root
        self.rows = rows
        self.size = rows.shape[0]
        self.number, self.around = root.number, root.around
        self.calls, self.settles = root.calls, False
        self.randomness, self.scope, self.ledger = root.randomness, root.scope, root.ledger
        self.records_values = self.peels = False
        self.shares = self.parts = True
        self.outer_grad = root.outer_grad
        self.counted, self.met = None, []
        self.lifted = {}
        self.parted = None
        self._where: Tensor | None = None
        self.places, self.covered = WeakKeyDictionary(), WeakKeyDictionary()

    @property
    def root(self) -> Any:
        return self.of

    @property
    def acting(self) -> Any:
        return self.of.acting

    @property
    def parent(self) -> Any:
        return self.of.parent

    @property
    def active(self) -> bool:
        return self.of.active

    @property
    def notes(self) -> bool:
        return self.of.notes

    @property
    def origin(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        whole = self.of.origin
        numbers = whole.numbers
        return whole._replace(numbers=[numbers[n] for n in self.rows.tolist()])


def part(root: VmapLevel, rows: Tensor) -> VmapLevel:
    """The level of these rows: the root itself for all of them, and one for each set of rows."""
    if rows.shape[0] == root.size:
        return root
    with no_dispatch(), functions_off():
        key = bytes(rows.numpy())
    found = root.made.get(key)
    if found is None:
        found = root.made[key] = Part(root, rows)
    return found


def prepare(root: Any) -> None:
    """Give a level what its parts are found by."""
    if root.rows is None:
        with no_dispatch(), functions_off():
            root.rows = torch.arange(root.size)
        root._where = root.rows
        root.places, root.covered = WeakKeyDictionary(), WeakKeyDictionary()


def where(level: Any) -> Tensor:
    """(root size,): which example of ``level`` a row of the root is, -1 where it is none."""
    found = level._where
    if found is None:
        with no_dispatch(), functions_off():
            found = torch.full((level.root.size,), -1)
            found[level.rows] = torch.arange(level.size)
        level._where = found
    return found


def places_in(some: Any, level: Any) -> Tensor:
    """Which examples of ``level`` those of ``some`` are, -1 where they are none of its."""
    found = some.places.get(level)
    if found is None:
        with no_dispatch(), functions_off():
            found = some.places[level] = where(level)[some.rows]
    return found


def covers(level: Any, some: Any) -> bool:
    """Whether all examples of ``some`` are among those of ``level``."""
    if level is some or level is level.root:
        return True
    found = some.covered.get(level)
    if found is None:
        places = places_in(some, level)
        with no_dispatch(), functions_off():
            found = some.covered[level] = bool((places >= 0).all())
    return found


def union(a: Any, b: Any) -> Any:
    """The part with the examples of both."""
    if covers(a, b):
        return a
    if covers(b, a):
        return b
    with no_dispatch(), functions_off():
        rows = torch.cat([a.rows, b.rows]).unique()
    return part(a.root, rows)


def without(level: Any, some: Any) -> Any | None:
    """The part with the examples of ``level`` that are not in ``some``; None if there are none."""
    with no_dispatch(), functions_off():
        left = torch.ones(level.root.size, dtype=torch.bool)
        left[some.rows] = False
        rows = level.rows[left[level.rows]]
    return part(level.root, rows) if rows.shape[0] else None


def common(a: Any, b: Any) -> Any | None:
    """The part with the examples that are in both; None where there are none."""
    if covers(a, b):
        return b
    if covers(b, a):
        return a
    with no_dispatch(), functions_off():
        rows = a.rows[places_in(a, b) >= 0]
    return part(a.root, rows) if rows.shape[0] else None


# --- values, below autograd ----------------------------------------------------------------------


def is_of(t: Any, root: Any) -> bool:
    return type(t) is Batched and t.level.root is root


def cut(b: Batched, some: Any) -> Batched:
    """The examples of ``some``, out of a value of a level that covers it."""
    value, axis = b.value, b.axis
    if axis is not None:
        value = value.index_select(axis, places_in(some, b.level).to(value.device))
    else:
        value = graph_free(value)
    return wrap(value, axis, some)


def _stack(t: Tensor, level: Any) -> Tensor:
    """(n, *S): a value of the part ``level``, or one from outside that is the same for all."""
    value, axis = (t.value, t.axis) if type(t) is Batched and t.level is level else (t, None)
    if axis is None:
        return value.unsqueeze(0).expand(level.size, *value.shape)
    return value.movedim(axis, 0)


def united(parts: list[tuple[Any, Tensor]], level: Any) -> Batched:
    """Values of parts as one of ``level``; zero for who is in none."""
    together = torch.cat([_stack(t, p) for p, t in parts])
    order = torch.cat([places_in(p, level) for p, _ in parts])
    if together.shape[0] == level.size:
        return wrap(together.index_select(0, order.argsort().to(together.device)), 0, level)
    out = together.new_zeros((level.size, *together.shape[1:]))
    return wrap(out.index_copy(0, order.to(together.device), together), 0, level)


# --- narrow --------------------------------------------------------------------------------------


def _is_recorded(t: Any) -> bool:
    """Whether autograd, or a forward mode that is on, must see what becomes of this tensor."""
    return (t.requires_grad and torch.is_grad_enabled()) or (
        forward_mode_runs() and is_forward_enabled() and has_tangent(t)
    )


def is_stale(t: Any) -> bool:
    """Whether a tensor belongs to more, or other, examples than those that run."""
    while isinstance(t, Wrapper):
        level = t.level
        if level.acting is not level and level.active:
            return True
        t = t.value
    return False


def is_partial(t: Any) -> bool:
    """Whether a tensor has values of some of the examples that run, and of no others."""
    return any(not covers(b.level, b.level.acting) for b in _layers(t) if type(b) is Batched)


def narrow(t: Tensor) -> Tensor:
    """A tensor for the examples that run, recorded on every level that it is a value of."""
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
        with outside(level):
            made = cut(t, some)
            if is_stale(made.value):
                made = wrap(_narrow(made.value), made.axis, some)
    if made is t or not _is_recorded(t):
        return made
    return apply_function(Narrow, t, [made], [b.level.acting for b in _layers(t)])


def _layers(t: Any) -> Iterator[Any]:
    while isinstance(t, Wrapper):
        yield t
        t = t.value


class Narrow(torch.autograd.Function):
    """A value of more examples, for those of these levels."""

    @staticmethod
    def forward(t, made, levels):
        return made[0]

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, _, ctx.levels = inputs

    @staticmethod
    def backward(ctx, g):
        # Of some examples only, see NOTE [parts]; and of no others, whom a sum may have brought in.
        return _of_all(g, ctx.levels), None, None

    @staticmethod
    def jvp(ctx, t, *_):
        return None if t is None else _of_all(t, ctx.levels)


def _of_all(t: Tensor, levels: list) -> Tensor | None:
    """What a value has of the examples of each of these levels' roots."""
    for level in levels:
        found = restricted(t, level)
        if found is None:
            return None
        t = found
    return t


class Undefined(BaseException):
    """A value is used by examples for which it was never computed."""

    def __init__(self, t: Any, level: Any) -> None:
        super().__init__(
            f"vmap: a value of {t.level.size} examples is used by {level.size}, not all of which "
            "computed it."
        )


# --- merge ---------------------------------------------------------------------------------------


def merged(parts: list[tuple[Any, Tensor]], level: Any) -> Tensor:
    """Values of parts that share no example, as one of ``level``; zero for who is in none."""
    with functions_off():
        return _merged(parts, level)


def _merged(parts: list[tuple[Any, Tensor]], level: Any) -> Tensor:
    inner = deepest(tuple(t for _, t in parts))
    if inner is None or inner.root is level.root or inner.is_outside(level):
        parts = [(p, lift(t, p)) for p, t in parts]
        with outside(level):
            made = united(parts, level)
    else:  # of a level inside: there each is a value of it, over the parts
        parts = [(p, lift(t, inner)) for p, t in parts]
        tensors = [t for _, t in parts]
        levels = [p for p, _ in parts]
        made = inner.under(tensors, lambda *v: _merged([*zip(levels, v, strict=True)], level))
    if not any(_is_recorded(t) for _, t in parts):
        return made
    return apply_function(Merge, [made], level, [p for p, _ in parts], *(t for _, t in parts))


class Merge(torch.autograd.Function):
    """Values of parts, as one of their union."""

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
    """A gradient of some of a root's examples as one of ``level``: theirs, zero for the others."""
    if _own(t, level) in (None, level):
        return t
    found = restricted(t, level)
    if found is None:
        return torch.zeros_like(t)  # of values that are nobody's
    own = _own(found, level)
    return found if own is level else merged([(own, found)], level)


def _own(t: Any, level: Any) -> Any:
    """Of which of a root's examples a value is; None if it is of no root like ``level``'s."""
    return next((b.level for b in _layers(t) if is_of(b, level.root)), None)


def restricted(t: Tensor, some: Any) -> Tensor | None:
    """What a value has of the examples of ``some``; None if it has none of them."""
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
        if inner is None or inner is t.value:
            return None if inner is None else t
        made = t.level.under([t], lambda value: _restricted(value, some))
    return apply_function(Narrow, t, [made], [some]) if _is_recorded(t) else made


def _has(t: Any, root: Any) -> bool:
    while isinstance(t, Wrapper):
        if is_of(t, root):
            return True
        t = t.value
    return False
