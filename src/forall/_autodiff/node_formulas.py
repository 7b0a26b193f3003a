"""The table of derivatives that replace those of torch's autograd nodes.

`decompositions.graph_nodes` fills it; `reverse_mode` reads it in each backward pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable


class NodeDerivative(NamedTuple):
    """The replacement for the derivative of a torch node, whose numbers are right."""

    steps: Callable[[Any], tuple[Callable, tuple]]
    # True if the numbers need another history: torch's is missing, or lacks terms.
    lacks_history: bool = True
    # True if the numbers need other tangents as well.
    lacks_tangents: bool = False
    # The number of cotangents that the pull-back takes, the first ones of the node's.
    cotangents: int = 1


NODES: dict[str, NodeDerivative] = {}  # by the name of a node's class
