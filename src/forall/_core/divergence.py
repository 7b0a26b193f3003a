"""Divergence: the exceptions raised where Python needs one value and examples have different ones.

This is the basis of all control flow. Code that needs one Python value of differing examples raises
`Diverged`, which ends the run. The level's call then reruns each group of examples by itself. A
group agrees on all values that were read so far, so nothing of the first run has to be kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forall._compat.call_site import find_users_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from forall._compat.call_site import SourceLine


class Diverged(BaseException):
    """The examples of ``level`` diverge into these groups, of numbers from 0.

    This is no ``Exception``, so that the user's ``except Exception`` does not catch it.
    """

    def __init__(self, level: Any, groups: list[list[int]], place: SourceLine) -> None:
        super().__init__("examples diverge")
        self.level = level
        self.groups = groups
        self.place = place


class TimeExceeded(BaseException):
    """A trial of another way to run a call takes longer than the time allowed for it."""


class CannotMerge(BaseException):
    """Examples have diverged so that they cannot run together; the argument says why."""


def make_divergence(
    level: Any, groups: list[list[int]], complaint: Callable[[], Exception]
) -> BaseException:
    """Return the exception to raise if the examples of ``level`` diverge."""
    if not level.config.diverges:
        return complaint()
    if not level.active:  # no call that could run again
        error = complaint()
        error.add_note(
            "vmap: the call has ended, and a backward pass over what it computed asks this.\n"
            "During the call examples may diverge: take the derivative inside, as in vmap(grad(f))."
        )
        return error
    root = level.root
    if root is not level:  # the examples that do not run are a group as well
        rows = level.examples.rows.tolist()
        groups = [[rows[n] for n in g] for g in groups]
        others = sorted({*range(root.size)} - {*rows})
        groups = [*groups, others] if others else groups
    place = find_users_line()
    root.state.divergence = groups, place
    return Diverged(root, groups, place)
