"""Running one call again for each group of examples that agree, in the middle of a function.

What the call has written into tensors, or drawn, by the time its examples part would be written and
drawn twice. Then the whole function is run again instead (`Apart`), for which all is undone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forall._batching.parts import part, prepare
from forall._batching.questions import repeatable
from forall._batching.worlds import Apart, World, now, running
from forall._batching.writing import written
from forall._core.parting import Parted
from forall._torch.dispatch import functions_off, no_dispatch

if TYPE_CHECKING:
    from collections.abc import Callable


def apart(call: Callable[[], Any], join: Callable[[list[tuple[World, Any]]], Any]) -> Any:
    """``call()``, once for all that run or, where they part inside, once for each group."""
    todo, done = [now()], []
    while todo:
        world = todo.pop(0)
        before = written.times
        try:
            with running(world):
                done.append((world, repeatable(call)))
        except Parted as parted:
            root = parted.level.root
            parted.level.parted = None
            if written.times != before:
                raise Apart from None
            prepare(root)
            with no_dispatch(), functions_off():
                groups = [world.of(root).rows[g] for g in parted.groups]
            todo = [World({**world.parts, root: part(root, rows)}) for rows in groups] + todo
    return done[0][1] if len(done) == 1 else join(done)
