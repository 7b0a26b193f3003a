"""The ranks of one dim of a mesh: their process group, and how far they have come."""

from __future__ import annotations

import atexit
import itertools
import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

from forall._compat import process_groups
from forall._compat.documented_error import documented_error
from forall._core import communication_log

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from forall._compat.process_groups import ProcessGroup


class RankGroup:
    """The ranks of a process group, of which this process is one.

    ``handle`` names it among all that this process has had: the operators between ranks have it,
    and keys of recorded calls. ``control`` is another group of the same ranks, by which they agree
    on what comes next. Its messages need no device, and are never taken for messages of the data.
    ``calls`` counts the calls over this group, and ``position`` the agreements of the present one.

    It ends with its process group, and the group ``control`` with it, see `_end_control_groups`.
    """

    def __init__(self, group: ProcessGroup, axis: str) -> None:
        self._group = ref(group)
        self.axis = axis
        self.id = group.group_name  # the same on all ranks
        self.handle = f"{self.id}/{next(_count)}"
        self.rank = process_groups.get_rank(group)
        self.size = group.size()
        self.control: Any = None  # made with the first call
        self.calls = 0
        self.position = 0
        self.thread: int | None = None  # that makes a call over this group
        self.is_open = False  # True between the start and the end of an outermost call

    def enter(self, call: str) -> bool:
        """Begin a call in this thread; return True if it is inside another over this group."""
        thread = threading.get_ident()
        if self.thread not in (None, thread):
            raise documented_error(RuntimeError, "mesh")(
                f"{call}: another thread makes a call over axis {self.axis!r} of this mesh.\n"
                "Ranks would take the messages of one for those of the other. Make one call after "
                "the other, or give each thread a mesh of its own."
            )
        is_inside = self.thread is not None
        self.thread = thread
        return is_inside

    def leave(self) -> None:
        """End an outermost call."""
        self.thread, self.is_open = None, False

    @property
    def group(self) -> ProcessGroup:
        found = self._group()
        if found is None:
            raise _make_destroyed_error()
        return found

    def note_lost(self) -> None:
        """Keep both groups for ever: to end them would be to wait for a rank that is gone."""
        _lost.append((self._group(), self.control))


def get_rank_group(mesh: DeviceMesh) -> RankGroup:
    """Return the ranks of a mesh of one dim."""
    (ranks,) = list_rank_groups(mesh)
    return ranks


def list_rank_groups(mesh: DeviceMesh) -> list[RankGroup]:
    """Return for each dim of a mesh the ranks along it, of which this process is one."""
    communication_log.begin_use()
    names = mesh.mesh_dim_names or ["mesh"] * mesh.ndim
    return [*map(_get_ranks, mesh.get_all_groups(), names)]


def _get_ranks(group: ProcessGroup, axis: str) -> RankGroup:
    known = _by_group.get(group)
    if known is None:
        known = RankGroup(group, axis)
        _by_group[group] = _by_handle[known.handle] = known
    return known


def find_rank_group(handle: str) -> RankGroup:
    """Return the ranks with this handle."""
    known = _by_handle.get(handle)
    if known is None:
        raise _make_destroyed_error()
    return known


def _make_destroyed_error() -> Exception:
    return documented_error(RuntimeError, "mesh")(
        "The process group of this call was destroyed.\n"
        "Make the call again, over a mesh of the present group."
    )


@atexit.register
def _end_control_groups() -> None:
    """End the threads by which ranks agreed, while Python runs.

    Such a thread releases the tensors of its last message at any time after it. A thread that does
    so while Python shuts down is stopped in the middle of it, and that aborts the process.
    """
    for known in [*_by_group.values()]:
        known.control = None


_count = itertools.count()
_by_group: WeakKeyDictionary[ProcessGroup, RankGroup] = WeakKeyDictionary()
_by_handle: WeakValueDictionary[str, RankGroup] = WeakValueDictionary()
_lost: list[tuple[ProcessGroup | None, Any]] = []
