"""Detection of numbers that Python's or numpy's own generators draw once for all examples.

A mapped function calls ``random.random()`` once, so all its examples get one number, where the loop
over examples draws one for each. Torch's operators draw by the rules of ``randomness``, but these
functions are no operators. Their generators are compared before and after the first call.
"""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING, Any

from forall._compat.call_site import warn_users_line
from forall._core.errors import name_of

if TYPE_CHECKING:
    from collections.abc import Callable


def get_generator_states() -> dict[str, Any]:
    """Return the states of the generators that all code shares, by the functions that use them."""
    states: dict[str, Any] = {"functions of the module random": random.getstate()}
    if (numpy := sys.modules.get("numpy.random")) is not None:
        name, words, position, *others = numpy.get_state()
        # It makes its words by the hundred. Its first use may be that of a module being imported.
        if position != len(words):
            states["functions of numpy.random"] = (name, words.tobytes(), position, *others)
    return states


def warn_of_python_draws(before: dict[str, Any], func: Callable, size: int) -> bool:
    """Warn if any generator was used since its state was taken; return True if that is known."""
    now = get_generator_states()
    drawn = [call for call, state in before.items() if now.get(call) != state]
    if drawn:
        warn_users_line(
            f"vmap({name_of(func)}): {' and '.join(drawn)} draw numbers once for all {size} "
            "examples, where the loop over examples draws for each.\n"
            "Draw a number by torch, as torch.rand(()), with randomness='different' or a key.",
            UserWarning,
        )
    return bool(drawn) or now.keys() == before.keys()
