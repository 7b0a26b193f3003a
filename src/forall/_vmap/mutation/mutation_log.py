"""The mutation log of a call: its reads of memory that was there before it, and its writes.

NOTE [older memory]
    In the loop every example sees what the examples before it left in a tensor from outside. Under
    vmap all run as one, so a write into such memory is right only if the order of the examples
    cannot show: the function adds to it and reads none of it, before or after. The ledger of a
    level logs which memory operators have read, and which they have written to. Additions are
    logged and applied at the end of the call, all examples at once; an overwrite runs once. A mix
    of both, or a read of what others wrote, is an error. A call that fails has added nothing.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from forall._compat import exception_safety, symbolic_eye
from forall._compat.dispatch_state import below_autograd, functions_off
from forall._compat.storage import storage_of
from forall._compat.wrapper_tensor import Wrapper
from forall._core.errors import columns, short
from forall._core.levels import top
from forall._vmap.batched_tensor import Batched, Family
from forall._vmap.mutation.pending_updates import Account, place
from forall._vmap.mutation.rollback import Before, grad_of, ledgers_from

Tensor = torch.Tensor


def memory(t: Tensor) -> int:
    """A key of the memory that a tensor lies in; two names of the same memory have the same key."""
    while isinstance(t, Wrapper):
        if type(t) is Batched and not t.older:  # made under an outer level: it may yet get an axis
            if t.family is None:
                t.family = Family(t.value, t.axis, t.older)
                t.family.add(t)
            return id(t.family)
        t = t.value
    try:
        return storage_of(t)
    except NotImplementedError:  # sparse: no memory that another tensor could view
        return id(t)


def summed_grad(leaf: Tensor) -> RuntimeError:
    return RuntimeError(
        "vmap: .grad is read where backward() has left the sum over all examples in it.\n"
        f"{columns([('the leaf', short(leaf), 'from before the call, one for all examples')])}\n"
        "In the loop an example would meet the sum over those before it.\n"
        "torch.autograd.grad(loss, tensor) gives each example its own gradient."
    )


def note_read(call: str, t: Tensor) -> None:
    """Log a read that is no operator, of the memory of an ordinary tensor."""
    level: Any = top()
    while level is not None:
        if getattr(level, "notes", False):
            level.ledger.reads(call, t)
        level = level.parent


class _Written(threading.local):
    """Counts of this thread's writes into examples, draws for them, and logged additions."""

    times = 0

    def __init__(self) -> None:
        self.named: list[Family] = []  # written to, of those with several names


written = _Written()
exception_safety.PUT_BACK.append(lambda *_: written.named.clear())


def note_write(target: Any) -> None:
    """Count a write and remember its target, for code that later asks what was written."""
    written.times += 1
    symbolic_eye.written()
    family = target.family if type(target) is Batched else None
    if family is not None:
        family.times += 1
        if family.names:
            written.named.append(family)


def changed() -> list[Family]:
    """The families of several names that were written into since the last call of this function."""
    found = [*dict.fromkeys(written.named)]
    written.named.clear()
    return found


_FEW = 100
_SETS = ("read", "mapped_written", "overwritten", "renewed", "leaves")


class Ledger:
    """The log of one call's reads and writes of memory from before it. See NOTE [older memory]."""

    __slots__ = (
        "accounts",
        "arguments",
        "before",
        "leaves",
        "mapped_written",
        "overwritten",
        "read",
        "renewed",
        "seen",
        "undoable",
    )

    def __init__(self) -> None:
        self.read: set[int] = set()
        self.seen: dict[int, Tensor] = {}  # some whose memory was read, kept so that ids hold
        self.arguments: list[Tensor] = []  # the mapped ones
        self.mapped_written: set[int] = set()
        self.overwritten: set[int] = set()
        self.renewed: set[int] = set()  # overwritten as a whole, before anything read it
        self.accounts: dict[int, Account] = {}
        self.before = Before()
        self.undoable = False  # whether the call may have to be made again
        self.leaves: set[int] = set()  # ids of those that a backward pass of the call added to

    def is_mapped(self, key: int) -> bool:
        """True if ``key`` is the memory of a mapped argument."""
        return any(memory(a) == key for a in self.arguments)

    def read_by(self, func: Any, met: list[Tensor]) -> None:
        """Log the reads of an operator's operands, in little time: every operator asks for it."""
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
        """Log a write into a mapped argument: each example its own part, if none reads others."""
        key = memory(target)
        if key in self.read:
            raise conflict(f"{func} writes to", target, "captured and read")
        self.mapped_written.add(key)

    def overwrites(self, func: Any, target: Tensor, whole: bool) -> None:
        """Log a write of the same data for all examples, which runs once."""
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
        """Log an update of the target that adds up; ``below`` is the target one level down."""
        if not self.account(func, target).add(below, update, size):
            raise conflict(f"{func} writes to", target, "written to otherwise")

    def account(self, func: Any, target: Tensor) -> Account:
        """The pending updates of a target's memory, which nothing else may read or overwrite."""
        written.times += 1
        key = memory(target)
        if key in self.read or self.is_mapped(key):
            raise conflict(f"{func} adds to", target, "read")
        if key in self.overwritten:
            raise conflict(f"{func} adds to", target, "overwritten")
        if self.undoable:
            self.before.keep_history(target)
        return self.accounts.setdefault(key, Account())

    def keep(self, value: Tensor) -> None:
        """Remember what an older tensor, from just outside the level, holds before a write."""
        if self.undoable:
            self.before.keep((memory(value), place(value)), value)

    def keep_grads(self, node: Any) -> None:
        """Remember the .grad of leaves that a backward pass which goes on from ``node`` adds to."""
        if self.undoable:
            self.before.keep_grads(node)

    def sets_grad(self, leaf: Tensor) -> None:
        self.before.keep_grad(leaf)
        self.leaves.discard(id(leaf))
        self.overwritten.add(grad_of(leaf))

    def grads(self) -> list[int]:
        """The memory of gradients that backward passes of the call added to."""
        leaves = [leaf for leaf, *_ in self.before.grads.values()]
        with functions_off():
            known = [x.grad for x in leaves if x.grad is not None]
        return [*map(grad_of, leaves), *map(memory, known)]

    def forget(self) -> None:
        """Drop what was kept to undo the call, which will not be made again."""
        self.undoable = False
        if self.before.has_kept():
            self.before = Before()

    def mark(self) -> tuple:
        """A snapshot of the log, for `back_to`."""
        sets = [set(getattr(self, name)) for name in _SETS]
        return sets, {key: account.copy() for key, account in self.accounts.items()}

    def back_to(self, mark: tuple) -> None:
        """Reset the log to a snapshot, since what followed it was undone."""
        sets, accounts = mark
        self.accounts = {key: account.copy() for key, account in accounts.items()}
        for name, known in zip(_SETS, sets, strict=True):
            setattr(self, name, set(known))

    def settle(self, size: int) -> None:
        """Apply the pending updates at the end of the call, just outside its level."""
        if self.accounts and size:
            with functions_off(), below_autograd():
                for account in self.accounts.values():
                    for target in account.targets():
                        self.keep(target)
                    account.settle()


def marks_of(level: Any) -> list[tuple[Ledger, tuple]]:
    """The ledgers of a level and of those further out, each with a snapshot."""
    if level is None:
        return []
    return [(ledger, ledger.mark()) for _, ledger in ledgers_from(level)]


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
