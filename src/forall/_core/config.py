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

    Example:
        >>> forall.config.replay = False                           # each call runs as it is
        >>> forall.config.replay = True
    """

    replay: bool | str = True
    patience: float = 0.05


def replay_of(word: str) -> bool | str:
    """The setting that a value of FORALL_REPLAY stands for."""
    if word not in _WORDS:
        raise ValueError(
            f"FORALL_REPLAY={word!r} does not say whether calls are replayed.\n"
            "Set it to 0, 1 or check, or leave it out for 1."
        )
    return _WORDS[word]


now = Config(replay_of(os.environ.get("FORALL_REPLAY", "")))
