"""A limit on the memory that tensors take, and the memory that the machine has free."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from forall._compat import exception_safety
from forall._compat.dispatch_state import functions_off
from forall._compat.documented_error import documented_error
from forall._compat.exception_safety import contextmanager
from forall._compat.lazy_bits import call_with_lazy_bits
from forall._compat.private_api import DispatchMode, StorageWeakRef
from forall._compat.storage import get_storage_id, has_memory
from forall._compat.wrapper_tensor import unwrap_all
from forall._core.errors import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator


class _LimitSuspension(exception_safety.RestoredState):
    on = False


_aside = _LimitSuspension.make_instance(idle=True)


@contextmanager
def suspend_memory_limit() -> Iterator[None]:
    """Suspend the limit for code that undoes a run: the run may have ended because of the limit."""
    was, _aside.on = _aside.on, True
    try:
        yield
    finally:
        _aside.on = was


class MemoryBudgetMode(DispatchMode):
    """A dispatch mode that limits the bytes which tensors made within it may hold at a time.

    An operator that exceeds the limit fails as an allocation for which there is no memory does. A
    tensor is counted once it exists, so one operator may overrun the limit for a moment. The memory
    that an operator takes for itself while it runs is not counted.
    """

    def __init__(self, limit: int, words: str) -> None:
        super().__init__()
        self.limit = limit
        self.words = words
        self._bytes = 0  # of all tensors made since `_check_limit` last dropped those that are gone
        self._made: dict[int, tuple[Any, int]] = {}  # storages from before the limit count 0 bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with functions_off():
            for given in (args, kwargs.values()):
                self._count_storages(given, made=False)
        out = call_with_lazy_bits(func, args, kwargs)
        with functions_off():
            self._count_storages((out,), made=True)
        if self._bytes > self.limit and not _aside.on:
            self._check_limit()
        return out

    def _count_storages(self, values: Any, *, made: bool) -> None:
        for x in values:
            if isinstance(x, (list, tuple)):
                self._count_storages(x, made=made)
            elif isinstance(x, torch.Tensor):
                x = unwrap_all(x)  # unwrapped below a level that the limit is set within
                if has_memory(x) and get_storage_id(x) not in self._made:
                    memory = x.untyped_storage()
                    size = memory.nbytes() if made else 0
                    self._made[get_storage_id(x)] = StorageWeakRef(memory), size
                    self._bytes += size

    def _check_limit(self) -> None:
        self._made = {k: (s, n) for k, (s, n) in self._made.items() if not s.expired()}
        self._bytes = sum(n for _, n in self._made.values())
        if self._bytes > self.limit:
            raise documented_error(MemoryError, "memory-budget")(
                f"{self.words}: tensors take {format_bytes(self._bytes)}, and may take "
                f"{format_bytes(self.limit)}.\n"
                "Pass a larger memory_budget, or make less at once."
            )


_ROOT = Path("/sys/fs/cgroup")


def find_free_memory() -> int | None:
    """Return the bytes that the process may still take; None if that is unknown.

    On Linux it is the memory available, or the rest of a container's limit if that is less.
    """
    found = []
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        found.append(int(line.split()[1]) * 1024)
    with suppress(OSError, ValueError):  # the share of a container; "max" where it has no limit
        limit = int((_ROOT / "memory.max").read_text())
        taken = int((_ROOT / "memory.current").read_text())
        kept = dict(line.split() for line in (_ROOT / "memory.stat").read_text().splitlines())
        found.append(limit - taken + int(kept.get("inactive_file", 0)))
    return min(found, default=None)
