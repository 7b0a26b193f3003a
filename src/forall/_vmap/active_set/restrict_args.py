"""API calls while examples diverge: their tensors, restricted to the examples that run.

A restricted tensor is a copy that emulates a view of rows of the wider tensor (`view_copies`): a
write into it, or into a view of it, is put back there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forall._compat import exception_safety
from forall._compat.devices import copy_index_to
from forall._compat.dispatch_state import functions_off, is_forward_mode_on, no_dispatch
from forall._compat.wrapper_tensor import Wrapper
from forall._core.divergence import CannotMerge
from forall._core.levels import lift, set_acting_level, stack
from forall._core.python_state import read_signature
from forall._vmap.active_set.merge import (
    find_level_of_root,
    is_restricted_by_alias,
    is_stale,
    iter_layers,
    iter_stale_levels,
    merge_parts,
    restrict_to_level,
    restrict_to_running,
    restrict_users_gradients,
    select_examples,
)
from forall._vmap.active_set.sub_level import (
    covers_examples,
    intersect_examples,
    subtract_examples,
)
from forall._vmap.batched_tensor import BatchedTensor
from forall._vmap.fast_path.api_calls import are_plain_options, is_pointwise
from forall._vmap.mutation import view_copies
from forall._vmap.mutation.mutation_log import write_counts
from forall._vmap.registry import CALLS

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor

# Calls that ask or change the tensor itself: the wider tensor answers for its examples.
_GETTERS = "requires_grad grad_fn shape grad is_leaf dtype device ndim layout is_sparse is_cuda"
_ITSELF = frozenset(getattr(Tensor, name).__get__ for name in _GETTERS.split()) | {
    Tensor.grad.__set__,
    Tensor.requires_grad.__set__,
    Tensor.requires_grad_,
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.stride,
    Tensor.is_contiguous,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.register_hook,
    Tensor.retain_grad,
}
# Backward passes, with the names of what they may be given.
_PASSES = {
    f: tuple(read_signature(f).parameters)
    for f in (torch.autograd.grad, Tensor.backward, torch.autograd.backward)
}
_SET_DATA = frozenset({Tensor.data.__set__})
_SEQUENCES = frozenset({list, tuple})


class _RestrictionCache(exception_safety.RestoredState):
    """The restricted tensors of the examples that run, with those that others had before."""

    found: dict[int, tuple[Any, Any, Any]] | None = None


restriction_cache = _RestrictionCache.make_instance(idle=True)


def restore_cached_copies(found: dict[int, tuple[Any, Any, Any]]) -> None:
    """Restore the cached copies that tensors had before these examples ran.

    A tensor must not hold its copies any longer, since they hold it.
    """
    for t, was, was_read in found.values():
        own = t.__dict__  # past `__setattr__`, which looks for a user's attribute
        own["narrowed"], own["read"] = was, was_read


class RestrictedArgs(NamedTuple):
    """The arguments of a call for the examples that run, and the tensors that they stand for."""

    args: tuple
    kwargs: dict
    stands: dict[int, Tensor]  # by the id of what stands for it

    def restore_identity(self, out: Any) -> Any:
        """The answer as the user expects it: a call that returns its argument returns that one."""
        if self.stands:
            if isinstance(out, Tensor):
                return self.stands.get(id(out), out)
            if type(out) in _SEQUENCES:
                return type(out)([self.stands.get(id(o), o) for o in out])
        return out


def restrict_args(func: Any, args: tuple, kwargs: dict) -> RestrictedArgs:
    """Restrict the arguments of an API call to the examples that run."""
    stands: dict[int, Tensor] = {}
    if func is Tensor.register_hook and type(args[0]) is BatchedTensor and is_stale(args[0]):
        return RestrictedArgs(
            (args[0], _restrict_hook(args[0].level.acting_level, *args[1:], **kwargs)), {}, stands
        )
    if func in _ITSELF:
        return RestrictedArgs(args, kwargs, stands)
    if func in _SET_DATA and is_stale(args[0]):
        raise NotImplementedError(
            "vmap: x.data = .. where examples have diverged, of an x from before.\n"
            "Use x.copy_(..) under torch.no_grad()."
        )
    # A pointwise call makes no view either: nobody can write into its operands.
    reads = (
        is_pointwise(func)
        and (not kwargs or are_plain_options(kwargs))
        and not _may_ask_inplace(args)
    )
    if func in _PASSES:
        return _restrict_backward_args(args, kwargs, *_PASSES[func])
    args = tuple([_restrict_argument(a, stands, reads) for a in args])
    if kwargs:
        kwargs = {k: _restrict_argument(a, stands, reads) for k, a in kwargs.items()}
    return RestrictedArgs(args, kwargs, stands)


def _restrict_backward_args(args: tuple, kwargs: dict, *names: str) -> RestrictedArgs:
    """Restrict a backward pass to the examples that run.

    Its inputs stay the very tensors: a copy of their rows is no leaf, and nothing was made of it.
    Other examples may run a pass of their own through what they all have computed together.
    """
    given = dict(zip(names, args, strict=False)) | kwargs
    if len(args) > len(names) or given.keys() - set(names):
        return RestrictedArgs(args, kwargs, {})  # for torch to complain of
    stands: dict[int, Tensor] = {}
    inputs = given.pop("inputs", None)
    given = {k: _restrict_argument(a, stands, reads=False) for k, a in given.items()}
    given["retain_graph"] = True
    if inputs is not None:
        given["inputs"] = inputs
    first = given.pop(names[0], None)
    return RestrictedArgs(() if first is None else (first,), given, stands)


def _may_ask_inplace(args: tuple) -> bool:
    """True if an argument may ask for an in-place call, as in ``F.relu(x, True)``."""
    return any(a is True for a in args)


def _restrict_hook(some: Any, hook: Callable[[Tensor], Tensor | None]) -> Callable:
    """A hook on the gradient of the examples that registered it."""

    def call_restricted_hook(g: Any) -> Tensor | None:
        if find_level_of_root(g, some) is None:
            g = lift(g, some.root)  # the same for all of them
        own: Any = restrict_to_level(g, some)
        out = None if own is None else hook(own)
        if out is None:
            return None
        level, found = find_level_of_root(g, some), find_level_of_root(own, some)
        rest = subtract_examples(level, found)
        if rest is None:
            return lift(out, found)
        return merge_parts(
            [(found, restrict_to_level(out, found)), (rest, restrict_to_level(g, rest))], level
        )

    return call_restricted_hook


def _register_hook(x: Any, hook: Callable[[Tensor], Tensor | None]) -> Any:
    """Register a hook, whose gradient may come to be one of some of the examples."""
    if not isinstance(x, Wrapper):
        return NotImplemented

    def call_users_hook(g: Tensor) -> Tensor | None:
        out = hook(g)
        return restrict_users_gradients((g,), out) if stack.ever_parted else out

    return Tensor.register_hook(x, call_users_hook)


def _refuse_detach(x: Any) -> Any:
    """Refuse x.detach_() where the tensor has other names, since no operator tells of it."""
    memory = view_copies.find_alias_family(x)
    if memory is not None and (memory.names or memory.of_rows):
        raise CannotMerge("detach_ of a tensor that some examples know by another name")
    return NotImplemented


CALLS[Tensor.register_hook] = _register_hook
CALLS[Tensor.detach_] = CALLS[torch.detach_] = _refuse_detach


def _restrict_argument(a: Any, stands: dict[int, Tensor], reads: bool) -> Any:
    if isinstance(a, Wrapper):
        if not is_stale(a):
            return a
        found = _restrict_cached(a, reads)
        stands[id(found)] = a
        return found
    if type(a) in _SEQUENCES and a:
        inner = [_restrict_argument(b, stands, reads) for b in a]
        if any(x is not y for x, y in zip(a, inner, strict=True)):
            return type(a)(inner)
    return a


def restrict_tensor(t: Tensor) -> Tensor:
    """Restrict one tensor to the examples that run."""
    return _restrict_argument(t, {}, reads=False)


def restrict_for_reading(t: BatchedTensor, level: Any) -> Tensor | None:
    """The stack of a value that differs, for the examples of ``level``, which run.

    None if the value belongs to another level. The stack must not be written into.
    """
    own, value = t.level, t.value
    if t.axis is None or own.root is not level.root or not own.active or type(value) is not Tensor:
        return None
    if t.narrowed is not None:  # the copy may have been written into
        return _restrict_cached(t, reads=True).value if covers_examples(own, level) else None
    # A tensor without a family does not count what is written into it.
    times = t.family.times if t.family is not None else -1 - write_counts.times
    known = t.read
    if known is not None and known[2] == times:
        some, picked, _ = known
        if some is level:
            return picked
        if covers_examples(some, level):  # those of fewer are nearer
            own, value = some, picked
    if not covers_examples(own, level):
        return None
    places = level.examples.find_positions_in(own.examples)
    with no_dispatch(), functions_off():
        value = value.index_select(t.axis, copy_index_to(places, value.device))
    if restriction_cache.found is not None:
        restriction_cache.found.setdefault(id(t), (t, None, known))
        own_names: Any = t.__dict__
        own_names["read"] = level, value, times
    return value


def _restrict_cached(t: Any, reads: bool) -> Tensor:
    """The restricted copy of a tensor, cached as long as the wider tensor does not change."""
    memory, records = view_copies.find_alias_family(t), _is_recording(t)
    assert memory is not None  # noqa: S101 - it is stale
    known = t.narrowed
    if known is not None:
        found, times, recorded, of = known
        if of is not None:
            times = of.x_seen
        if times == memory.times and records == recorded and not is_stale(found):
            if of is None and not reads:
                t.narrowed = found, times, recorded, _make_row_copy(found, t)
            return found
    found = restrict_to_running(t)
    of = None if reads else _make_row_copy(found, t)
    if restriction_cache.found is not None:
        restriction_cache.found.setdefault(id(t), (t, known, t.read))
        t.narrowed = found, memory.times, records, of
    return found


def _is_recording(t: Tensor) -> bool:
    """True if a derivative is recorded; a copy made without one does not serve with one."""
    return torch.is_grad_enabled() and (t.requires_grad or is_forward_mode_on())


def _make_row_copy(found: Any, t: Any) -> RestrictedRows | None:
    with functions_off():
        if is_restricted_by_alias(t):
            return None
        of = RestrictedRows(found, t)
        view_copies.register_view_copy(of)
        return of


class RestrictedRows(view_copies.ViewCopy):
    """A restricted tensor, and the wider tensor whose rows it has."""

    __slots__ = ("own", "worlds")

    def __init__(self, picked: Any, x: Tensor) -> None:
        super().__init__(picked, x, [])
        memory = self.memory()
        assert memory is not None  # noqa: S101 - that of picked
        memory.of_rows = True
        self.worlds = [*iter_stale_levels(x)]
        self.own = {b.level.root: b.level for b in iter_layers(picked)}

    def write_to_base(self, picked: Tensor) -> None:
        now = [(root, root.acting_level) for root, _, _ in self.worlds]
        try:
            for root, wide, _ in self.worlds:
                set_acting_level(root, wide)
            torch.ops.aten.copy_.default(self.x, _overlay_examples(self.x, picked, self.worlds))
        finally:
            for root, was in now:
                set_acting_level(root, was)

    def note_written_back(self, writers: list[view_copies.ViewCopy], times: int) -> None:
        """Mark this copy as current if only copies of other examples were written into."""
        if all(type(w) is RestrictedRows and self._is_disjoint_from(w) for w in writers):
            self.x_seen = times

    def _is_disjoint_from(self, other: RestrictedRows) -> bool:
        return any(
            root in other.own and intersect_examples(own, other.own[root]) is None
            for root, own in self.own.items()
            if own.root is not own
        )

    def copy_from_base(self, picked: Tensor) -> None:
        now = [(root, root.acting_level) for root, _, _ in self.worlds]
        try:
            for root, _, own in self.worlds:
                set_acting_level(root, own)
            torch.ops.aten.copy_.default(picked, restrict_to_running(self.x))
        finally:
            for root, was in now:
                set_acting_level(root, was)


def _overlay_examples(x: Any, some: Tensor, worlds: list) -> Tensor:
    """A tensor with the rows of some of its examples replaced by what these hold now."""
    if not worlds:
        return some
    (_, wide, own), *inner = worlds
    rest = subtract_examples(wide, own)
    some = _overlay_examples(restrict_to_level(x, own), some, inner)
    return (
        some
        if rest is None
        else merge_parts([(rest, restrict_to_level(x, rest)), (own, some)], wide)
    )


def restrict_to_one_part(args: tuple) -> tuple:
    """The arguments of a user's call in a backward pass, where a cotangent is of some examples.

    What is the same for all is for them as well: a hook's constant is no cotangent of the others.
    """
    found: dict[Any, set[Any]] = {}
    for a in args:
        if type(a) is BatchedTensor and a.axis is not None:
            found.setdefault(a.level.root, set()).add(a.level)
    parts = {root: next(iter(levels)) for root, levels in found.items() if len(levels) == 1}
    if all(root is level for root, level in parts.items()):
        return args
    return tuple(
        select_examples(a, parts[a.level.root])
        if type(a) is BatchedTensor
        and a.axis is None
        and a.level is not parts.get(a.level.root, a.level)
        else a
        for a in args
    )
