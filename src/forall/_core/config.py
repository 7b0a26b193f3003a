"""The settings of the whole process, `forall.config`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from difflib import get_close_matches
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from forall._compat.documented_error import documented_error
from forall._core.errors import format_short, warn_renamed

if TYPE_CHECKING:
    from collections.abc import Callable

_WORDS: dict[str, bool | str] = {"": True, "0": False, "1": True, "check": "check"}  # "": not set


@dataclass
class Config:
    """Settings of the whole process: `forall.config`.

    ``replay``: whether transformed functions are recorded and replayed once they have run for
    ``patience`` seconds, if an analysis proves that a replayed call has the same effect. With
    ``"check"``, each replayed call also runs eagerly, and both results are compared. Set from the
    environment variable ``FORALL_REPLAY`` (0, 1, check) at the start; empty means the default.

    ``patience``: the seconds in all that a function must have run before it is recorded.

    ``strategy``: how `vmap` runs a function in which Python reads values of examples. With
    ``"together"`` the examples run together, with ``"loop"`` one after another, where possible.
    With ``"measured"`` the first calls find out which of the two takes less time. Results of the
    two may differ by a rounding. Set from ``FORALL_STRATEGY`` at the start.

    ``agree``: when the ranks of a mesh make sure that all are at the same place of the program.
    With ``"each"``, before each message between them and at the end of a call; with ``"call"``, at
    its start and its end alone, so that ranks that come to different messages may wait until the
    timeout; with ``"never"``, not at all, as with torch.distributed alone.

    ``rank_timeout``: the seconds that a rank waits for others; None for the timeout of the process
    group.

    Raises:
        AttributeError: an attribute is set that names no setting.
        ValueError: a setting is given a value that it does not take. It keeps the one it has.

    Example:
        >>> forall.config.replay = False                           # each call runs as it is
        >>> forall.config.replay = True
    """

    replay: bool | str = True
    patience: float = 0.05
    strategy: str = "measured"
    agree: str = "each"
    rank_timeout: float | None = None

    def __setattr__(self, name: str, value: object) -> None:
        if name == "parting":
            warn_renamed("forall.config.parting", "forall.config.strategy")
            name = "strategy"
        if name not in _SETTINGS:
            raise _make_unknown_setting_error(name)
        if not _SETTINGS[name].accepts(value):
            raise _make_value_error(name, value)
        super().__setattr__(name, value)

    @property
    def parting(self) -> str:
        """Return ``strategy``, which had this name."""
        warn_renamed("forall.config.parting", "forall.config.strategy")
        return self.strategy


class _Setting(NamedTuple):
    """The values that a setting takes: some words, and numbers of a range."""

    words: tuple[bool | str | None, ...] = ()
    numbers: str = ""  # which ones, for messages
    takes_number: Callable[[float], bool] = lambda number: False

    def accepts(self, value: object) -> bool:
        if isinstance(value, (bool, int, str, type(None))) and value in self.words:
            return True
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return is_number and self.takes_number(value)

    def __str__(self) -> str:
        *most, last = [*([self.numbers] if self.numbers else []), *map(repr, self.words)]
        return f"{', '.join(most)} or {last}" if most else last


_STRATEGIES = ("measured", "together", "loop")
_SETTINGS = {
    "replay": _Setting((True, False, "check")),
    "patience": _Setting((), "seconds, 0 or more", lambda number: number >= 0),
    "strategy": _Setting(_STRATEGIES),
    "agree": _Setting(("each", "call", "never")),
    "rank_timeout": _Setting((None,), "seconds, more than 0", lambda number: 0 < number < inf),
}


def _make_unknown_setting_error(name: str) -> AttributeError:
    return documented_error(AttributeError, "setting")(
        f"forall.config.{name}: there is no setting of this name.\n"
        f"    settings   {', '.join(_SETTINGS)}"
        f"{_suggest(name, {known: known for known in _SETTINGS})}"
    )


def _make_value_error(name: str, value: object) -> ValueError:
    words = {str(word): repr(word) for word in _SETTINGS[name].words}
    return documented_error(ValueError, "setting")(
        f"forall.config.{name}: it does not take {format_short(value)}.\n"
        f"    values   {_SETTINGS[name]}"
        f"{_suggest(str(value), words)}"
    )


def _suggest(given: str, known: dict[str, str]) -> str:
    """Return a line with the nearest of these texts as it is to be written, "" if none is near."""
    lower = {text.lower(): shown for text, shown in known.items()}
    near = get_close_matches(given.lower(), lower, 1)
    return f"\nDid you mean {lower[near[0]]}?" if near else ""


def parse_replay(word: str) -> bool | str:
    """Return the setting that a value of FORALL_REPLAY stands for."""
    if word not in _WORDS:
        raise documented_error(ValueError, "environment-variable")(
            f"FORALL_REPLAY={word!r} does not say whether calls are replayed.\n"
            "Set it to 0, 1 or check, or leave it out for 1."
        )
    return _WORDS[word]


def parse_strategy(word: str) -> str:
    """Return the setting that a value of FORALL_STRATEGY stands for."""
    if word not in ("", *_STRATEGIES):
        raise documented_error(ValueError, "environment-variable")(
            f"FORALL_STRATEGY={word!r} does not say how examples that diverge are run.\n"
            "Set it to together or loop, or leave it out for measured."
        )
    return word or "measured"


def _read_strategy() -> str:
    """Return the value of FORALL_STRATEGY, or of the name that it had."""
    if "FORALL_PARTING" not in os.environ or "FORALL_STRATEGY" in os.environ:
        return os.environ.get("FORALL_STRATEGY", "")
    warn_renamed("FORALL_PARTING", "FORALL_STRATEGY")
    return os.environ["FORALL_PARTING"]


now = Config(
    parse_replay(os.environ.get("FORALL_REPLAY", "")),
    strategy=parse_strategy(_read_strategy()),
)
