"""Random draws of a traced call: each advance of a generator has to be in the program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._compat import pytree, rng_state

if TYPE_CHECKING:
    from collections.abc import Sequence


class Draws:
    """The generators' states after the last recorded draw.

    They tell of a seed being set, for example, which no dispatch mode sees.
    """

    def __init__(self, given: Sequence[torch.Tensor], known: Sequence[torch.Generator]) -> None:
        self._known = [*given, *known]
        self._states = rng_state.states(self._known)

    def made(self) -> None:
        """Take the states anew, after a recorded draw."""
        self._states = rng_state.states(self._known)

    def stray(self) -> bool:
        """True if a generator was advanced by anything but a recorded draw."""
        now = rng_state.states(self._known)
        was = self._states  # without devices that were set up since
        return any(key not in was or not torch.equal(was[key], now[key]) for key in now)

    def of_a_stranger(self, args: Any) -> bool:
        """True if an operator draws from a generator that the function has made itself."""
        drawn = [a for a in pytree.leaves(args) if isinstance(a, torch.Generator)]
        return not all(rng_state.is_among(g, self._known) for g in drawn)
