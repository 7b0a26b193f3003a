"""Reruns of one call for each group of examples that agree, in the middle of a function.

If the call has written into tensors, or drawn, before its examples diverge, that would happen
twice. Then the whole function is run again instead (`CannotMerge`), and all its effects are undone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forall._core.divergence import Diverged
from forall._core.levels import stack
from forall._random import key_scope
from forall._vmap.active_set.active_mask import (
    ActiveSet,
    CannotMerge,
    get_active_set,
    run_active_set,
)
from forall._vmap.active_set.sub_level import intersect_examples, select_sub_level
from forall._vmap.concretize_listeners import run_repeatably
from forall._vmap.mutation.mutation_log import write_counts

if TYPE_CHECKING:
    from collections.abc import Callable


def run_per_group(
    call: Callable[[], Any], join: Callable[[list[tuple[ActiveSet, Any]]], Any]
) -> Any:
    """Return ``call()``, made once for all or, where examples diverge, once for each group."""
    todo, done = [get_active_set()], []
    while todo:
        world = todo.pop(0)
        before, known = _take_side_effects(), _find_divergence()
        try:
            with run_active_set(world):
                done.append((world, run_repeatably(call)))
        except (Exception, Diverged) as error:
            diverged = _find_divergence()
            if diverged is None or (known is not None and diverged[1] is known[1]):
                if isinstance(error, Exception) and (done or todo):
                    # some examples fail and may catch it, others do not
                    raise CannotMerge(
                        "code that is not converted fails for some examples alone"
                    ) from None
                raise
            root, (groups, _) = diverged
            root.state.divergence = None
            if any(a is not b for a, b in zip(_take_side_effects(), before, strict=True)):
                raise CannotMerge(
                    "code that is not converted wrote, or drew, before its examples diverged"
                ) from None
            todo = _split_active_set(world, root, groups) + todo
    return done[0][1] if len(done) == 1 else join(done)


def _find_divergence() -> tuple[Any, Any] | None:
    """Return the level whose examples have diverged, and the note of it; None if none has one.

    The note tells of an exception that torch's parsers have turned into a `TypeError` of theirs.
    """
    level = stack.top
    while level is not None:
        state = getattr(level.root, "state", None)
        if state is not None and state.divergence is not None:
            return level.root, state.divergence
        level = level.parent
    return None


def _take_side_effects() -> tuple:
    """Counts and objects that change if anything was written, or drawn."""
    scope = key_scope.scopes.running
    return write_counts.times, scope, None if scope is None else scope.count


def _split_active_set(world: ActiveSet, root: Any, groups: list[list[int]]) -> list[ActiveSet]:
    """Split an active set into the pieces that these groups of a level's examples make of it."""
    pieces = []
    for group in groups:
        if stack.late is not None:
            stack.late()
        pieces.append(intersect_examples(world.get_level(root), select_sub_level(root, group)))
    found = [piece for piece in pieces if piece is not None]
    if len(found) < 2:
        raise CannotMerge("code that is not converted parts in the same way once more") from None
    return [ActiveSet({**world.parts, root: piece}) for piece in found]
