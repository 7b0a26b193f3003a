"""The rows or columns of a Jacobian that a process computes: all of them, or the part of a rank."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class RankRows(Protocol):
    """The ranks of a mesh, each of which computes a part of the rows or columns of a Jacobian."""

    def take_part(self, what: str, tensors: Sequence[torch.Tensor]) -> list[range]:
        """Return the entries of each tensor's first dim that this rank takes.

        ``what`` names the tensors for messages. They must have the same layouts on all ranks.
        """
        ...


class Basis(NamedTuple):
    """The numbers of some tensors together that a Jacobian is computed for: all, or a rank's."""

    rows: list[range]  # of each tensor, in the concatenation of all flattened tensors
    shapes: list[tuple[int, ...]]

    @classmethod
    def choose(cls, what: str, tensors: Sequence[torch.Tensor], ranks: RankRows | None) -> Basis:
        """Return the numbers that this process computes derivatives for."""
        shapes = [tuple(t.shape) for t in tensors]
        rows, first = [], 0
        parts = [None] * len(shapes) if ranks is None else ranks.take_part(what, tensors)
        for i, (shape, part) in enumerate(zip(shapes, parts, strict=True)):
            inner, n = prod(shape[1:]), prod(shape)
            start, stop = 0, n
            if part is not None and shape:  # a tensor without dims is the same on all ranks
                start, stop = part.start * inner, part.stop * inner
                shapes[i] = (len(part), *shape[1:])
            rows.append(range(first + start, first + stop))
            first += n
        return cls(rows, shapes)

    @property
    def total(self) -> int:
        return sum(map(len, self.rows))

    def select(self, numbers: range) -> list[range]:
        """Return the rows of these numbers, which count the rows of all tensors one after another.

        Rows that follow each other are one range.
        """
        found: list[range] = []
        first = 0
        for rows in self.rows:
            part = rows[max(0, numbers.start - first) : max(0, numbers.stop - first)]
            first += len(rows)
            if found and len(part) and found[-1].stop == part.start:
                found[-1] = range(found[-1].start, part.stop)
            elif len(part):
                found.append(part)
        return found or [range(0)]
