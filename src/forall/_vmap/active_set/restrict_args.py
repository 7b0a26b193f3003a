"""API calls while examples diverge: their tensors, restricted to the examples that run.

A restricted tensor is a copy that emulates a view of rows of the wider tensor (`standing`): a write
into it, or into a view of it, is put back there.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forall._compat import exception_safety
from forall._compat.devices import on_device
from forall._compat.dispatch_state import forward_mode_runs, functions_off, no_dispatch
from forall._compat.wrapper_tensor import Wrapper
from forall._core.divergence import Apart
from forall._core.levels import act, lift, stack
from forall._vmap.active_set.merge import (
    cut,
    examples_in,
    for_those_asked,
    is_second_name,
    is_stale,
    layers,
    merged,
    narrow,
    restricted,
    stale,
)
from forall._vmap.active_set.sub_level import (
    common,
    covers,
    places_in,
    without,
)
from forall._vmap.batched_tensor import Batched
from forall._vmap.fast_path.api_calls import are_words, is_pointwise
from forall._vmap.function_mode import NARROWED
from forall._vmap.mutation import view_copies
from forall._vmap.mutation.mutation_log import written
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
    f: tuple(inspect.signature(f).parameters)
    for f in (torch.autograd.grad, Tensor.backward, torch.autograd.backward)
}
_SET_DATA = frozenset({Tensor.data.__set__})
_SEQUENCES = frozenset({list, tuple})


class _Kept(exception_safety.Here):
    """The restricted tensors of the examples that run, with those that others had before."""

    found: dict[int, tuple[Any, Any, Any]] | None = None


kept = _Kept.made(idle=True)


def forget(found: dict[int, tuple[Any, Any, Any]]) -> None:
    """Restore the cached copies that tensors had before these examples ran.

    A tensor must not hold its copies any longer, since they hold it.
    """
    for t, was, was_read in found.values():
        own = t.__dict__  # past `__setattr__`, which looks for a user's attribute
        own["narrowed"], own["read"] = was, was_read


class Fit(NamedTuple):
    """The arguments of a call for the examples that run, and the tensors that they stand for."""

    args: tuple
    kwargs: dict
    stands: dict[int, Tensor]  # by the id of what stands for it

    def given(self, out: Any) -> Any:
        """The answer as the user expects it: a call that returns its argument returns that one."""
        if self.stands:
            if isinstance(out, Tensor):
                return self.stands.get(id(out), out)
            if type(out) in _SEQUENCES:
                return type(out)([self.stands.get(id(o), o) for o in out])
        return out


def narrowed(func: Any, args: tuple, kwargs: dict) -> Fit:
    """Restrict the arguments of an API call to the examples that run."""
    stands: dict[int, Tensor] = {}
    if func is Tensor.register_hook and type(args[0]) is Batched and is_stale(args[0]):
        return Fit((args[0], _of_some(args[0].level.acting, *args[1:], **kwargs)), {}, stands)
    if func in _ITSELF:
        return Fit(args, kwargs, stands)
    if func in _SET_DATA and is_stale(args[0]):
        raise NotImplementedError(
            "vmap: x.data = .. where examples have parted, of an x from before.\n"
            "Use x.copy_(..) under torch.no_grad()."
        )
    # A pointwise call makes no view either: nobody can write into its operands.
    reads = is_pointwise(func) and (not kwargs or are_words(kwargs)) and not _says_yes(args)
    if func in _PASSES:
        return _pass(args, kwargs, *_PASSES[func])
    args = tuple([_fit(a, stands, reads) for a in args])
    if kwargs:
        kwargs = {k: _fit(a, stands, reads) for k, a in kwargs.items()}
    return Fit(args, kwargs, stands)


def _pass(args: tuple, kwargs: dict, *names: str) -> Fit:
    """Restrict a backward pass to the examples that run.

    Its inputs stay the very tensors: a copy of their rows is no leaf, and nothing was made of it.
    Other examples may run a pass of their own through what they all have computed together.
    """
    given = dict(zip(names, args, strict=False)) | kwargs
    if len(args) > len(names) or given.keys() - set(names):
        return Fit(args, kwargs, {})  # for torch to complain of
    stands: dict[int, Tensor] = {}
    inputs = given.pop("inputs", None)
    given = {k: _fit(a, stands, reads=False) for k, a in given.items()}
    given["retain_graph"] = True
    if inputs is not None:
        given["inputs"] = inputs
    first = given.pop(names[0], None)
    return Fit(() if first is None else (first,), given, stands)


def _says_yes(args: tuple) -> bool:
    """True if an argument may ask for an in-place call, as in ``F.relu(x, True)``."""
    return any(a is True for a in args)


def _of_some(some: Any, hook: Callable[[Tensor], Tensor | None]) -> Callable:
    """A hook on the gradient of the examples that registered it."""

    def hooked(g: Any) -> Tensor | None:
        if examples_in(g, some) is None:
            g = lift(g, some.root)  # the same for all of them
        own: Any = restricted(g, some)
        out = None if own is None else hook(own)
        if out is None:
            return None
        level, found = examples_in(g, some), examples_in(own, some)
        rest = without(level, found)
        if rest is None:
            return lift(out, found)
        return merged([(found, restricted(out, found)), (rest, restricted(g, rest))], level)

    return hooked


def _registered(x: Any, hook: Callable[[Tensor], Tensor | None]) -> Any:
    """Register a hook, whose gradient may come to be one of some of the examples."""
    if not isinstance(x, Wrapper):
        return NotImplemented

    def asked(g: Tensor) -> Tensor | None:
        out = hook(g)
        return for_those_asked((g,), out) if stack.ever_parted else out

    return Tensor.register_hook(x, asked)


def _detached(x: Any) -> Any:
    """Refuse x.detach_() where the tensor has other names, since no operator tells of it."""
    memory = view_copies.memory_of(x)
    if memory is not None and (memory.names or memory.of_rows):
        raise Apart("detach_ of a tensor that some examples know by another name")
    return NotImplemented


CALLS[Tensor.register_hook] = _registered
CALLS[Tensor.detach_] = CALLS[torch.detach_] = _detached


def _fit(a: Any, stands: dict[int, Tensor], reads: bool) -> Any:
    if isinstance(a, Wrapper):
        if not is_stale(a):
            return a
        found = _narrowed(a, reads)
        stands[id(found)] = a
        return found
    if type(a) in _SEQUENCES and a:
        inner = [_fit(b, stands, reads) for b in a]
        if any(x is not y for x, y in zip(a, inner, strict=True)):
            return type(a)(inner)
    return a


def for_those_that_run(t: Tensor) -> Tensor:
    """Restrict one tensor to the examples that run."""
    return _fit(t, {}, reads=False)


def for_reading(t: Batched, level: Any) -> Tensor | None:
    """The stack of a value that differs, for the examples of ``level``, which run.

    None if the value belongs to another level. The stack must not be written into.
    """
    own, value = t.level, t.value
    if t.axis is None or own.root is not level.root or not own.active or type(value) is not Tensor:
        return None
    if t.narrowed is not None:  # the copy may have been written into
        return _narrowed(t, reads=True).value if covers(own, level) else None
    # A tensor without a family does not count what is written into it.
    times = t.family.times if t.family is not None else -1 - written.times
    known = t.read
    if known is not None and known[2] == times:
        some, picked, _ = known
        if some is level:
            return picked
        if covers(some, level):  # those of fewer are nearer
            own, value = some, picked
    if not covers(own, level):
        return None
    places = places_in(level, own)
    with no_dispatch(), functions_off():
        value = value.index_select(t.axis, on_device(places, value.device))
    if kept.found is not None:
        kept.found.setdefault(id(t), (t, None, known))
        own_names: Any = t.__dict__
        own_names["read"] = level, value, times
    return value


def _narrowed(t: Any, reads: bool) -> Tensor:
    """The restricted copy of a tensor, cached as long as the wider tensor does not change."""
    memory, records = view_copies.memory_of(t), _records(t)
    assert memory is not None  # noqa: S101 - it is stale
    known = t.narrowed
    if known is not None:
        found, times, recorded, of = known
        if of is not None:
            times = of.x_seen
        if times == memory.times and records == recorded and not is_stale(found):
            if of is None and not reads:
                t.narrowed = found, times, recorded, _stand(found, t)
            return found
    found = narrow(t)
    of = None if reads else _stand(found, t)
    if kept.found is not None:
        kept.found.setdefault(id(t), (t, known, t.read))
        t.narrowed = found, memory.times, records, of
    return found


def _records(t: Tensor) -> bool:
    """True if a derivative is recorded; a copy made without one does not serve with one."""
    return torch.is_grad_enabled() and (t.requires_grad or forward_mode_runs())


def _stand(found: Any, t: Any) -> Rows | None:
    with functions_off():
        if is_second_name(t):
            return None
        of = Rows(found, t)
        view_copies.enlist(of)
        return of


class Rows(view_copies.Standing):
    """A restricted tensor, and the wider tensor whose rows it has."""

    __slots__ = ("own", "worlds")

    def __init__(self, picked: Any, x: Tensor) -> None:
        super().__init__(picked, x, [])
        memory = self.memory()
        assert memory is not None  # noqa: S101 - that of picked
        memory.of_rows = True
        self.worlds = [*stale(x)]
        self.own = {b.level.root: b.level for b in layers(picked)}

    def put_back(self, picked: Tensor) -> None:
        now = [(root, root.acting) for root, _, _ in self.worlds]
        try:
            for root, wide, _ in self.worlds:
                act(root, wide)
            torch.ops.aten.copy_.default(self.x, _overlaid(self.x, picked, self.worlds))
        finally:
            for root, was in now:
                act(root, was)

    def heard(self, writers: list[view_copies.Standing], times: int) -> None:
        """Mark this copy as current if only copies of other examples were written into."""
        if all(type(w) is Rows and self._is_apart(w) for w in writers):
            self.x_seen = times

    def _is_apart(self, other: Rows) -> bool:
        return any(
            root in other.own and common(own, other.own[root]) is None
            for root, own in self.own.items()
            if own.root is not own
        )

    def follow(self, picked: Tensor) -> None:
        now = [(root, root.acting) for root, _, _ in self.worlds]
        try:
            for root, _, own in self.worlds:
                act(root, own)
            torch.ops.aten.copy_.default(picked, narrow(self.x))
        finally:
            for root, was in now:
                act(root, was)


def _overlaid(x: Any, some: Tensor, worlds: list) -> Tensor:
    """A tensor with the rows of some of its examples replaced by what these hold now."""
    if not worlds:
        return some
    (_, wide, own), *inner = worlds
    rest = without(wide, own)
    some = _overlaid(restricted(x, own), some, inner)
    return some if rest is None else merged([(rest, restricted(x, rest)), (own, some)], wide)


def of_one_part(args: tuple) -> tuple:
    """The arguments of a user's call in a backward pass, where a cotangent is of some examples.

    What is the same for all is for them as well: a hook's constant is no cotangent of the others.
    """
    found: dict[Any, set[Any]] = {}
    for a in args:
        if type(a) is Batched and a.axis is not None:
            found.setdefault(a.level.root, set()).add(a.level)
    parts = {root: next(iter(levels)) for root, levels in found.items() if len(levels) == 1}
    if all(root is level for root, level in parts.items()):
        return args
    return tuple(
        cut(a, parts[a.level.root])
        if type(a) is Batched and a.axis is None and a.level is not parts.get(a.level.root, a.level)
        else a
        for a in args
    )


NARROWED.extend([narrowed, of_one_part])
