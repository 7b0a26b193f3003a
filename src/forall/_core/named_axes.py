"""Named axes: the examples of a vmap call, under the name by which collectives know them."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Hashable

    import torch

_numbers = count(1)


class Axis(NamedTuple):
    """The named axis of one call."""

    name: Hashable
    size: int  # how many examples the call has
    number: int  # identifies the axis among the arguments of an operator
    device: torch.device  # of the mapped arguments, where there are some
    chunk_size: Any  # an option of the call, for messages
    local_size: int  # how many of the examples this process has
    ranks: Any = None  # `_mesh.axis_ranks.AxisRanks`, if other processes have further examples


def make_axis(
    name: Hashable,
    size: int,
    device: torch.device,
    chunk_size: Any,
    ranks: Any = None,
) -> Axis:
    """Return a new axis, which differs from all others. ``size`` examples are in this process."""
    whole = size if ranks is None else ranks.total
    return Axis(name, whole, next(_numbers), device, chunk_size, size, ranks)
