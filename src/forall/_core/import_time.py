"""Importing many modules at once."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def pause_gc() -> Iterator[None]:
    """Switch the garbage collector off for a time, while modules are imported.

    Imports leave no garbage, but a search for it walks through all of torch. That takes as long as
    the imports themselves.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
