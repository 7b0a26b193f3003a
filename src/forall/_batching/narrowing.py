"""API calls while examples have parted: their tensors, for the examples that run.

A narrowed tensor is a copy that stands for the rows of the wider one (`standing`): what is written
into it, or into a view of it, is put back there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from forall._batching import standing
from forall._batching.parts import is_stale, merged, narrow, restricted, without
from forall._core.levels import act
from forall._torch.names import version
from forall._torch.wrapper import Wrapper

Tensor = torch.Tensor

# What asks or changes the tensor itself: the wider one answers for its examples.
_GETTERS = "requires_grad grad_fn shape grad is_leaf dtype device ndim layout is_sparse is_cuda"
_ITSELF = frozenset(getattr(Tensor, name).__get__ for name in _GETTERS.split()) | {
    Tensor.grad.__set__,
    Tensor.requires_grad.__set__,
    Tensor.requires_grad_,
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.stride,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.register_hook,
    Tensor.retain_grad,
}
_SEQUENCES = frozenset({list, tuple})


class Fit(NamedTuple):
    """A call's arguments for the examples that run, and those they stand for."""

    args: tuple
    kwargs: dict
    stands: dict[int, Tensor]  # by the id of what stands for it

    def given(self, out: Any) -> Any:
        """The answer as the user expects it: a call that returns its argument returns that one."""
        if self.stands:
            if isinstance(out, Tensor):
                return self.stands.get(id(out), out)
            if type(out) is tuple:
                return tuple(self.stands.get(id(o), o) for o in out)
        return out


def narrowed(func: Any, args: tuple, kwargs: dict) -> Fit:
    """The arguments of an API call, narrowed to the examples that run."""
    stands: dict[int, Tensor] = {}
    if func in _ITSELF:
        return Fit(args, kwargs, stands)
    if func is torch.autograd.grad:  # with respect to the very tensors
        kept = args[1:]
        args = (_fit(args[0], stands), *kept)
        return Fit(args, kwargs, stands)
    args = tuple([_fit(a, stands) for a in args])
    if kwargs:
        kwargs = {k: _fit(a, stands) for k, a in kwargs.items()}
    return Fit(args, kwargs, stands)


def _fit(a: Any, stands: dict[int, Tensor]) -> Any:
    if isinstance(a, Wrapper):
        if not is_stale(a):
            return a
        found = _narrowed(a)
        stands[id(found)] = a
        return found
    if type(a) in _SEQUENCES and a:
        inner = [_fit(b, stands) for b in a]
        if any(x is not y for x, y in zip(a, inner, strict=True)):
            return type(a)(inner)
    return a


def _narrowed(t: Any) -> Tensor:
    """Once for the examples that run, as long as the wider one does not change."""
    known = t.narrowed
    if known is not None:
        found, number, required = known
        if not is_stale(found) and number == version(t) and required == _records(t):
            return found
    found = narrow(t)
    standing.stand_for(found, Rows(found, t))
    if not (t.is_leaf and t.requires_grad):  # it would keep itself alive
        t.narrowed = found, version(t), _records(t)
    return found


def _records(t: Tensor) -> bool:
    return t.requires_grad and torch.is_grad_enabled()


class Rows(standing.Standing):
    """A narrowed tensor, and the wider one whose rows it has."""

    __slots__ = ()

    def __init__(self, picked: Any, x: Tensor) -> None:
        super().__init__(picked, x, [])

    def put_back(self) -> None:
        standing.reach(self.x, self._overlay)
        self.version = version(self.x)
        known = self.x.narrowed
        if known is not None and known[0] is self.picked:
            self.x.narrowed = self.picked, self.version, _records(self.x)

    def _overlay(self) -> None:
        x, some = self.x, self.picked
        root, level = _stale(x)
        own = root.acting
        rest = without(level, own)
        act(root, level)
        try:
            if rest is not None:
                some = merged([(rest, restricted(x, rest)), (own, some)], level)
            torch.ops.aten.copy_.default(x, some)
        finally:
            act(root, own)

    def current(self) -> Tensor:
        return narrow(self.x)

    def follows(self) -> bool:
        return is_stale(self.x) and not is_stale(self.picked)


def _stale(t: Any) -> tuple[Any, Any]:
    while t.level.acting is t.level:
        t = t.value
    return t.level.root, t.level
