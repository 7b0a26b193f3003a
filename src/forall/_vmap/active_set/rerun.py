"""Reruns of one call for each group of examples that agree, in the middle of a function.

If the call has written into tensors, or drawn, before its examples diverge, that would happen
twice. Then the whole function is run again instead (`Apart`), and all its effects are undone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forall._core.divergence import Parted
from forall._core.levels import stack
from forall._random import key_scope
from forall._vmap.active_set.active_mask import (
    Apart,
    World,
    now,
    running,
)
from forall._vmap.active_set.sub_level import chosen, common, prepare
from forall._vmap.concretize_listeners import repeatable
from forall._vmap.mutation.mutation_log import written

if TYPE_CHECKING:
    from collections.abc import Callable


def apart(call: Callable[[], Any], join: Callable[[list[tuple[World, Any]]], Any]) -> Any:
    """Return ``call()``, made once for all or, where examples diverge, once for each group."""
    todo, done = [now()], []
    while todo:
        world = todo.pop(0)
        before = _used()
        try:
            with running(world):
                done.append((world, repeatable(call)))
        except Exception:
            if done or todo:  # some examples fail and may catch it, others do not
                raise Apart("code that is not converted fails for some examples alone") from None
            raise
        except Parted as parted:
            root = parted.level
            root.parted = None
            if any(a is not b for a, b in zip(_used(), before, strict=True)):
                raise Apart(
                    "code that is not converted wrote, or drew, before its examples parted"
                ) from None
            todo = _cut(world, root, parted.groups) + todo
    return done[0][1] if len(done) == 1 else join(done)


def _used() -> tuple:
    """Counts and objects that change if anything was written, or drawn."""
    scope = key_scope.running()
    return written.times, scope, None if scope is None else scope.count


def _cut(world: World, root: Any, groups: list[list[int]]) -> list[World]:
    """Split an active set into the pieces that these groups of a level's examples make of it."""
    prepare(root)
    pieces = []
    for group in groups:
        if stack.late is not None:
            stack.late()
        pieces.append(common(world.of(root), chosen(root, group)))
    found = [piece for piece in pieces if piece is not None]
    if len(found) < 2:
        raise Apart("code that is not converted parts in the same way once more") from None
    return [World({**world.parts, root: piece}) for piece in found]
