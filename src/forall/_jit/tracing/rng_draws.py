"""Random draws of a traced call: each advance of a generator has to be in the program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._compat import pytree, rng_state

if TYPE_CHECKING:
    from collections.abc import Sequence


class RecordedDraws:
    """The generators' states after the last recorded draw.

    They tell of a seed being set, for example, which no dispatch mode sees.
    """

    def __init__(self, given: Sequence[torch.Tensor], known: Sequence[torch.Generator]) -> None:
        self._known = [*given, *known]
        self._states = rng_state.save_states(self._known)

    def note_draw(self) -> None:
        """Take the states anew, after a recorded draw."""
        self._states = rng_state.save_states(self._known)

    def has_stray_draw(self) -> bool:
        """True if a generator was advanced by anything but a recorded draw."""
        now = rng_state.save_states(self._known)
        was = self._states  # without devices that were set up since
        return any(key not in was or not torch.equal(was[key], now[key]) for key in now)

    def uses_unknown_generator(self, args: Any) -> bool:
        """True if an operator draws from a generator that the function has made itself."""
        drawn = [a for a in pytree.get_leaves(args) if isinstance(a, torch.Generator)]
        return not all(rng_state.is_same_generator_in(g, self._known) for g in drawn)
