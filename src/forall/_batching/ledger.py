"""What a call does to memory that was there before it.

NOTE [older memory]
    In the loop every example meets what those before it left in a tensor from outside. Here all
    run as one, so a write into such memory is right only if nobody can tell: the function adds to
    it and reads none of it, before or after. The ledger of a level knows which memory operators
    have read, and which they have written to. What adds up is written down and settled at the end
    of the call, all examples at once; what overwrites runs once; a mix of both, or a read of what
    others wrote, is an error. A call that fails has added nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forall._batching.batched import Batched, Family
from forall._batching.families import front, is_mapped, lower
from forall._core.errors import columns, shared_write, short
from forall._core.levels import outside, top
from forall._torch.dispatch import below_autograd, functions_off, no_dispatch
from forall._torch.names import set_version, version
from forall._torch.wrapper import Wrapper

if TYPE_CHECKING:
    from collections.abc import Callable

    Place = tuple[int, tuple[int, ...], tuple[int, ...]]

Tensor = torch.Tensor


def memory(t: Tensor) -> int:
    """What two names of the same memory have in common."""
    while isinstance(t, Wrapper):
        if type(t) is Batched and not t.older:  # made under an outer level: it may yet be promoted
            if t.family is None:
                t.family = Family(t.value, t.axis, t.older)
                t.family.add(t)
            return id(t.family)
        t = t.value
    try:
        return t.untyped_storage()._cdata
    except NotImplementedError:  # sparse: no memory that another tensor could view
        return id(t)


def place(t: Tensor) -> Place:
    """Where a tensor lies in its memory."""
    return int(t.storage_offset()), tuple(t.shape), t.stride()


def apart(a: Place, b: Place) -> bool:
    """Whether what lies at ``a`` certainly shares nothing with what lies at ``b``."""
    (first, last), (other_first, other_last) = _span(a), _span(b)
    return last < other_first or other_last < first


def _span(p: Place) -> tuple[int, int]:
    offset, shape, stride = p
    return offset, offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))


class Step(NamedTuple):
    """``s <- factor * s + data``: what each example does to the entries of a tensor.

    ``data`` is a stack (B, *S) if ``mapped``, else the same for all examples.
    """

    factor: Any
    data: Any
    mapped: bool

    def total(self, size: int) -> Any:
        """What all examples add together."""
        return self.data.sum(0, dtype=self.data.dtype) if self.mapped else self.data * size


class Mean(NamedTuple):
    """``s <- (n * s + data) / (n + times)``: what ``times`` calls do to an average of n."""

    data: Any
    mapped: bool
    before: Tensor  # n, when the call began
    times: int = 1


class Account:
    """What is to be done to one piece of older memory when the call ends."""

    __slots__ = ("chains", "recorded", "sums")

    def __init__(self) -> None:
        self.sums: list[tuple[Place, Callable[[], object]]] = []
        self.chains: dict[Place, Chain | Average] = {}
        self.recorded = False  # whether autograd has taken down any of it

    def add(self, target: Tensor, update: Any, size: int) -> bool:
        """Note a `Step` or a function that adds; False where the order of writes would matter."""
        at = place(target)
        chained = [p for p in self.chains if not apart(at, p)]
        if not chained and _only_adds(update):
            self.sums.append((at, _adding(target, update, size)))
            return True
        if (
            callable(update)
            or any(p != at for p in chained)
            or not all(apart(at, p) for p, _ in self.sums)
        ):
            return False
        kind = Chain if type(update) is Step else Average
        chain = self.chains.setdefault(at, kind(target, size))
        if type(chain) is not kind or self.recorded:
            return False
        chain.add(update)
        return True

    def settle(self) -> None:
        for _, add in self.sums:
            add()
        for chain in self.chains.values():
            chain.settle()


def _only_adds(update: Any) -> bool:
    if type(update) is Step:
        return type(update.factor) is int and update.factor == 1
    return callable(update)


def _adding(target: Tensor, update: Any, size: int) -> Callable[[], object]:
    if type(update) is not Step:
        return update
    total = update.total(size)
    return lambda: target.add_(total)


_EXACT = {int: torch.int64, float: torch.float64, complex: torch.complex128}


class Chain:
    """Steps ``s <- factor * s + data`` that each example takes, one example after another."""

    __slots__ = ("data", "factor", "size", "target")

    def __init__(self, target: Tensor, size: int) -> None:
        self.target = target
        self.size = size
        self.factor: Any = 1
        self.data: Any = 0  # (B, *S), or the same for all examples

    def add(self, step: Step) -> None:
        self.factor = step.factor * self.factor
        self.data = step.factor * self.data + step.data

    def settle(self) -> None:
        """s <- a**B * s + the sum of a**(B-1-i) * data[i]."""
        dtype, factor = self.target.dtype, self.factor
        a = torch.as_tensor(factor, dtype=_EXACT.get(type(factor)), device=self.target.device)
        if dtype.is_floating_point:
            a = a.to(torch.promote_types(a.dtype, torch.float64))
        elif type(factor) is int:
            a = a.to(dtype)
        a = a.unsqueeze(0)
        size, rank = self.size, max(a.dim() - 1, self.target.dim())
        a = a.reshape(1, *(1,) * (rank + 1 - a.dim()), *a.shape[1:])
        left = torch.arange(size - 1, -1, -1, device=a.device).reshape(size, *(1,) * rank)
        total = ((a**left).to(dtype) * self.data).sum(0)
        self.target.mul_((a[0] ** size).to(dtype)).add_(total)


class Average:
    """A `Mean` of each example, one after another: in which order is all the same."""

    __slots__ = ("before", "size", "target", "times", "total")

    def __init__(self, target: Tensor, size: int) -> None:
        self.target = target
        self.size = size
        self.total: Any = 0
        self.times = 0

    def add(self, mean: Mean) -> None:
        data = mean.data
        self.total = self.total + (data.sum(0) if mean.mapped else data * self.size)
        self.times += mean.times * self.size
        self.before = mean.before

    def settle(self) -> None:
        average(self.target, self.total, self.before, self.times)


def average(target: Tensor, data: Tensor, before: Tensor, times: int = 1) -> None:
    """A `Mean`, done here or noted by the level that runs."""
    level = noting_level()
    if level is None or not is_shared_older(target, level):
        before = before.to(target.dtype)
        n = before + times
        target.mul_(before / n).add_(data / n)
        return
    if is_mapped(before, level):
        raise shared_write("batch_norm", target, [before])
    while isinstance(data, Wrapper) and data.level is not level and level.is_outside(data.level):
        if is_mapped(data, data.level):
            raise shared_write("batch_norm", target, [data])
        data = data.value  # of a jvp inside: statistics have no tangent
    mapped = is_mapped(data, level)
    with outside(level):
        data = front(data) if mapped else lower(data, level)
        mean = Mean(data, mapped, _as_it_is(lower(before, level)), times)
        level.ledger.note("batch_norm", target, lower(target, level), mean, level.size)


def _as_it_is(t: Tensor) -> Tensor:
    """A copy of an older tensor that no level takes for a read of the user's."""
    if isinstance(t, Wrapper):
        return t.clone()
    with no_dispatch():
        return t.clone()


def summed_grad(leaf: Tensor) -> RuntimeError:
    return RuntimeError(
        "vmap: .grad is read where backward() has left the sum over all examples in it.\n"
        f"{columns([('the leaf', short(leaf), 'from before the call, one for all examples')])}\n"
        "In the loop an example would meet the sum over those before it.\n"
        "torch.autograd.grad(loss, tensor) gives each example its own gradient."
    )


def note_read(call: str, t: Tensor) -> None:
    """A read that is no operator: the memory of an ordinary tensor."""
    level: Any = top()
    while level is not None:
        if getattr(level, "notes", False):
            level.ledger.reads(call, t)
        level = level.parent


def noting_level() -> Any:
    """The innermost running level whose examples are calls of the function; None without one."""
    level: Any = top()
    while level is not None and not (hasattr(level, "ledger") and level.calls is None):
        level = level.parent
    return level


def is_shared_older(t: Any, level: Any) -> bool:
    """Whether this is a tensor from before the call, the same for all examples."""
    if type(t) is Batched and t.level is level:
        return t.older and t.axis is None
    return isinstance(t, Tensor)


_FEW = 100


class Ledger:
    """See NOTE [older memory]."""

    __slots__ = (
        "accounts",
        "arguments",
        "before",
        "grads",
        "kept",
        "leaves",
        "mapped_written",
        "overwritten",
        "read",
        "renewed",
        "seen",
    )

    def __init__(self) -> None:
        self.read: set[int] = set()
        self.seen: dict[int, Tensor] = {}  # some whose memory was read, kept so that ids hold
        self.arguments: list[Tensor] = []  # that are mapped
        self.mapped_written: set[int] = set()
        self.overwritten: set[int] = set()
        self.renewed: set[int] = set()  # overwritten as a whole, before anything read it
        self.accounts: dict[int, Account] = {}
        self.kept: set[Any] = set()  # places that ``before`` has
        self.before: list[tuple[Tensor, Tensor, int]] = []  # what was written to, and what it held
        self.grads: dict[int, tuple[Tensor, Tensor | None, Tensor | None]] = {}
        self.leaves: set[int] = set()  # on which a backward pass of the call left a gradient

    def is_mapped(self, key: int) -> bool:
        """Whether this is memory of a mapped argument."""
        return any(memory(a) == key for a in self.arguments)

    def read_by(self, func: Any, met: list[Tensor]) -> None:
        """`reads` for the operands of an operator, on every operator's way: a short one."""
        seen = self.seen
        for t in met:
            v = t.value if type(t) is Batched else t
            if id(v) not in seen:
                self.reads(func, t)
                if len(seen) < _FEW:
                    seen[id(v)] = v

    def reads(self, func: Any, t: Tensor) -> None:
        key = memory(t)
        if key in self.accounts or key in self.mapped_written:
            raise conflict(f"{func} reads", t, "written to")
        self.read.add(key)

    def writes_mapped(self, func: Any, target: Tensor) -> None:
        """A mapped argument: each example its own part, if none sees the others' parts."""
        key = memory(target)
        if key in self.read:
            raise conflict(f"{func} writes to", target, "captured and read")
        self.mapped_written.add(key)

    def overwrites(self, func: Any, target: Tensor, whole: bool) -> None:
        """The same data for all examples, so that once is enough."""
        key = memory(target)
        if key in self.renewed:
            return
        if key in self.accounts or self.is_mapped(key):
            raise conflict(f"{func} overwrites", target, "written to")
        if key in self.read:
            raise conflict(f"{func} overwrites", target, "read")
        self.overwritten.add(key)
        if whole:
            self.renewed.add(key)

    def note(self, func: Any, target: Tensor, below: Tensor, update: Any, size: int) -> None:
        """Something that adds up, to be done to the target, which is ``below`` one level down."""
        if not self.account(func, target).add(below, update, size):
            raise conflict(f"{func} writes to", target, "written to otherwise")

    def account(self, func: Any, target: Tensor) -> Account:
        """For what adds up: nothing else may see this memory."""
        key = memory(target)
        if key in self.read or self.is_mapped(key):
            raise conflict(f"{func} adds to", target, "read")
        if key in self.overwritten:
            raise conflict(f"{func} adds to", target, "overwritten")
        return self.accounts.setdefault(key, Account())

    def keep(self, value: Tensor) -> None:
        """Remember what an older tensor, from just outside the level, holds before a write."""
        key = memory(value), place(value)
        if key not in self.kept:
            self.kept.add(key)
            self.before.append((value, _as_it_is(value), version(value)))

    def keep_grad(self, leaf: Tensor | None) -> None:
        """Remember what a leaf's .grad holds before a backward pass adds to it."""
        if leaf is not None and id(leaf) not in self.grads:
            with functions_off():
                grad = leaf.grad
                self.grads[id(leaf)] = leaf, grad, None if grad is None else _as_it_is(grad)

    def undo(self) -> None:
        """Put older memory back as it was when the call began: the call will be made again."""
        with functions_off(), below_autograd():
            for value, held, number in reversed(self.before):
                value.copy_(held)
                set_version(value, number)
            for leaf, grad, held in self.grads.values():
                if grad is not None:
                    grad.copy_(held)
                leaf.grad = grad

    def settle(self, size: int) -> None:
        """At the end of the call, just outside its level."""
        if self.accounts and size:
            with functions_off(), below_autograd():
                for account in self.accounts.values():
                    account.settle()


def unrecorded(func: Any, t: Tensor) -> RuntimeError:
    return RuntimeError(
        f"vmap: {func} writes to a tensor from before the call, with a derivative at stake.\n"
        f"{columns([('written to', short(t), 'shared by all examples')])}\n"
        "Autograd would count this write once, or not at all, where the loop makes one for each "
        "example.\n"
        "Write what is detached (.detach()), or return it and do the write outside vmap."
    )


def conflict(does: str, t: Tensor, done: str) -> RuntimeError:
    return RuntimeError(
        f"vmap: {does} a tensor from before the call that the function has {done}.\n"
        f"{columns([('the tensor', short(t), 'shared by all examples')])}\n"
        "In the loop an example would meet what those before it wrote; here all run as one.\n"
        "Return what each example adds, and add it up outside vmap. To give every example its own, "
        "map the tensor (in_dims) or clone it inside the function (.clone())."
    )
