"""Sources of the random numbers of a `vmap`: its flag, its key, or a scope."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._compat.dispatch_state import functions_off, no_dispatch
from forall._core.levels import run_outside, stack
from forall._random import key_scope
from forall._random.keys import fold_each
from forall._vmap.active_set.active_mask import CannotMerge
from forall._vmap.active_set.merge import is_stale, restrict_to_running
from forall._vmap.batched_tensor import wrap_stack

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forall._vmap.vmap_level import VmapLevel


class CallRandomness:
    """Random state of one call of `vmap`: all its chunks draw from one key, or from one count.

    A key is the flag's, or the next key of the enclosing scope. With a key each example gets a
    scope of its own. ``"same"`` inside a scope draws for all examples from that scope.
    """

    __slots__ = ("_count", "_key", "_outer", "flag")

    def __init__(self, randomness: str | torch.Tensor) -> None:
        self._outer = key_scope.scopes.running
        self._key: Callable[[], torch.Tensor] | None = None
        self.flag = "error"
        if isinstance(randomness, torch.Tensor):
            self._key = lambda: randomness
        else:
            self.flag = randomness
            if self._outer is not None and randomness != "same":
                self._key = self._outer.reserve()
        self._count = 0 if self._outer is None else self._outer.count

    def scope(self, level: VmapLevel, numbers: Sequence[int]) -> Any:
        """The scope in which the examples of ``level``, which have these numbers, draw."""
        key = self._key
        if key is None:
            if self._outer is not None:
                self._outer.count = self._count  # each chunk starts from the same count
            return self._outer

        def of_examples() -> torch.Tensor:
            with run_outside(level), functions_off():
                return wrap_stack(fold_each(key(), numbers), 0, level)

        return key_scope.RandomScope(of_examples, level.take_next_draw)


def take_next_draw(
    scope: key_scope.RandomScope, level: VmapLevel
) -> tuple[Callable[[], torch.Tensor], Any, Any]:
    """Return the key of the examples that run, their next draw's number, and all counts after it.

    ``level`` is the innermost in which the scope was entered.
    """
    served = scope.count
    outer = level.parent if stack.diverged else None
    while outer is not None:
        if outer.root is not outer:  # its examples would need counts of their own here
            raise CannotMerge("random numbers for some of the examples of a vmap further out")
        outer = outer.parent
    if level.sub_level is None and type(served) is int:
        return lambda: scope.key, served, served + 1
    acting: Any = level.acting_level
    with no_dispatch(), functions_off():
        counts = torch.full((level.size,), served) if type(served) is int else served.clone()
        rows = slice(None) if level.sub_level is None else acting.examples.rows
        now = counts[rows].clone()
        counts[rows] = now + 1
        number: Any = int(now[0]) if bool((now == now[0]).all()) else None
    if number is None:
        number = wrap_stack(now, 0, acting)
    return (
        lambda: restrict_to_running(scope.key) if is_stale(scope.key) else scope.key,
        number,
        counts,
    )


def get_direction_flag(randomness: str) -> str:
    """The flag of a `vmap` over directions, all of which see the same draws."""
    return "same" if randomness == "error" and key_scope.scopes.running is not None else randomness
