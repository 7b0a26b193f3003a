"""Where examples want different answers of Python: they are run once more, in groups that agree.

The floor of all control flow: what asks for one Python value where examples differ raises `Parted`,
which ends the run; the call that the level serves then runs each group by itself. A group agrees on
all that was asked so far, so nothing of the first run has to be kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forall._core.call_site import Place


class Parted(BaseException):
    """The examples of ``level`` part into these groups, of numbers from 0.

    No Exception: the user's ``except Exception`` is about the function's own errors.
    """

    def __init__(self, level: Any, groups: list[list[int]], place: Place) -> None:
        super().__init__("examples part")
        self.level = level
        self.groups = groups
        self.place = place


class Late(BaseException):
    """A call that is tried in another way takes longer than it may."""


class Apart(BaseException):
    """Examples have parted in a way that running them together cannot say: why, in words."""
