"""Records of what a call did to memory from before it, to undo the call and to compare groups.

A call whose examples diverge is made again, for one group of them after another. The first run must
leave nothing behind, and the effect of the groups must not depend on their order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._compat.dispatch_state import below_autograd, enable_autograd_below, functions_off
from forall._compat.private_api import get_version, set_version
from forall._compat.trace_modes import hide_own_tensors
from forall._compat.wrapper_tensor import Wrapper
from forall._core.levels import top
from forall._vmap.batched_tensor import BatchedTensor

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable


Tensor = torch.Tensor


class UndoState:
    """Values and histories of older tensors, from before the first write of a call."""

    __slots__ = ("grads", "histories", "kept", "values", "walked")

    def __init__(self) -> None:
        self.kept: set[Hashable] = set()  # places that ``values`` has
        self.values: list[tuple[Tensor, Tensor, int]] = []
        self.grads: dict[int, tuple[Tensor, Tensor | None, Tensor | None]] = {}
        self.histories: dict[int, tuple[Tensor, int, Any, Tensor | None]] = {}
        self.walked: set[Any] = set()  # nodes of history from before the call

    def keep_value(self, at: Hashable, value: Tensor) -> None:
        if at not in self.kept:
            self.kept.add(at)
            self.values.append((value, clone_unlogged(value), get_version(value)))

    def keep_grad(self, leaf: Tensor) -> None:
        if id(leaf) not in self.grads:
            with functions_off():
                grad = leaf.grad
                self.grads[id(leaf)] = leaf, grad, None if grad is None else clone_unlogged(grad)

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

    def unwrap_shared_grads(self) -> None:
        """Make a .grad that all examples of an ended level share an ordinary tensor."""
        if not self.grads:
            return
        with functions_off():
            for leaf, *_ in self.grads.values():
                grad = leaf.grad
                if (
                    type(grad) is BatchedTensor
                    and grad.axis is None
                    and not (grad.level.active or grad.requires_grad)
                ):
                    leaf.grad = grad.value

    def keep_history(self, target: Tensor) -> None:
        """Keep the history of an older tensor, before autograd records a write on it."""
        base = target if target._base is None else target._base
        if id(base) not in self.histories:
            with (
                functions_off(),
                _hide_from_levels(base),
                enable_autograd_below(grad=True, forward=False),
            ):
                held = None if base.grad_fn is None else base.clone()
            self.histories[id(base)] = base, get_version(base), base.grad_fn, held

    def undo(self) -> None:
        """Put all values and histories back, since the call will be made again."""
        with functions_off(), below_autograd(), torch.enable_grad(), _suspend_logs():
            for value, held, number in reversed(self.values):
                value.copy_(held)
                set_version(value, number)
            for leaf, grad, held in self.grads.values():
                if grad is not None:
                    grad.copy_(held)
                leaf.grad = grad
        with functions_off(), torch.enable_grad():
            for base, number, node, held in self.histories.values():
                with _hide_from_levels(base):
                    if base.grad_fn is not node:
                        _restore_history(base, held)
                    set_version(base, number)


def _hide_from_levels(base: Tensor) -> Any:
    """Keep levels from taking an operation on a tensor for the user's.

    A wrapper has no memory, and nor has a fake tensor, whose own mode has to see it.
    """
    return _suspend_logs() if isinstance(base, Wrapper) else hide_own_tensors()


def _restore_history(base: Tensor, held: Tensor | None) -> None:
    """Give a tensor the history that it had, by that of a copy from then."""
    Tensor.detach_(base)  # not by what a class makes of it: its value is put back apart
    if held is not None:
        base.copy_(held)


def clone_unlogged(t: Tensor) -> Tensor:
    """A copy of an older tensor, with its tangent, that no level takes for a read of the user's."""
    if isinstance(t, Wrapper):
        with torch.enable_grad(), _suspend_logs():
            return t.clone()
    with hide_own_tensors():  # a fake tensor has no memory, so its own mode has to see that
        return t.clone()


def find_logs(level: Any) -> list[tuple[Any, Any]]:
    """A level and those further out that have a ledger, each with its own."""
    found = []
    while level is not None:
        state = getattr(level, "state", None)
        if state is not None:
            found.append((level, state.mutation_log))
        level = level.parent
    return found


class _suspend_logs:
    """Keep levels further out from taking the operations in the body for the user's."""

    __slots__ = ("ledgers",)

    def __enter__(self) -> None:
        self.ledgers = find_logs(top())
        for level, ledger in self.ledgers:
            level.state.mutation_log = type(ledger)()

    def __exit__(self, *_: object) -> None:
        for level, ledger in self.ledgers:
            level.state.mutation_log = ledger


def get_grad_key(leaf: Tensor) -> int:
    """The key of a leaf's .grad among those of memory, which are not negative."""
    return ~id(leaf)


IN_ORDER, ADDED, READ, ROWS = "in order", "added to", "read", "rows of"


class GroupEffects:
    """The effects of groups of examples on older memory: no group may see those of another."""

    __slots__ = ("ledgers", "seen")

    def __init__(self) -> None:
        self.ledgers: list[Any] = []  # those of groups that run, or have run
        self.seen: dict[int, str] = {}

    def add_group(self, ledger: Any, rows: Iterable[int]) -> bool:
        """True if no other group can tell what this one did, to ``rows`` of arguments either."""
        mine = classify_effects(ledger, rows)
        if any(
            self.seen.get(key, how) != how or (how is IN_ORDER and key in self.seen)
            for key, how in mine.items()
        ):
            return False
        self.seen.update(mine)
        return True

    def undo(self) -> None:
        for ledger in reversed(self.ledgers):
            ledger.undo_state.undo()


def classify_effects(ledger: Any, rows: Iterable[int]) -> dict[int, str]:
    """The kind of effect that a call had on each piece of older memory."""
    found = dict.fromkeys(ledger.read, READ)
    for key in rows:
        found[key] = IN_ORDER if key in found else ROWS
    for key in ledger.find_grad_keys():
        found[key] = ADDED
    for key, account in ledger.accounts.items():
        found[key] = IN_ORDER if account.chains else ADDED
    return {**found, **dict.fromkeys(ledger.overwritten, IN_ORDER)}
