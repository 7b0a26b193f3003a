"""The ``chunk_size`` of transforms: how many examples, rows or columns are computed at once."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from forall._api.memory_budget import MemoryBudgetMode, find_free_memory
from forall._compat.documented_error import documented_error
from forall._core.errors import format_columns, format_short, type_name_of
from forall._core.levels import top

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

    import torch

_SHARE = 0.8  # the part of the free memory that may be taken by default


@dataclass(frozen=True)
class Chunks:
    """A chunk size for any transform: how much of a call is computed at once.

    ``chunk_size=n`` is short for ``Chunks(n)``, and ``chunk_size="auto"`` for ``Chunks("auto")``.
    The results are the same for every choice; memory and time differ.

    Cost: that of all at once, and with a budget a few microseconds per operator for counting.

    Args:
        size: how many examples of `vmap`, rows of `jacrev`, columns of `jacfwd` at once. ``"auto"``
            begins with all, and goes on with half as many from where memory does not suffice:
            that chunk is undone and begun again, those before it are kept.
        memory_budget: with ``"auto"``, the bytes that tensors made in a chunk may hold at a time;
            those that it is given, and results of earlier chunks, are not counted. By default what
            memory allows: allocations that fail, and on a CPU, where none does until the system
            ends the process, four fifths of the memory that is free (as far as Linux tells).
            One operator may overrun the budget by its own result.
        progress: show a bar of what is done (`tqdm`).
        unit: what the bar of `vmap` counts. `jacrev` counts rows, `jacfwd` and `hessian` columns.

    Raises:
        ValueError: for a size below 1, a budget below 1, and a budget for chunks of a given size.
        MemoryError: in the call, where one example alone takes more than the budget.
        ImportError: in the call, with ``progress``, where tqdm is not installed.

    Source: a batch that is halved until it fits is old usage; undoing the failed one is ours.

    Example:
        >>> fits = forall.Chunks(memory_budget=2000)              # bytes
        >>> x = torch.linspace(0, 1, 50)
        >>> rows = forall.jacrev(torch.sin, chunk_size=fits)(x)   # (50, 50) is 10 kB
        >>> torch.equal(rows, x.cos().diag())
        True
    """

    size: int | Literal["auto"] = "auto"
    memory_budget: int | None = None
    progress: bool = False
    unit: str = field(default="example", repr=False)

    def __post_init__(self) -> None:
        if not (self.size == "auto" or _is_count(self.size)):
            raise documented_error(ValueError, "chunk-size")(
                f"Chunks(size={format_short(self.size)}): a chunk holds at least one example.\n"
                "Pass an int above 0, or 'auto' for as many as fit."
            )
        if self.memory_budget is None:
            return
        if not _is_count(self.memory_budget):
            shown = format_columns(
                [
                    (
                        "memory_budget",
                        format_short(self.memory_budget),
                        type_name_of(self.memory_budget),
                    )
                ]
            )
            raise documented_error(ValueError, "chunk-size")(
                f"Chunks: memory_budget counts bytes.\n{shown}\nPass an int above 0."
            )
        if self.size != "auto":
            raise documented_error(ValueError, "chunk-size")(
                f"Chunks(size={self.size}, memory_budget={self.memory_budget}): the budget tells "
                "how many fit, so no size can be given.\nLeave one of the two out."
            )

    def budget(self, near: Iterable[torch.Tensor]) -> AbstractContextManager:
        """Return a context that limits the memory of a chunk of a call with these tensors."""
        limit = self.memory_budget
        if limit is None and self.size == "auto" and top() is None and all(x.is_cpu for x in near):
            limit = int(_SHARE * (find_free_memory() or 0)) or None
        if limit is None:
            return nullcontext()
        return MemoryBudgetMode(limit, str(self))

    def bar(self, total: int, unit: str) -> Any:
        """Return a context that gives a progress bar; one that gives None without ``progress``."""
        if not self.progress:
            return nullcontext()
        try:
            from tqdm.auto import tqdm
        except ImportError as error:
            raise documented_error(ImportError, "missing-package")(
                f"{self}: progress is shown by tqdm, which is not installed.\n"
                "Install it (pip install 'forall[progress]'), or pass progress=False."
            ) from error
        return tqdm(total=total, unit=unit)


def _is_count(n: Any) -> bool:
    return isinstance(n, int) and n > 0


def make_chunks(chunk: Any) -> Chunks | None:
    """Return the `Chunks` for a chunk_size; None if all is computed at once."""
    return chunk if chunk is None or isinstance(chunk, Chunks) else Chunks(chunk)


def count_columns(chunk: Any) -> Any:
    """Return the chunk_size of a mapped call whose examples are the columns of a Jacobian."""
    return replace(chunk, unit="column") if isinstance(chunk, Chunks) else chunk


def get_torch_chunk_size(chunk: Any) -> int | None:
    """Return the chunk size for torch's own transforms, which take an int or None."""
    known = make_chunks(chunk)
    return None if known is None or known.size == "auto" else known.size
