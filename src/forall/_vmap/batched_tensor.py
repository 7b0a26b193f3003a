"""`BatchedTensor`: a tensor that shows one example and holds the stack; and alias families.

NOTE [alias families]
    Every tensor born under a level, and the views of it, form a family with one base. Each view
    knows the calls that lead to it from the base. When per-example data is written into a family
    whose base is the same for all examples, the base gets an axis (`batch_alias_family`), and every
    living view is derived again. Reads pay nothing: `value` and `axis` are plain attributes.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from forall._compat import pytree
from forall._compat.dispatch_state import functions_off, no_dispatch
from forall._compat.documented_error import documented_error
from forall._compat.jagged_layout import Jagged
from forall._compat.lazy_bits import copy_lazy_bits
from forall._compat.tensor_subclass import (
    call_users_classes,
    has_posed_class,
    has_torch_function_class,
    posing,
    run_on_wrappers,
)
from forall._compat.wrapper_tensor import (
    ENTRYWISE,
    READS,
    Wrapper,
    copy_metadata,
    make_wrapper,
    make_wrapper_for,
)
from forall._compat.wrapper_tensor import get_strides as strides_of
from forall._core import nested_tensor
from forall._core.divergence import CannotMerge
from forall._core.errors import (
    format_columns,
    format_repr_marks,
    format_short,
    make_escaped_value_error,
    make_no_memory_error,
)
from forall._core.escaped_values import (
    call_without_mode,
    dispatch_without_mode,
    is_escape_from,
    replace_escaped,
    replace_escaped_args,
)
from forall._core.host_reads import format_numbers, notify_host_read
from forall._core.levels import Level, run_outside
from forall._core.version_counter import VersionCount
from forall._vmap.registry import AFTER_EXIT_CALLS

if TYPE_CHECKING:
    from collections.abc import Callable

    ViewCall = Callable[[torch.Tensor, int | None], tuple[torch.Tensor, int | None]]


class AliasFamily:
    """One base value and the living tensors that are views of it. See NOTE [alias families]."""

    __slots__ = (
        "__weakref__",
        "axis",
        "is_external",
        "left",
        "members",
        "names",
        "of_rows",
        "prune_at",
        "stands",
        "times",
        "value",
    )

    def __init__(self, value: torch.Tensor, axis: int | None, older: bool) -> None:
        self.value = value
        self.axis = axis
        self.is_external = older
        self.of_rows = False  # holds rows of a tensor of more examples
        self.stands: Any = None  # `view_copies.ViewCopy`, where the loop has a view and we a copy
        self.names: Any = None  # its other names in the loop, see `_divergence.aliases`
        self.times = 0  # how often it was written into
        self.left: VersionCount | None = None  # version of the result that a call made of it
        self.members: list[weakref.ref[BatchedTensor]] = []
        self.prune_at = 64

    def add(self, member: BatchedTensor) -> None:
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


class BatchedTensor(Wrapper):
    """All examples of a tensor under one vmap level, shown as one example.

    ``value`` is the stack and ``axis`` its batch axis; ``axis`` None means that ``value`` is the
    same for every example. ``older`` is True for a tensor from before the call.
    """

    value: torch.Tensor
    axis: int | None
    family: AliasFamily | None = None
    chain: tuple[ViewCall, ...] = ()
    is_external: bool = False
    source_version: VersionCount | None = (
        None  # version of the tensor from outside that this is or views
    )

    def graph_free(self) -> BatchedTensor:
        if self.family is None and self.is_external:
            twin = wrap_existing(self.value, self.axis, self.level)
            own: Any = twin.__dict__
            own["is_external"], own["source_version"] = True, self.source_version
            return twin
        return derive_view(self, self.value, self.axis, alias_call)

    def lay_out_alone(self, gaps: bool = False) -> bool:
        """Lay the examples out one after another if an inner batch axis leaves gaps in them.

        Return True if the layout changed. A tensor from before the call keeps its gaps, which it
        has in the loop as well.
        """
        below = isinstance(self.value, Wrapper)
        if not below and (self.is_external or not (gaps or are_interleaved(self))):
            return False  # the common case, at each call of the user's that is a view
        with run_outside(self.level), functions_off():
            moved = below and self.value.lay_out_alone(gaps)
            if not self.is_external and (gaps or are_interleaved(self)):
                lay_out_separately(self)
                return True
            if moved:
                _refresh_shown_layout(self)
        return moved

    @property
    def data(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """``x.data``, made of the data of the value below, which may have a tangent."""
        if not isinstance(self.value, Wrapper):
            return torch.Tensor.data.__get__(self)
        with run_outside(self.level), functions_off():
            return derive_view(self, *data_call(self.value, self.axis), data_call)

    @data.setter
    def data(self, new: torch.Tensor) -> None:
        torch.Tensor.data.__set__(self, new)

    def describe(self) -> str:
        level = self.level
        examples = "one for each of" if self.axis is not None else "the same for all"
        facts = f"{format_short(self)}, {examples} {level.size} examples"
        if self.axis:
            facts += f" (axis {self.axis})"
        return f"Batched({facts}{format_repr_marks(self)}:\n{format_numbers(self.value)})"

    def memory(self, name: str, args: tuple, kwargs: dict) -> Any:
        rest = replace_escaped(self)
        if rest is not self:
            return getattr(rest, name)(*args, **kwargs)
        if self.axis is not None:
            if is_escape_from(self.level):
                raise make_escaped_value_error(f"x.{name}()", self, self.level.origin)
            if name not in READS:
                raise make_no_memory_error(name, self, self.level.size)
        if name in READS:
            self.refuse_history(name)
        notify_host_read()
        if self.is_external and self.level.state.logs_writes:
            self.level.state.mutation_log.log_read(f"x.{name}()", self)
        if name not in READS:
            with no_dispatch(), functions_off():
                return getattr(self.value, name)(*args, **kwargs)
        value = self.level.concretize(
            self, lambda: make_no_memory_error(name, self, self.level.size)
        )
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
        if has_torch_function_class(types):
            return call_users_classes(func, types, args, kwargs or {})
        if getattr(func, "__name__", "") in ENTRYWISE:
            raise make_escaped_value_error(f"x.{func.__name__}()", args[0], args[0].level.origin)
        return call_without_mode(func, args, kwargs or {}, AFTER_EXIT_CALLS.get(func))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if Jagged in types:
            return nested_tensor.run_on_nested(func, args)
        if posing.used and has_posed_class(types):
            return run_on_wrappers(None, func, args, kwargs or {})
        return dispatch_without_mode(func, args, kwargs or {})


def is_mapped_at_any(t: Any) -> bool:
    """True if ``t`` differs between the examples of any level."""
    while isinstance(t, Wrapper):
        if type(t) is BatchedTensor and t.axis is not None:
            return True
        t = t.value
    return False


def replace_ended_args(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Replace values of ended levels among the arguments; raise if one differs between examples."""
    left = replace_escaped_args(args, kwargs)
    for a in pytree.get_leaves(left):
        if type(a) is BatchedTensor and is_escape_from(a.level):
            raise make_escaped_value_error(func, a, a.level.origin)
    return left


def wrap_stack(value: torch.Tensor, axis: int | None, level: Level) -> BatchedTensor:
    """A new tensor of ``level``, with its value's strides so that autograd's views fit."""
    shape, is_plain = value.shape, type(value) is torch.Tensor and value.layout is torch.strided
    strides = value.stride() if is_plain else strides_of(value)
    if axis is not None:
        if axis == 0:
            shape, strides = shape[1:], strides[1:]
        else:
            shape = shape[:axis] + shape[axis + 1 :]
            strides = strides[:axis] + strides[axis + 1 :]
    if torch.is_inference_mode_enabled():
        b = make_wrapper_for(BatchedTensor, value, shape, strides)
    else:  # this is called for each operator
        b = make_wrapper(
            *(BatchedTensor, shape, strides, value.storage_offset(), None),
            *(value.dtype, value.layout, value.device),
        )
    own: Any = b.__dict__
    own["value"], own["axis"], own["level"] = value, axis, level
    return b


def wrap_existing(value: torch.Tensor, axis: int | None, level: Level) -> BatchedTensor:
    """A tensor of ``level`` over an existing value, with that value's lazy conj and neg bits."""
    b = wrap_stack(value, axis, level)
    if value.is_neg() or value.is_conj():
        copy_lazy_bits(b, value)
    return b


def check_unwritten(args: tuple, level: Level) -> None:
    """Raise if a tensor that autograd saved of an ended level has been written to since."""
    for a in args:
        if type(a) is BatchedTensor:
            if a.level is level:
                for count in get_source_versions(a):
                    if not count.has_no_writes():
                        raise _make_version_error(count)
        elif type(a) is list or type(a) is tuple:
            check_unwritten(tuple(a), level)


def get_source_versions(b: BatchedTensor) -> list[VersionCount]:
    """Versions of the tensors outside that a value came from, or that a call returned it as."""
    left = None if b.family is None else b.family.left
    return [count for count in (b.source_version, left) if count is not None]


def _make_version_error(count: VersionCount) -> RuntimeError:
    """Torch's own error, for a tensor that came from outside or that a call returned."""
    return documented_error(RuntimeError, "modified-since")(
        "one of the variables needed for gradient computation has been modified by an "
        "inplace operation: a tensor that a transformed call was given, captured or "
        f"returned.\n{format_columns([('the tensor', format_short(count.of()))])}\n"
        f"It is at version {count.current_version()}; expected version {count.number} instead.\n"
        "Take the derivative before it is written to, or write into a copy (.clone())."
    )


def alias_call(value: torch.Tensor, axis: int | None) -> tuple[torch.Tensor, int | None]:
    """The view call of an alias."""
    return value, axis


def data_call(value: torch.Tensor, axis: int | None) -> tuple[torch.Tensor, int | None]:
    """The view call of ``x.data``."""
    return value.data, axis


def may_be_partial_view(b: BatchedTensor) -> bool:
    """True if ``b`` may be a part of its memory, or be laid out otherwise."""
    return any(call is not alias_call for call in b.chain)


def derive_view(
    base: BatchedTensor, value: torch.Tensor, axis: int | None, call: ViewCall
) -> BatchedTensor:
    """A view of ``base``, added to its alias family."""
    view = wrap_existing(value, axis, base.level)
    own: Any = view.__dict__
    family = own["family"] = get_alias_family(base)
    own["chain"] = (*base.chain, call)
    if base.is_external:
        own["is_external"], own["source_version"] = True, base.source_version
    family.add(view)
    return view


def get_alias_family(b: BatchedTensor) -> AliasFamily:
    """The alias family of a tensor; a new one if it is no view and has none yet."""
    family = b.family
    if family is None:
        family = vars(b)["family"] = AliasFamily(b.value, b.axis, b.is_external)
        family.add(b)
    return family


def batch_alias_family(b: BatchedTensor, size: int) -> None:
    """Give the base of ``b``'s family an axis, so that examples can differ in it."""
    family = b.family
    if family is None:
        if b.axis is None:
            b.value, b.axis = copy_per_example(b.value, size), 0
    elif family.axis is None:
        family.rebase(copy_per_example(family.value, size), 0)


def copy_per_example(value: torch.Tensor, size: int) -> torch.Tensor:
    """``size`` real copies of ``value``, each laid out as it is."""
    room = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True) if n)
    room = max(room, 1) + value.storage_offset()
    if isinstance(value, Wrapper) or value.storage_offset():
        return value.expand(size, *value.shape).clone(memory_format=torch.preserve_format)
    stack = torch.empty_strided(
        (size, *value.shape), (room, *value.stride()), dtype=value.dtype, device=value.device
    )
    return stack.copy_(value)


def replace_stack(b: BatchedTensor, value: torch.Tensor, axis: int | None) -> None:
    """Let ``b`` hold a stack of other sizes, as out= and resize_ ask."""
    family = b.family
    if family is not None and (family.names or (family.of_rows and not may_be_partial_view(b))):
        # the loop's tensor has other names, or examples that keep what it was
        raise CannotMerge("a tensor that some examples know by another name gets another size")
    copy_metadata(b, wrap_existing(value, axis, b.level))
    b.value, b.axis = value, axis
    b.family, b.chain = None, ()


def lay_out_separately(b: BatchedTensor) -> None:
    """Put the examples of a family one after another, each laid out as it would be alone."""
    family = b.family
    if family is None:
        b.value, b.axis = _copy_separately(b.value, b.axis)
    else:
        family.rebase(*_copy_separately(family.value, family.axis))
    _refresh_shown_layout(b)


def _refresh_shown_layout(b: BatchedTensor) -> None:
    """Update the shape and strides that a family's members show, after a new layout."""
    members = [b] if b.family is None else [reference() for reference in b.family.members]
    for member in members:
        if member is not None:
            copy_metadata(member, wrap_existing(member.value, member.axis, member.level))


def are_interleaved(b: BatchedTensor) -> bool:
    """True if entries of other examples lie between the entries of one."""
    value, axis = (b.value, b.axis) if b.family is None else (b.family.value, b.family.axis)
    if axis is None:
        return False
    step = value.stride(axis)
    return any(s > step for s, n in zip(value.stride(), value.shape, strict=True) if n > 1)


def _copy_separately(value: torch.Tensor, axis: int | None) -> tuple[torch.Tensor, int | None]:
    """(B, *S), each example without gaps, its dims in the order in memory that they have.

    A value that all examples share is copied as one example.
    """
    if axis is None:
        return _copy_separately(value.unsqueeze(0), 0)[0].squeeze(0), None
    stack = value.movedim(axis, 0)
    return stack.new_empty_strided(stack.shape, compute_dense_strides(stack)).copy_(stack), 0


def compute_dense_strides(stack: torch.Tensor) -> list[int]:
    """Strides of the same examples (B, *S) one after another, without gaps."""
    strides, step = [0] * stack.dim(), 1
    for d in sorted(range(1, stack.dim()), key=lambda d: (stack.stride(d), -d)):
        strides[d], step = step, step * max(stack.shape[d], 1)
    strides[0] = step
    return strides
