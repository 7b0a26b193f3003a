"""All acceptance functions: importing their groups enters them."""

from __future__ import annotations

from divergence import branches, computing, effects, failures, loops, objects, reads, shapes
from divergence.cases import CASES, Case

GROUPS = (branches, loops, reads, shapes, objects, failures, effects, computing)

__all__ = ["CASES", "GROUPS", "Case"]
