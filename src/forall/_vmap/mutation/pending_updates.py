"""Pending updates: what examples add to a tensor from before the call, applied when it ends.

See NOTE [older memory] in `mutation_log`.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forall._compat.wrapper_tensor import Wrapper
from forall._core.axes import pad_rank
from forall._core.divergence import make_divergence
from forall._core.errors import make_shared_write_error
from forall._core.levels import run_outside, top
from forall._vmap.batched_tensor import BatchedTensor
from forall._vmap.mutation.rollback import clone_unlogged
from forall._vmap.rule_makers.basic import is_mapped, lower_shared, move_to_front

if TYPE_CHECKING:
    from collections.abc import Callable

    StoragePosition = tuple[int, tuple[int, ...], tuple[int, ...]]

Tensor = torch.Tensor


def locate_in_storage(t: Tensor) -> StoragePosition:
    """The position of a tensor in its storage: offset, shape and strides."""
    return int(t.storage_offset()), tuple(t.shape), t.stride()


def are_disjoint(a: StoragePosition, b: StoragePosition) -> bool:
    """True if the positions ``a`` and ``b`` certainly do not overlap."""
    (first, last), (other_first, other_last) = _get_span(a), _get_span(b)
    return last < other_first or other_last < first


def _get_span(p: StoragePosition) -> tuple[int, int]:
    offset, shape, stride = p
    return offset, offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))


class AffineUpdate(NamedTuple):
    """``s <- factor * s + data``: what each example does to the entries of a tensor.

    ``data`` is a stack (B, *S) if ``mapped``, else the same for all examples.
    """

    factor: Any
    data: Any
    mapped: bool

    def total(self, size: int) -> Any:
        """The sum of what all examples add."""
        return self.data.sum(0, dtype=self.data.dtype) if self.mapped else self.data * size


class MeanUpdate(NamedTuple):
    """``s <- (n * s + data) / (n + times)``: what ``times`` calls do to an average of n values."""

    data: Any
    mapped: bool
    before: Tensor  # n, when the call began
    times: int = 1


class PendingUpdates:
    """The pending updates of one piece of memory from before the call, applied when it ends."""

    __slots__ = ("chains", "recorded", "sums")

    def __init__(self) -> None:
        self.sums: list[tuple[StoragePosition, Tensor, Callable[[], object]]] = []
        self.chains: dict[StoragePosition, AffineChain | RunningAverage] = {}
        self.recorded = False  # whether autograd has recorded any of it

    def add(self, target: Tensor, update: Any, size: int) -> bool:
        """Log an `AffineUpdate` or a function that adds; False if the order of writes matters."""
        at = locate_in_storage(target)
        chained = [p for p in self.chains if not are_disjoint(at, p)]
        if not chained and is_pure_sum(update):
            self.sums.append((at, target, _make_addition(target, update, size)))
            return True
        if (
            callable(update)
            or any(p != at for p in chained)
            or not all(are_disjoint(at, p) for p, *_ in self.sums)
        ):
            return False
        kind = AffineChain if type(update) is AffineUpdate else RunningAverage
        chain = self.chains.setdefault(at, kind(target, size))
        if type(chain) is not kind or self.recorded:
            return False
        chain.add(update)
        return True

    def copy(self) -> PendingUpdates:
        twin = PendingUpdates()
        twin.sums, twin.recorded = [*self.sums], self.recorded
        twin.chains = {at: copy(chain) for at, chain in self.chains.items()}
        return twin

    def targets(self) -> list[Tensor]:
        return [*(t for _, t, _ in self.sums), *(c.target for c in self.chains.values())]

    def apply_updates(self) -> None:
        for _, _, add in self.sums:
            add()
        for chain in self.chains.values():
            chain.apply_updates()


def is_pure_sum(update: Any) -> bool:
    if type(update) is AffineUpdate:
        return type(update.factor) is int and update.factor == 1
    return callable(update)


def _make_addition(target: Tensor, update: Any, size: int) -> Callable[[], object]:
    if type(update) is not AffineUpdate:
        return update
    total = update.total(size)
    return lambda: target.add_(total)


_EXACT = {int: torch.int64, float: torch.float64, complex: torch.complex128}


class AffineChain:
    """Steps ``s <- factor * s + data`` that each example takes, one example after another."""

    __slots__ = ("data", "factor", "size", "target")

    def __init__(self, target: Tensor, size: int) -> None:
        self.target = target
        self.size = size
        self.factor: Any = 1
        self.data: Any = 0  # (B, *S), or the same for all examples

    def add(self, step: AffineUpdate) -> None:
        self.factor = step.factor * self.factor
        self.data = step.factor * self.data + step.data

    def apply_updates(self) -> None:
        """s <- a**B * s + the sum of a**(B-1-i) * data[i]."""
        dtype, factor = self.target.dtype, self.factor
        device = self.target.device
        if exact := _EXACT.get(type(factor)):  # filling does not wait for the device
            a = torch.full((), factor, dtype=exact, device=device)
        else:
            a = torch.as_tensor(factor, device=device)
        if dtype.is_floating_point:
            a = a.to(torch.promote_types(a.dtype, torch.float64))
        elif type(factor) is int:
            a = a.to(dtype)
        a = a.unsqueeze(0)
        size, rank = self.size, max(a.dim() - 1, self.target.dim())
        a = pad_rank(a, rank)
        left = torch.arange(size - 1, -1, -1, device=a.device).reshape(size, *(1,) * rank)
        total = ((a**left).to(dtype) * self.data).sum(0)
        self.target.mul_((a[0] ** size).to(dtype)).add_(total)


class RunningAverage:
    """A `MeanUpdate` of each example in turn; the order of the examples does not matter."""

    __slots__ = ("before", "size", "target", "times", "total")

    def __init__(self, target: Tensor, size: int) -> None:
        self.target = target
        self.size = size
        self.total: Any = 0
        self.times = 0

    def add(self, mean: MeanUpdate) -> None:
        data = mean.data
        self.total = self.total + (data.sum(0) if mean.mapped else data * self.size)
        self.times += mean.times * self.size
        self.before = mean.before

    def apply_updates(self) -> None:
        update_average(self.target, self.total, self.before, self.times)


def update_average(target: Tensor, data: Tensor, before: Tensor, times: int = 1) -> None:
    """Apply a `MeanUpdate` here, or log it if the running level logs writes."""
    level = find_logging_level()
    if level is None or not is_shared_external(target, level):
        before = before.to(target.dtype)
        n = before + times
        target.mul_(before / n).add_(data / n)
        return
    require_all_examples(level, "batch_norm", target)
    if is_mapped(before, level):
        raise make_shared_write_error("batch_norm", target, [before])
    while isinstance(data, Wrapper) and data.level is not level and level.is_outside(data.level):
        if is_mapped(data, data.level):
            raise make_shared_write_error("batch_norm", target, [data])
        data = data.value  # of a jvp inside: statistics have no tangent
    mapped = is_mapped(data, level)
    with run_outside(level):
        data = move_to_front(data) if mapped else lower_shared(data, level)
        mean = MeanUpdate(data, mapped, clone_unlogged(lower_shared(before, level)), times)
        level.state.mutation_log.log_update(
            "batch_norm", target, lower_shared(target, level), mean, level.size
        )


def find_logging_level() -> Any:
    """The innermost running level whose examples are calls of the function; None without one."""
    level: Any = top()
    while level is not None and not (hasattr(level, "state") and level.state.calls is None):
        level = level.parent
    return level


def is_external(target: Any, level: Any) -> bool:
    """True if ``target`` is a tensor from before the call."""
    return not (type(target) is BatchedTensor and target.level is level and not target.is_external)


def is_shared_external(t: Any, level: Any) -> bool:
    """True if ``t`` is a tensor from before the call, the same for all examples."""
    if type(t) is BatchedTensor and t.level is level:
        return t.is_external and t.axis is None
    return isinstance(t, Tensor)


def require_all_examples(level: Any, func: Any, target: Tensor) -> None:
    """Raise `Diverged`, so that all examples run again in groups, if only some of them run now."""
    root = level.root
    if root is not level:
        raise make_divergence(
            root, [[*range(root.size)]], lambda: make_shared_write_error(str(func), target, [])
        )
