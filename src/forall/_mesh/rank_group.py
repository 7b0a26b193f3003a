"""The ranks of one dim of a mesh: their process group, and how far they have come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forall._compat import process_groups

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from forall._compat.process_groups import ProcessGroup


class RankGroup:
    """The ranks of a process group, of which this process is one.

    ``control`` is another group of the same ranks, by which they agree on what comes next. Its
    messages need no device, and are never taken for messages of the data. ``calls`` counts the
    calls over this group, and ``position`` the agreements of the present one.
    """

    def __init__(self, group: ProcessGroup, axis: str) -> None:
        self.group = group
        self.axis = axis
        self.id = group.group_name
        self.rank = process_groups.get_rank(group)
        self.size = group.size()
        self.control: Any = None  # made with the first call
        self.calls = 0
        self.position = 0
        self.thread: int | None = None  # that makes a call over this group


def get_rank_group(mesh: DeviceMesh) -> RankGroup:
    """Return the ranks of a mesh of one dim. All of them have to call this."""
    group, names = mesh.get_group(), mesh.mesh_dim_names
    known = _known.get(group.group_name)
    if known is None or known.group is not group:
        known = _known[group.group_name] = RankGroup(group, names[0] if names else "mesh")
    return known


def find_rank_group(name: str) -> RankGroup:
    """Return the ranks by the name that torch has for their process group."""
    return _known[name]


_known: dict[str, RankGroup] = {}
