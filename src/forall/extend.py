"""For libraries with operators of their own: what these do under `vmap`. See docs/add_a_rule.md."""

from forall._vmap.custom_rules import (
    batching_rule,
    loop,
    pointwise,
    reduction,
)

__all__ = ["batching_rule", "loop", "pointwise", "reduction"]
