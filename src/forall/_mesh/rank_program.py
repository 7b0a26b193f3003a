"""Recorded programs that make calls over the ranks of meshes.

NOTE [recorded calls over ranks]
    A program has the messages of a call as its operators, in their order, with the start and the
    end of the call. So one rank may replay a call while another one runs the function.

    Where a program fails, the function runs in its place. What the program has sent is in the log,
    and the function reads it there. The start of a call tells the numbers of examples of all ranks.
    If they are others than in the recording, the function runs too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from forall._core import communication_log, config
from forall._core.rank_ops import OtherSizesError
from forall._mesh.agreement import tell_failure
from forall._mesh.rank_group import RankGroup, find_rank_group

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

R = TypeVar("R")


class RankProgram:
    """A recorded program that makes calls over the groups of these handles.

    If it ``may_fail`` for other data, the function may have to run after it.
    """

    def __init__(self, handles: Sequence[str], may_fail: bool) -> None:
        self.handles, self.may_fail = handles, may_fail

    def run_program(self, func: Callable[..., R], *args: object) -> R:
        """Return ``func(*args)``, which runs the program.

        If the program may fail, an error leaves the log rewound, and the other ranks wait for the
        function to run. They are told of any other error.
        """
        groups = [find_rank_group(handle) for handle in self.handles]
        communication_log.begin_use()
        position, log = communication_log.get_position(), communication_log.get_log()
        entered: list[RankGroup] = []
        if log is not None:
            log.is_replay = True
            log.keeps_messages = self.may_fail or config.now.replay == "check"
        try:
            entered.extend(g for g in groups if not g.enter("a recorded call"))
            return func(*args)
        except OtherSizesError:
            communication_log.rewind_log(position)
            raise
        except BaseException as error:
            if self.may_fail and isinstance(error, Exception):
                communication_log.rewind_log(position)
            else:
                for group in entered:
                    if group.is_open:
                        tell_failure(group, error)
                        communication_log.note_notified_error()
            raise
        finally:
            for group in entered:
                group.leave()
            if log is not None:
                log.is_replay, log.keeps_messages = False, True
