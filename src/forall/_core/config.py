"""The settings of the whole process, `forall.config`."""

from __future__ import annotations

import os
from dataclasses import dataclass

from forall._compat.documented_error import documented_error

_WORDS: dict[str, bool | str] = {"": True, "0": False, "1": True, "check": "check"}  # "": not set


@dataclass
class Config:
    """Settings of the whole process: `forall.config`.

    ``replay``: whether transformed functions are recorded and replayed once they have run for
    ``patience`` seconds, if an analysis proves that a replayed call has the same effect. With
    ``"check"``, each replayed call also runs eagerly, and both results are compared. Set from the
    environment variable ``FORALL_REPLAY`` (0, 1, check) at the start; empty means the default.

    ``patience``: the seconds in all that a function must have run before it is recorded.

    ``parting``: how `vmap` runs a function in which Python reads values of examples. With
    ``"together"`` the examples run together, with ``"loop"`` one after another, where possible.
    With ``"measured"`` the first calls find out which of the two takes less time. Results of the
    two may differ by a rounding. Set from ``FORALL_PARTING`` at the start.

    ``agree``: when the ranks of a mesh make sure that all are at the same place of the program.
    With ``"each"``, before each message between them and at the end of a call; with ``"call"``, at
    its start and its end alone, so that ranks that come to different messages may wait until the
    timeout; with ``"never"``, not at all, as with torch.distributed alone.

    ``rank_timeout``: the seconds that a rank waits for others; None for the timeout of the process
    group.

    Example:
        >>> forall.config.replay = False                           # each call runs as it is
        >>> forall.config.replay = True
    """

    replay: bool | str = True
    patience: float = 0.05
    parting: str = "measured"
    agree: str = "each"
    rank_timeout: float | None = None


def parse_replay(word: str) -> bool | str:
    """Return the setting that a value of FORALL_REPLAY stands for."""
    if word not in _WORDS:
        raise documented_error(ValueError, "environment-variable")(
            f"FORALL_REPLAY={word!r} does not say whether calls are replayed.\n"
            "Set it to 0, 1 or check, or leave it out for 1."
        )
    return _WORDS[word]


def parse_strategy(word: str) -> str:
    """Return the setting that a value of FORALL_PARTING stands for."""
    if word not in _PARTING:
        raise documented_error(ValueError, "environment-variable")(
            f"FORALL_PARTING={word!r} does not say how examples that part are run.\n"
            "Set it to together or loop, or leave it out for measured."
        )
    return word or "measured"


_PARTING = ("", "measured", "together", "loop")
now = Config(
    parse_replay(os.environ.get("FORALL_REPLAY", "")),
    parting=parse_strategy(os.environ.get("FORALL_PARTING", "")),
)
