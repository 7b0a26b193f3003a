"""Batching rules under `vmap` for libraries with their own operators.

See docs/guides/add_a_rule.md.
"""

from forall._vmap.custom_rules import (
    batching_rule,
    loop,
    pointwise,
    reduction,
)

__all__ = ["batching_rule", "loop", "pointwise", "reduction"]
