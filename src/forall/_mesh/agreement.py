"""The agreement of ranks: before ranks communicate, all of them say at which place they are.

NOTE [agreement]
    Ranks that come to different messages wait for each other, or take one message for another. So
    before a message each rank sends four numbers: if it has failed, the number of the call, the
    number of the message, and a hash of its description (kind, dtype, shape, the user's line). If
    all are equal, they communicate. If not, they exchange texts, and all raise a `RankError` that
    has them. A rank whose code raises sends its error at this place. One more agreement ends a
    call, so that either all ranks return or all raise, and the group can be used again.

NOTE [one sequence of messages]
    A call makes the same messages however it runs: as it is, undone and run again, or converted. A
    run that is made again reads in the log what an earlier one was sent, see `communication_log`.
"""

from __future__ import annotations

import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from forall._compat import process_groups
from forall._compat.call_site import OURS, TORCH
from forall._compat.dispatch_state import functions_off, no_dispatch
from forall._compat.documented_error import documented_error
from forall._core import communication_log, config
from forall._core.communication_log import LogEntry
from forall._core.errors import RankError, format_columns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from forall._mesh.rank_group import RankGroup

_GOES_ON, _FAILED = 0, 1
_SECONDS_OF_ROLL_CALL = 1.0


def communicate(
    group: RankGroup,
    what: str,
    x: torch.Tensor,
    run: Callable[[float | None], torch.Tensor],
    combine: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return ``run(limit)``, a message ``what`` of all ranks, once all of them have come to it.

    ``combine`` makes the same of a stack of all ranks' ``x``. Little data are sent along with the
    agreement, and combined by each rank: one exchange takes half as long as two.
    """
    log = communication_log.get_log()
    entry = None if log is None else log.read_next()
    sent = None if log is None or log.is_replay else _hash_values(x)
    if entry is not None:
        _check_same_message(entry, what, sent)
        return entry.result.clone()
    is_agreed = config.now.agree == "each"
    if is_agreed and combine is not None and process_groups.can_attach(x, group.size):
        _, rows = _agree(group, what, data=x)
        with _plain_tensors(), torch.no_grad():
            result = combine(rows)
    else:
        if is_agreed:
            _agree(group, what)
        try:
            result = run(config.now.rank_timeout)
        except RuntimeError as error:
            raise _make_lost_error(group, what, error) from error
    if log is not None and log.keeps_messages:
        log.add(LogEntry(what, sent, result))
        return result.clone()
    return result


def connect(group: RankGroup, what: str) -> None:
    """Make the group by which ranks agree, before their first call."""
    try:
        group.control = process_groups.make_control_group(group.group, config.now.rank_timeout)
    except RuntimeError as error:
        raise _make_lost_error(group, what, error) from error


def agree_once(group: RankGroup, what: str, call: str = "", size: int = 0) -> list[int]:
    """Return ``size`` of each rank, once all are at this place; a run made again reads the log."""
    log = communication_log.get_log()
    entry = None if log is None else log.read_next()
    if entry is not None:
        _check_same_message(entry, what, size)
        return entry.result.tolist()
    sizes, _ = _agree(group, what, call, size)
    if log is not None:
        with _plain_tensors():
            log.add(LogEntry(what, size, torch.tensor(sizes, device="cpu")))
    return sizes


def _check_same_message(entry: LogEntry, what: str, sent: int | torch.Tensor | None) -> None:
    is_same = entry.what == what
    if is_same and entry.sent is not None and sent is not None:
        with _plain_tensors():
            is_same = int(entry.sent) == int(sent)
    if not is_same:
        same = " with other values" if entry.what == what else ""
        raise documented_error(RankError, "ranks-differ")(
            "A part of a function ran once more, and sent another message than before.\n"
            f"    before  {entry.what}\n    now     {what}{same}\n"
            "The function must do the same each time it runs with the same arguments."
        )


def _hash_values(x: torch.Tensor) -> int | torch.Tensor:
    """Return a hash as a tensor on the same device, which is not waited for."""
    if not x.numel():
        return 0
    with _plain_tensors(), torch.no_grad():
        integers = process_groups.view_as_integers(x.resolve_conj().resolve_neg().contiguous())
        return torch.hash_tensor(integers).view(torch.int64)


def _agree(
    group: RankGroup, what: str, call: str = "", size: int = 0, data: torch.Tensor | None = None
) -> tuple[list[int], Any]:
    """Return ``size`` and ``data`` of each rank, once all ranks are seen to be at this place."""
    place = what if data is None else f"{what}, attached"
    header = (_GOES_ON, group.calls, group.position, zlib.crc32(place.encode()))
    group.position += 1
    rows, found = _exchange_headers(group, (*header, size), what, data)
    if all(tuple(row[:4]) == header for row in rows):
        return [row[4] for row in rows], found
    texts = _exchange_texts(group, what)
    _count_alike(group, rows)
    raise _make_rank_error(group, rows, texts, call)


def tell_failure(group: RankGroup, error: BaseException) -> None:
    """Tell the other ranks of an error of this one, unless all have it, where they wait for it."""
    if config.now.agree == "never":
        return
    if isinstance(error, RankError) and (error.is_lost or group.id in error.told):
        return
    message = str(error).splitlines()[:1]
    text = f"{type(error).__name__}: {''.join(message)}{_find_line(error)}"
    try:
        rows, _ = _exchange_headers(group, (_FAILED, group.calls, group.position, 0, 0), text)
        _exchange_texts(group, text)
    except RankError:
        return  # the error itself says more
    _count_alike(group, rows)


def _count_alike(group: RankGroup, rows: list[list[int]]) -> None:
    """Make all ranks count calls alike from here on, after some came to other places."""
    group.calls = max(row[1] for row in rows)


def _find_line(error: BaseException) -> str:
    """Return where the user's code raised an error, as text."""
    trace, found = error.__traceback__, ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if not code.co_filename.startswith((TORCH, OURS)):
            found = f" ({code.co_filename.rsplit('/', 1)[-1]}:{trace.tb_lineno})"
        trace = trace.tb_next
    return found


def _exchange_headers(
    group: RankGroup, header: tuple[int, ...], what: str, data: torch.Tensor | None = None
) -> tuple[list[list[int]], torch.Tensor | None]:
    try:
        with _plain_tensors(), torch.no_grad():
            return process_groups.gather_words(
                header, group.size, group.control, config.now.rank_timeout, data
            )
    except RuntimeError as error:
        raise _make_lost_error(group, what, error) from error


def _exchange_texts(group: RankGroup, text: str) -> list[str]:
    try:
        with _plain_tensors():
            return process_groups.gather_texts(
                text, group.size, group.control, config.now.rank_timeout
            )
    except RuntimeError as error:
        raise _make_lost_error(group, text, error) from error


@contextmanager
def _plain_tensors() -> Iterator[None]:
    """Make tensors that no mode and no level sees."""
    with functions_off(), no_dispatch():
        yield


def _make_rank_error(
    group: RankGroup, rows: list[list[int]], texts: list[str], call: str
) -> RankError:
    """Return the error that all ranks raise."""
    failed = [rank for rank, row in enumerate(rows) if row[0] == _FAILED]
    lines = [
        f"    rank {rank}   {'failed: ' if rank in failed else 'came to '}{text}"
        for rank, text in enumerate(texts)
    ]
    prefix = f"{call}: " if call else ""
    told = "\n".join(lines)
    first = failed[0] if failed else None
    if failed:
        found = documented_error(RankError, "rank-failed")(
            f"{prefix}a rank failed, so no rank has a result.\n{told}"
        )
    else:
        found = documented_error(RankError, "ranks-differ")(
            f"{prefix}the ranks came to different places.\n{told}\n"
            "All ranks must make the same calls, and in them the same collectives."
        )
    found.rank, found.text = first, "" if first is None else texts[first]
    found.told.add(group.id)
    return found


def _make_lost_error(group: RankGroup, what: str, error: RuntimeError) -> RankError:
    """Return the error of a message that failed: a process has ended, or has not come in time."""
    group.note_lost()
    place = f"forall/{group.id}/{group.calls}"
    absent = process_groups.find_absent_ranks(place, group.rank, group.size, _SECONDS_OF_ROLL_CALL)
    names = f"rank {', '.join(map(str, absent))}" if absent else "another rank"
    rows = [(f"rank {group.rank}", f"came to {what}"), ("torch", str(error).splitlines()[0])]
    found = documented_error(RankError, "rank-lost")(
        f"{names} has ended, or has not come to this place.\n{format_columns(rows)}\n"
        "The process group is lost. Start the processes again, for example by "
        "torchrun --max-restarts."
    )
    found.rank = absent[0] if absent else None
    found.text = str(error)
    found.is_lost = True
    found.told.add(group.id)
    return found
