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
from forall._core.errors import RankError
from forall._core.rank_ops import OtherSizesError
from forall._mesh.agreement import tell_failure
from forall._mesh.rank_group import RankGroup, find_rank_group

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

R = TypeVar("R")


def run_rank_program(
    handles: Sequence[str], may_fail: bool, run: Callable[..., R], *args: object
) -> R:
    """Return ``run(*args)``, a recorded program that makes calls over the groups of these handles.

    If it ``may_fail`` for other data, the error leaves the log rewound, and the other ranks wait
    for the function to run. They are told of any other error.
    """
    groups = [find_rank_group(handle) for handle in handles]
    log, position = communication_log.get_log(), communication_log.get_position()
    entered: list[RankGroup] = []
    if log is not None:
        log.is_replay, log.keeps_messages = True, may_fail or config.now.replay == "check"
    try:
        entered.extend(group for group in groups if not group.enter("a recorded call"))
        return run(*args)
    except OtherSizesError:
        communication_log.rewind_log(position)
        raise
    except BaseException as error:
        if may_fail and isinstance(error, Exception):
            communication_log.rewind_log(position)
        else:
            for group in entered:
                is_told = isinstance(error, RankError) and group.id in error.told
                if group.is_open and not is_told and config.now.agree != "never":
                    tell_failure(group, error)
        raise
    finally:
        for group in entered:
            group.leave()
        if log is not None:
            log.is_replay, log.keeps_messages = False, True
