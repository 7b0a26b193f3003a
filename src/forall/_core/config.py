"""What the user sets for the whole process."""

from __future__ import annotations

import os
from dataclasses import dataclass

_WORDS: dict[str, bool | str] = {"": True, "0": False, "1": True, "check": "check"}  # "": not set


@dataclass
class Config:
    """Settings of the whole process: `forall.config`.

    ``replay``: whether transformed functions that have taken their time are recorded and replayed
    where it is certain that nobody can tell. ``"check"`` also runs each replayed call as it is, and
    compares. Set from the environment variable ``FORALL_REPLAY`` (0, 1, check) at
    the start; empty means the default, as if it was not set.

    ``patience``: for how many seconds in all a function has to have run before that.

    ``parting``: how `vmap` runs a function in which Python asks something of examples. With
    ``"measured"`` they run together or one after another, whichever takes less time, which calls
    find out. With ``"together"`` and ``"loop"`` they run in that way, where it can be. Results of
    the two ways may differ by a rounding. Set from ``FORALL_PARTING`` at the start.

    Example:
        >>> forall.config.replay = False                           # each call runs as it is
        >>> forall.config.replay = True
    """

    replay: bool | str = True
    patience: float = 0.05
    parting: str = "measured"


def replay_of(word: str) -> bool | str:
    """The setting that a value of FORALL_REPLAY stands for."""
    if word not in _WORDS:
        raise ValueError(
            f"FORALL_REPLAY={word!r} does not say whether calls are replayed.\n"
            "Set it to 0, 1 or check, or leave it out for 1."
        )
    return _WORDS[word]


def parting_of(word: str) -> str:
    """The setting that a value of FORALL_PARTING stands for."""
    if word not in _PARTING:
        raise ValueError(
            f"FORALL_PARTING={word!r} does not say how examples that part are run.\n"
            "Set it to together or loop, or leave it out for measured."
        )
    return word or "measured"


_PARTING = ("", "measured", "together", "loop")
now = Config(
    replay_of(os.environ.get("FORALL_REPLAY", "")),
    parting=parting_of(os.environ.get("FORALL_PARTING", "")),
)
