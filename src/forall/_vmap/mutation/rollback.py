"""Records of what a call did to memory from before it, to undo the call and to compare groups.

A call whose examples diverge is made again, for one group of them after another. The first run must
leave nothing behind, and the effect of the groups must not depend on their order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._compat.dispatch_state import autograd_below, below_autograd, functions_off
from forall._compat.private_api import set_version, version
from forall._compat.trace_modes import unseen
from forall._compat.wrapper_tensor import Wrapper
from forall._core.levels import top
from forall._vmap.batched_tensor import Batched

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from forall._vmap.mutation.mutation_log import Ledger

Tensor = torch.Tensor


class Before:
    """Values and histories of older tensors, from before the first write of a call."""

    __slots__ = ("grads", "histories", "kept", "values", "walked")

    def __init__(self) -> None:
        self.kept: set[Hashable] = set()  # places that ``values`` has
        self.values: list[tuple[Tensor, Tensor, int]] = []
        self.grads: dict[int, tuple[Tensor, Tensor | None, Tensor | None]] = {}
        self.histories: dict[int, tuple[Tensor, int, Any, Tensor | None]] = {}
        self.walked: set[Any] = set()  # nodes of history from before the call

    def has_kept(self) -> bool:
        return bool(self.kept or self.grads or self.histories or self.walked)

    def keep(self, at: Hashable, value: Tensor) -> None:
        if at not in self.kept:
            self.kept.add(at)
            self.values.append((value, as_it_is(value), version(value)))

    def keep_grad(self, leaf: Tensor) -> None:
        if id(leaf) not in self.grads:
            with functions_off():
                grad = leaf.grad
                self.grads[id(leaf)] = leaf, grad, None if grad is None else as_it_is(grad)

    def keep_grads(self, node: Any) -> None:
        """Keep the .grad of all leaves that a backward pass may reach from this node of history."""
        todo = [node]
        while todo:
            node = todo.pop()
            if node is None or node in self.walked:
                continue
            self.walked.add(node)
            leaf = getattr(node, "variable", None)
            if leaf is not None:
                self.keep_grad(leaf)
            todo += [n for n, _ in node.next_functions]

    def settle_grads(self) -> None:
        """Make a .grad that all examples of an ended level share an ordinary tensor."""
        if not self.grads:
            return
        with functions_off():
            for leaf, *_ in self.grads.values():
                grad = leaf.grad
                if (
                    type(grad) is Batched
                    and grad.axis is None
                    and not (grad.level.active or grad.requires_grad)
                ):
                    leaf.grad = grad.value

    def keep_history(self, target: Tensor) -> None:
        """Keep the history of an older tensor, before autograd records a write on it."""
        base = target if target._base is None else target._base
        if id(base) not in self.histories:
            with functions_off(), _aside(base), autograd_below(grad=True, forward=False):
                held = None if base.grad_fn is None else base.clone()
            self.histories[id(base)] = base, version(base), base.grad_fn, held

    def undo(self) -> None:
        """Put all values and histories back, since the call will be made again."""
        with functions_off(), below_autograd(), torch.enable_grad(), _unnoted():
            for value, held, number in reversed(self.values):
                value.copy_(held)
                set_version(value, number)
            for leaf, grad, held in self.grads.values():
                if grad is not None:
                    grad.copy_(held)
                leaf.grad = grad
        with functions_off(), torch.enable_grad():
            for base, number, node, held in self.histories.values():
                with _aside(base):
                    if base.grad_fn is not node:
                        _give_history(base, held)
                    set_version(base, number)


def _aside(base: Tensor) -> Any:
    """Keep levels from taking an operation on a tensor for the user's.

    A wrapper has no memory, and nor has a fake tensor, whose own mode has to see it.
    """
    return _unnoted() if isinstance(base, Wrapper) else unseen()


def _give_history(base: Tensor, held: Tensor | None) -> None:
    """Give a tensor the history that it had, by that of a copy from then."""
    Tensor.detach_(base)  # not by what a class makes of it: its value is put back apart
    if held is not None:
        base.copy_(held)


def as_it_is(t: Tensor) -> Tensor:
    """A copy of an older tensor, with its tangent, that no level takes for a read of the user's."""
    if isinstance(t, Wrapper):
        with torch.enable_grad(), _unnoted():
            return t.clone()
    with unseen():  # a fake tensor has no memory, so its own mode has to see that
        return t.clone()


def ledgers_from(level: Any) -> list[tuple[Any, Ledger]]:
    """A level and those further out that have a ledger, each with its own."""
    found = []
    while level is not None:
        ledger = getattr(level, "ledger", None)
        if ledger is not None:
            found.append((level, ledger))
        level = level.parent
    return found


class _unnoted:
    """Keep levels further out from taking the operations in the body for the user's."""

    __slots__ = ("ledgers",)

    def __enter__(self) -> None:
        self.ledgers = ledgers_from(top())
        for level, ledger in self.ledgers:
            level.ledger = type(ledger)()

    def __exit__(self, *_: object) -> None:
        for level, ledger in self.ledgers:
            level.ledger = ledger


def grad_of(leaf: Tensor) -> int:
    """The key of a leaf's .grad among those of memory, which are not negative."""
    return ~id(leaf)


IN_ORDER, ADDED, READ, ROWS = "in order", "added to", "read", "rows of"


class Touched:
    """The effects of groups of examples on older memory: no group may see those of another."""

    __slots__ = ("ledgers", "seen")

    def __init__(self) -> None:
        self.ledgers: list[Ledger] = []  # those of groups that run, or have run
        self.seen: dict[int, str] = {}

    def by(self, ledger: Ledger, rows: Iterable[int]) -> bool:
        """True if no other group can tell what this one did, to ``rows`` of arguments either."""
        mine = touched(ledger, rows)
        if any(
            self.seen.get(key, how) != how or (how is IN_ORDER and key in self.seen)
            for key, how in mine.items()
        ):
            return False
        self.seen.update(mine)
        return True

    def undo(self) -> None:
        for ledger in reversed(self.ledgers):
            ledger.before.undo()


def touched(ledger: Ledger, rows: Iterable[int]) -> dict[int, str]:
    """The kind of effect that a call had on each piece of older memory."""
    found = dict.fromkeys(ledger.read, READ)
    for key in rows:
        found[key] = IN_ORDER if key in found else ROWS
    for key in ledger.grads():
        found[key] = ADDED
    for key, account in ledger.accounts.items():
        found[key] = IN_ORDER if account.chains else ADDED
    return {**found, **dict.fromkeys(ledger.overwritten, IN_ORDER)}
