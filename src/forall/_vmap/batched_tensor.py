"""`Batched`: a tensor that shows one example and holds the stack; and alias families.

NOTE [alias families]
    Every tensor born under a level, and the views of it, form a family with one base. Each view
    knows the calls that lead to it from the base. When per-example data is written into a family
    whose base is the same for all examples, the base gets an axis (`promote`) and every living
    view is derived again. Reads pay nothing: `value` and `axis` are plain attributes.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from forall._compat import pytree
from forall._compat.dispatch_state import functions_off, no_dispatch
from forall._compat.jagged_layout import Jagged
from forall._compat.lazy_bits import put_lazy_bits
from forall._compat.tensor_subclass import (
    called_by_class,
    has_posed_class,
    has_users_class,
    posing,
    taken_out,
)
from forall._compat.wrapper_tensor import (
    ENTRYWISE,
    READS,
    Wrapper,
    look_like,
    wrapper_of,
)
from forall._compat.wrapper_tensor import strides as strides_of
from forall._core import nested_tensor
from forall._core.divergence import Apart
from forall._core.errors import columns, escaped, marks, no_memory, short
from forall._core.escaped_values import (
    called,
    dispatched,
    is_over,
    left_over,
    what_is_left,
)
from forall._core.host_reads import numbers_told, shown
from forall._core.levels import Level, outside
from forall._core.version_counter import Count

if TYPE_CHECKING:
    from collections.abc import Callable

    ViewCall = Callable[[torch.Tensor, int | None], tuple[torch.Tensor, int | None]]


class Family:
    """One base value and the living tensors that are views of it. See NOTE [alias families]."""

    __slots__ = (
        "__weakref__",
        "axis",
        "left",
        "members",
        "names",
        "of_rows",
        "older",
        "prune_at",
        "stands",
        "times",
        "value",
    )

    def __init__(self, value: torch.Tensor, axis: int | None, older: bool) -> None:
        self.value = value
        self.axis = axis
        self.older = older
        self.of_rows = False  # holds rows of a tensor of more examples
        self.stands: Any = None  # `standing.Standing`, where the loop has a view and we a copy
        self.names: Any = None  # its other names in the loop, see `_divergence.aliases`
        self.times = 0  # how often it was written into
        self.left: Count | None = None  # version of the result that a call made of it
        self.members: list[weakref.ref[Batched]] = []
        self.prune_at = 64

    def add(self, member: Batched) -> None:
        members = self.members
        members.append(weakref.ref(member))
        if len(members) > self.prune_at:
            self.members = [m for m in members if m() is not None]
            self.prune_at = 2 * len(self.members) + 64

    def rebase(self, value: torch.Tensor, axis: int | None) -> None:
        """Put another base in place and derive every living view from it again."""
        self.value, self.axis = value, axis
        for reference in self.members:
            member = reference()
            if member is not None:
                v, a = value, axis
                for call in member.chain:
                    v, a = call(v, a)
                member.value, member.axis = v, a


class Batched(Wrapper):
    """All examples of a tensor under one vmap level, shown as one example.

    ``value`` is the stack and ``axis`` its batch axis; ``axis`` None means that ``value`` is the
    same for every example. ``older`` is True for a tensor from before the call.
    """

    value: torch.Tensor
    axis: int | None
    family: Family | None = None
    chain: tuple[ViewCall, ...] = ()
    older: bool = False
    came: Count | None = None  # version of the tensor from outside that this is or views

    def graph_free(self) -> Batched:
        if self.family is None and self.older:
            twin = named(self.value, self.axis, self.level)
            twin.older, twin.came = True, self.came
            return twin
        return derive(self, self.value, self.axis, same)

    def alone(self, gaps: bool = False) -> bool:
        """Lay the examples out one after another if an inner batch axis leaves gaps in them.

        Return True if the layout changed. A tensor from before the call keeps its gaps, which it
        has in the loop as well.
        """
        below = isinstance(self.value, Wrapper)
        if not below and (self.older or not (gaps or are_apart(self))):
            return False  # the common case, at each call of the user's that is a view
        with outside(self.level), functions_off():
            moved = below and self.value.alone(gaps)
            if not self.older and (gaps or are_apart(self)):
                line_up(self)
                return True
            if moved:
                _look_like_values(self)
        return moved

    @property
    def data(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """``x.data``, made of the data of the value below, which may have a tangent."""
        if not isinstance(self.value, Wrapper):
            return torch.Tensor.data.__get__(self)
        with outside(self.level), functions_off():
            return derive(self, *data_of(self.value, self.axis), data_of)

    @data.setter
    def data(self, new: torch.Tensor) -> None:
        torch.Tensor.data.__set__(self, new)

    def describe(self) -> str:
        level = self.level
        examples = "one for each of" if self.axis is not None else "the same for all"
        facts = f"{short(self)}, {examples} {level.size} examples"
        if self.axis:
            facts += f" (axis {self.axis})"
        return f"Batched({facts}{marks(self)}:\n{shown(self.value)})"

    def memory(self, name: str, args: tuple, kwargs: dict) -> Any:
        rest = what_is_left(self)
        if rest is not self:
            return getattr(rest, name)(*args, **kwargs)
        if self.axis is not None:
            if is_over(self.level):
                raise escaped(f"x.{name}()", self, self.level.origin)
            if name not in READS:
                raise no_memory(name, self, self.level.size)
        if name in READS:
            self.refuse_history(name)
        numbers_told()
        if self.older and self.level.notes:
            self.level.ledger.reads(f"x.{name}()", self)
        if name not in READS:
            with no_dispatch(), functions_off():
                return getattr(self.value, name)(*args, **kwargs)
        value = self.level.one_answer(self, lambda: no_memory(name, self, self.level.size))
        with no_dispatch(), functions_off():
            if self.axis is None or name == "tolist":
                return getattr(value, name)(*args, **kwargs)
            array = getattr(value.clone(), name)(*args, **kwargs)
        array.flags.writeable = False  # one example's array for a group: a write would be lost
        return array

    # Rules answer these; a method of the class would pass them by.
    apply_, map_, map2_ = (getattr(torch.Tensor, name) for name in ENTRYWISE)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        # Reached only where the level's function mode is not: in a backward pass, a hook or a
        # recomputation after the level has ended. The innermost value's level shares for itself.
        if not all(issubclass(t, torch.Tensor) for t in types):
            return NotImplemented
        if has_users_class(types):
            return called_by_class(func, types, args, kwargs or {})
        if getattr(func, "__name__", "") in ENTRYWISE:
            raise escaped(f"x.{func.__name__}()", args[0], args[0].level.origin)
        return called(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if Jagged in types:
            return nested_tensor.answer(func, args)
        if posing.used and has_posed_class(types):
            return taken_out(None, func, args, kwargs or {})
        return dispatched(func, args, kwargs or {})


def is_mapped_at_any(t: Any) -> bool:
    """True if ``t`` differs between the examples of any level."""
    while isinstance(t, Wrapper):
        if type(t) is Batched and t.axis is not None:
            return True
        t = t.value
    return False


def without_ended(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Replace values of ended levels among the arguments; raise if one differs between examples."""
    left = left_over(args, kwargs)
    for a in pytree.leaves(left):
        if type(a) is Batched and is_over(a.level):
            raise escaped(func, a, a.level.origin)
    return left


def wrap(value: torch.Tensor, axis: int | None, level: Level) -> Batched:
    """A new tensor of ``level``, with its value's strides so that autograd's views fit."""
    shape, strides = value.shape, strides_of(value)
    if axis is not None:
        if axis == 0:
            shape, strides = shape[1:], strides[1:]
        else:
            shape = shape[:axis] + shape[axis + 1 :]
            strides = strides[:axis] + strides[axis + 1 :]
    b = wrapper_of(Batched, value, shape, strides)
    own: Any = b.__dict__
    own["value"], own["axis"], own["level"] = value, axis, level
    return b


def named(value: torch.Tensor, axis: int | None, level: Level) -> Batched:
    """A tensor of ``level`` over an existing value, with that value's lazy conj and neg bits."""
    b = wrap(value, axis, level)
    put_lazy_bits(b, value)
    return b


def check_unwritten(args: tuple, level: Level) -> None:
    """Raise if a tensor that autograd saved of an ended level has been written to since."""
    for a in args:
        if type(a) is Batched:
            if a.level is level:
                for count in outside_counts(a):
                    if not count.holds():
                        raise _written_to(count)
        elif type(a) is list or type(a) is tuple:
            check_unwritten(tuple(a), level)


def outside_counts(b: Batched) -> list[Count]:
    """Versions of the tensors outside that a value came from, or that a call returned it as."""
    left = None if b.family is None else b.family.left
    return [count for count in (b.came, left) if count is not None]


def _written_to(count: Count) -> RuntimeError:
    """Torch's own error, for a tensor that came from outside or that a call returned."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an "
        "inplace operation: a tensor that a transformed call was given, captured or "
        f"returned.\n{columns([('the tensor', short(count.of()))])}\n"
        f"It is at version {count.now()}; expected version {count.number} instead.\n"
        "Take the derivative before it is written to, or write into a copy (.clone())."
    )


def same(value: torch.Tensor, axis: int | None) -> tuple[torch.Tensor, int | None]:
    """The view call of an alias."""
    return value, axis


def data_of(value: torch.Tensor, axis: int | None) -> tuple[torch.Tensor, int | None]:
    """The view call of ``x.data``."""
    return value.data, axis


def is_view(b: Batched) -> bool:
    """True if ``b`` may be a part of its memory, or be laid out otherwise."""
    return any(call is not same for call in b.chain)


def derive(base: Batched, value: torch.Tensor, axis: int | None, call: ViewCall) -> Batched:
    """A view of ``base``, added to its alias family."""
    view = named(value, axis, base.level)
    own: Any = view.__dict__
    family = own["family"] = family_of(base)
    own["chain"] = (*base.chain, call)
    if base.older:
        own["older"], own["came"] = True, base.came
    family.add(view)
    return view


def family_of(b: Batched) -> Family:
    """The alias family of a tensor; a new one if it is no view and has none yet."""
    family = b.family
    if family is None:
        family = vars(b)["family"] = Family(b.value, b.axis, b.older)
        family.add(b)
    return family


def promote(b: Batched, size: int) -> None:
    """Give the base of ``b``'s family an axis, so that examples can differ in it."""
    family = b.family
    if family is None:
        if b.axis is None:
            b.value, b.axis = spread(b.value, size), 0
    elif family.axis is None:
        family.rebase(spread(family.value, size), 0)


def spread(value: torch.Tensor, size: int) -> torch.Tensor:
    """``size`` real copies of ``value``, each laid out as it is."""
    room = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True) if n)
    room = max(room, 1) + value.storage_offset()
    if isinstance(value, Wrapper) or value.storage_offset():
        return (
            value.unsqueeze(0).expand(size, *value.shape).clone(memory_format=torch.preserve_format)
        )
    stack = torch.empty_strided(
        (size, *value.shape), (room, *value.stride()), dtype=value.dtype, device=value.device
    )
    return stack.copy_(value)


def refit(b: Batched, value: torch.Tensor, axis: int | None) -> None:
    """Let ``b`` hold a stack of other sizes, as out= and resize_ ask."""
    family = b.family
    if family is not None and (family.names or (family.of_rows and not is_view(b))):
        # the loop's tensor has other names, or examples that keep what it was
        raise Apart("a tensor that some examples know by another name gets another size")
    look_like(b, named(value, axis, b.level))
    b.value, b.axis = value, axis
    b.family, b.chain = None, ()


def line_up(b: Batched) -> None:
    """Put the examples of a family one after another, each laid out as it would be alone."""
    family = b.family
    if family is None:
        b.value, b.axis = _one_by_one(b.value, b.axis), 0
    elif family.axis is not None:
        family.rebase(_one_by_one(family.value, family.axis), 0)
    _look_like_values(b)


def _look_like_values(b: Batched) -> None:
    """Update the shape and strides that a family's members show, after a new layout."""
    members = [b] if b.family is None else [reference() for reference in b.family.members]
    for member in members:
        if member is not None:
            look_like(member, named(member.value, member.axis, member.level))


def are_apart(b: Batched) -> bool:
    """True if entries of other examples lie between the entries of one."""
    value, axis = (b.value, b.axis) if b.family is None else (b.family.value, b.family.axis)
    if axis is None:
        return False
    step = value.stride(axis)
    return any(s > step for s, n in zip(value.stride(), value.shape, strict=True) if n > 1)


def _one_by_one(value: torch.Tensor, axis: int) -> torch.Tensor:
    """(B, *S), each example without gaps, its dims in the order in memory that they have."""
    stack = value.movedim(axis, 0)
    return stack.new_empty_strided(stack.shape, strides_alone(stack)).copy_(stack)


def strides_alone(stack: torch.Tensor) -> list[int]:
    """Strides of the same examples (B, *S) one after another, without gaps."""
    strides, step = [0] * stack.dim(), 1
    for d in sorted(range(1, stack.dim()), key=lambda d: (stack.stride(d), -d)):
        strides[d], step = step, step * max(stack.shape[d], 1)
    strides[0] = step
    return strides
