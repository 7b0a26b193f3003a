"""Detection of numbers that Python's or numpy's own generators draw once for all examples.

A mapped function calls ``random.random()`` once, so all its examples get one number, where the loop
over examples draws one for each. Torch's operators draw by the rules of ``randomness``, but these
functions are no operators. Their generators are compared before and after the first call.
"""

from __future__ import annotations

import random
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from forall._compat.call_site import warn_users_line
from forall._core.errors import name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def watch_python_draws(func: Callable, size: int) -> Iterator[None]:
    """Warn if the block draws from a generator of Python's or numpy's that all code shares."""
    before = _get_states()
    yield
    drawn = [call for call, state in _get_states().items() if before.get(call, state) != state]
    if drawn:
        warn_users_line(
            f"vmap({name_of(func)}): {' and '.join(drawn)} draw numbers once for all {size} "
            "examples, where the loop over examples draws for each.\n"
            "Draw a number by torch, as torch.rand(()), with randomness='different' or a key.",
            UserWarning,
        )


def _get_states() -> dict[str, Any]:
    """Return the states of the generators, by the functions that use them."""
    states: dict[str, Any] = {"functions of the module random": random.getstate()}
    if (numpy := sys.modules.get("numpy.random")) is not None:
        name, keys, *others = numpy.get_state()
        states["functions of numpy.random"] = (name, keys.tobytes(), *others)
    return states
