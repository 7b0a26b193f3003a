"""The parts of `torch.distributed` that ranks communicate by; imported with the first mesh.

Each function returns when its message has come. ``limit`` is in seconds; None stands for the
timeout of the group.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Sequence

_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
# A gather of a few kilobytes from a few ranks takes as long as one of a few bytes.
_MOST_BYTES, _MOST_RANKS = 8192, 16
_ALIGNED = 16  # bytes, of the largest dtype
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# The first was renamed in torch 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
ProcessGroup = dist.ProcessGroup


def make_control_group(group: ProcessGroup, limit: float | None) -> Any:
    """Return a group of the same ranks whose messages need no device.

    `new_group` names a group by how many there are, so all ranks would have to have made as many.
    """
    store = dist.PrefixStore(f"forall/{group.group_name}", _get_store())
    timeout = _get_timeout(group) if limit is None else timedelta(seconds=limit)
    return dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout)


def _get_store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _get_timeout(group: ProcessGroup) -> timedelta:
    device = dist.distributed_c10d._device_capability(group)[0]
    backend: Any = group._get_backend(torch.device(device))
    return backend.options._timeout


def get_rank(group: ProcessGroup) -> int:
    return dist.get_rank(group)


def reduce(x: torch.Tensor, kind: str, group: ProcessGroup, limit: float | None) -> torch.Tensor:
    """Return the sum, the maximum or the minimum over ranks."""
    out = x.clone(memory_format=torch.contiguous_format)
    if out.dtype == torch.bool:
        out = out.to(torch.uint8)
    numbers = torch.view_as_real(out) if out.is_complex() else out
    _wait(dist.all_reduce(numbers, _OPERATIONS[kind], group, async_op=True), limit)
    return out.to(x.dtype)


def gather(
    x: torch.Tensor, sizes: Sequence[int], group: ProcessGroup, limit: float | None
) -> torch.Tensor:
    """Return the rows of all ranks, of which rank ``r`` has ``sizes[r]``."""
    most = max(sizes)
    if not most:
        return x.clone()
    if len(x) < most:  # backends gather equal parts alone
        x = torch.cat([x, x.new_zeros((most - len(x), *x.shape[1:]))])
    out = x.new_empty((len(sizes) * most, *x.shape[1:]))
    _wait(
        _all_gather(view_as_integers(out), view_as_integers(x.contiguous()), group, async_op=True),
        limit,
    )
    if sum(sizes) == len(out):
        return out
    parts = zip(out.split(most), sizes, strict=True)
    return torch.cat([part[:size] for part, size in parts])


def scatter(
    x: torch.Tensor, sizes: Sequence[int], group: ProcessGroup, limit: float | None
) -> torch.Tensor:
    """Return this rank's rows of the sum over ranks."""
    rank = dist.get_rank(group)
    if len({*sizes}) == 1 and dist.get_backend(group) != "gloo":  # gloo sends whole tensors too
        out = x.new_empty((sizes[0], *x.shape[1:]))
        parts = [torch.view_as_real(t) if t.is_complex() else t for t in (out, x.contiguous())]
        _wait(_reduce_scatter(*parts, group=group, async_op=True), limit)
        return out
    start = sum(sizes[:rank])
    return reduce(x, "sum", group, limit)[start : start + sizes[rank]].clone()


def exchange(
    x: torch.Tensor,
    give: Sequence[int],
    take: Sequence[int],
    group: ProcessGroup,
    limit: float | None,
) -> torch.Tensor:
    """Send ``give[r]`` rows to each rank ``r``; return the ``take[r]`` rows of each."""
    out = x.new_empty((sum(take), *x.shape[1:]))
    sent = view_as_integers(x.contiguous())
    _wait(
        dist.all_to_all_single(view_as_integers(out), sent, [*take], [*give], group, async_op=True),
        limit,
    )
    return out


def gather_words(
    words: Sequence[int], size: int, group: Any, limit: float | None, data: torch.Tensor | None
) -> tuple[list[list[int]], torch.Tensor | None]:
    """Return a row of integers from each rank, and a row of data if this rank has any.

    The message has the same length whatever a rank sends, so that ranks with other data, or with
    none, are understood too. Data must fit, see `can_attach`. The row of a rank without any has no
    meaning.
    """
    head = 8 * len(words)  # bytes
    start = -(-head // _ALIGNED) * _ALIGNED
    mine = torch.empty(start + _get_capacity(size), dtype=torch.uint8, device="cpu")
    mine[:head].view(torch.int64).copy_(torch.tensor([*words], device="cpu"))
    stop = start if data is None else start + data.nbytes
    if data is not None:
        plain = data.resolve_conj().resolve_neg().contiguous()
        mine[start:stop].copy_(plain.view(-1).view(torch.uint8))
    out = torch.empty((size, len(mine)), dtype=torch.uint8, device="cpu")
    _wait(group._allgather_base(out.view(-1), mine), limit)
    rows = out[:, :head].contiguous().view(torch.int64).tolist()
    if data is None:
        return rows, None
    return rows, out[:, start:stop].contiguous().view(data.dtype).view(size, *data.shape)


def can_attach(data: torch.Tensor, size: int) -> bool:
    """Return True if `gather_words` can send data with the words of so many ranks."""
    return data.is_cpu and 0 < data.nbytes <= _get_capacity(size)


def _get_capacity(size: int) -> int:
    """Return how many bytes of data fit beside the words of so many ranks."""
    return _MOST_BYTES if size <= _MOST_RANKS else 0


def gather_texts(
    text: str, size: int, group: Any, limit: float | None, most: int = 1024
) -> list[str]:
    """Return a text from each rank, of at most so many bytes."""
    raw = text.encode()[:most].ljust(most, b"\0")
    mine = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    out = torch.empty((size, most), dtype=torch.uint8, device="cpu")
    _wait(group._allgather_base(out.view(-1), mine), limit)
    rows = [bytes(row.tolist()) for row in out]
    return [row.rstrip(b"\0").decode(errors="replace") for row in rows]


def find_absent_ranks(place: str, rank: int, size: int, seconds: float) -> list[int]:
    """Return the ranks that do not call this too, for the same place, in so many seconds."""
    store = _get_store()
    absent = {*range(size)} - {rank}
    try:
        store.set(f"{place}/{rank}", "here")
        end = time.monotonic() + seconds
        while absent and time.monotonic() < end:
            absent -= {other for other in absent if store.check([f"{place}/{other}"])}
            time.sleep(0.02)
    except RuntimeError:
        return []  # the process that had the store has ended
    return sorted(absent)


def _wait(work: Any, limit: float | None) -> None:
    if limit is None:
        work.wait()
    else:
        work.wait(timedelta(seconds=limit))


def view_as_integers(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor's memory as integers, which all backends copy."""
    if x.is_complex():
        x = torch.view_as_real(x)
    return x.view(_INTEGERS[x.element_size()])
