"""A call that all ranks of a mesh make: it begins and ends with an agreement of the ranks."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from forall._compat import pytree
from forall._compat.documented_error import documented_error
from forall._compat.private_api import count_dispatch_modes
from forall._core import communication_log, rank_ops
from forall._core.errors import format_columns
from forall._core.levels import run_outside_all, stack
from forall._mesh import rank_kernels  # noqa: F401 - the kernels are registered by it
from forall._mesh.agreement import connect, tell_failure
from forall._mesh.axis_ranks import AxisRanks, split_evenly
from forall._mesh.message_place import run_placed
from forall._mesh.rank_group import get_rank_group

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Self, TypeVar

    from torch.distributed.device_mesh import DeviceMesh

    from forall._core.errors import TransformCall
    from forall._mesh.dtensors import LocalArguments

    R = TypeVar("R")


def run_rank_call(mesh: DeviceMesh, call: TransformCall, run: Callable[[RankCall], R]) -> R:
    """Return ``run`` of the call, which all ranks of a mesh make."""
    with RankCall(mesh, call) as running:
        return run_placed(run, running)


class RankCall:
    """A context in which this rank makes a call that all ranks of a mesh make.

    A call inside another one over the same ranks leaves the end to that one. See NOTE [agreement].
    """

    def __init__(self, mesh: DeviceMesh, call: TransformCall) -> None:
        self.group = get_rank_group(mesh)
        self.mesh = mesh
        self.call = call
        self.is_inside = False
        self.size: Any = None  # of this rank's examples, a tensor

    def __enter__(self) -> Self:
        if self.group.control is None:
            connect(self.group, f"the start of {self.call}")
        self.is_inside = self.group.enter(str(self.call))
        return self

    def take_local(self, args: tuple, kwargs: dict) -> LocalArguments | None:
        """Return the arguments with local tensors in the place of DTensors; None without any."""
        if "torch.distributed.tensor" not in sys.modules:
            return None
        from forall._mesh.dtensors import LocalArguments  # imports what takes long

        return LocalArguments.take(self.call, self.mesh, args, kwargs)

    def find_local_size(
        self, size: int | None, args: tuple, kwargs: dict, dims: list
    ) -> int | None:
        """Return this rank's number of examples if no argument tells it."""
        is_mapped = any(d is not None for d in pytree.get_leaves(dims))
        if size is None or (is_mapped and (args or kwargs)):
            return None
        return len(split_evenly(size, self.group.size, self.group.rank))

    def begin(self, size: int, axis_size: int | None) -> AxisRanks:
        """Tell the other ranks of this rank's examples, and learn of theirs."""
        sizes = self._meet(str(self.call), size)
        ranks = AxisRanks(self.group, sizes)
        if axis_size not in (None, ranks.total):
            rows = [("axis_size", str(axis_size)), ("on the ranks", " + ".join(map(str, sizes)))]
            raise documented_error(ValueError, "axis-size")(
                f"{self.call}: the ranks have {ranks.total} examples together, not axis_size.\n"
                f"{format_columns(rows)}\nGive no axis_size, or each rank its part of so many."
            )
        return ranks

    def take_part(self, what: str, tensors: Sequence[torch.Tensor]) -> list[range]:
        """Return the entries of each tensor's first dim that this rank takes, as torch.chunk does.

        ``what`` names the tensors for messages. They must have the same layouts on all ranks.
        """
        layouts = (f"{str(t.dtype).removeprefix('torch.')}{[*t.shape]}" for t in tensors)
        self._meet(f"{self.call} with {what} {', '.join(layouts)}", 0)
        lengths = (t.shape[0] if t.dim() else 0 for t in tensors)
        return [split_evenly(n, self.group.size, self.group.rank) for n in lengths]

    def _meet(self, what: str, size: int) -> list[int]:
        """Return ``size`` of each rank, once all are at the start of this call."""
        with run_outside_all():
            self.size = torch.tensor([size], device="cpu")
            # A recorded program expects the same sizes, so the recorder need not see the answer.
            outermost = not self.is_inside
            return rank_ops.BEGIN(self.size, outermost, self.group.handle, what, []).tolist()

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            if self.is_inside or _is_signal(error):
                return
            if error is None:
                with run_outside_all():
                    rank_ops.END(self.size, self.group.handle, str(self.call))
            else:
                tell_failure(self.group, error)
                communication_log.note_notified_error()
        finally:
            if not self.is_inside:
                self.group.leave()
            _drop_messages()


def _drop_messages() -> None:
    """Forget the messages unless a run may still read them.

    A level or a recorder may run the call once more. Where the call is made after a program that
    has failed, the program may have sent more than the call: messages of its derivative.
    """
    may_run_again = stack.top is not None or count_dispatch_modes() > 0
    if not may_run_again and not communication_log.is_reading():
        communication_log.drop_log()


def _is_signal(error: BaseException | None) -> bool:
    """Return True for a signal of forall's own: the run that it ends is made again."""
    return error is not None and not isinstance(
        error, (Exception, KeyboardInterrupt, SystemExit, GeneratorExit)
    )
