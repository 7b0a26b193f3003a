"""The place of the user's code where a message is sent, which is the same however the code runs.

A line counts if it runs within the mapped function. A derivative that is taken outside of the
function may run below another line on each rank, for example where one rank replays it. So its
messages name no line.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, TypeVar

from forall._compat.call_site import find_users_line_within

if TYPE_CHECKING:
    from collections.abc import Callable

R = TypeVar("R")


def run_placed(func: Callable[..., R], *args: object) -> R:
    """Return ``func(*args)``, which makes the call of a mapped function over ranks."""
    return func(*args)


def find_place() -> str:
    """Return the line that runs now within the mapped function, as text; "" outside of it."""
    line = find_users_line_within(run_placed.__code__)
    if line is None:
        return ""
    return f"{PurePath(line.file).name}:{line.line}"  # ranks may have files in unlike folders
