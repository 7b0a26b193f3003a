"""Which cases of long sweeps run with FORALL_SAMPLED=1: a sample, the same one each time."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeVar
from zlib import crc32

if TYPE_CHECKING:
    from collections.abc import Iterable

Case = TypeVar("Case")
SAMPLED = bool(os.environ.get("FORALL_SAMPLED"))


def is_in_sample(name: str, one_in: int) -> bool:
    """True for one in so many names; for all where nothing is left out."""
    return not SAMPLED or not crc32(name.encode()) % one_in


def take_sample(cases: Iterable[Case], one_in: int, salt: object = "") -> list[Case]:
    """Return one in so many cases, or all; with another salt others."""
    return [case for case in cases if is_in_sample(f"{salt}{case}", one_in)]
