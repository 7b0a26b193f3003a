"""Nested tensors as mapped arguments: the examples are the components, of several shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from forall._compat.dispatch_state import functions_off
from forall._compat.jagged_layout import Jagged, find_jagged_dim, split_components

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    Tensor = torch.Tensor


class NestedExamples:
    """The examples of a mapped nested tensor: views of it, of several shapes."""

    __slots__ = ("examples", "whole")

    def __init__(self, whole: Tensor, examples: Sequence[Tensor]) -> None:
        self.whole = whole
        self.examples = examples

    @classmethod
    def from_nested(cls, whole: Tensor) -> NestedExamples:
        with functions_off():
            is_jagged = type(whole) is Jagged
            return cls(whole, split_components(whole) if is_jagged else whole.unbind())

    def some(self, numbers: Sequence[int]) -> Tensor | NestedExamples:
        """Return some of the examples: a stack if they are one or have one shape."""
        if not isinstance(numbers, range):
            return torch.stack([self.examples[n] for n in numbers])
        if len(numbers) == 1:
            return self.examples[numbers.start].unsqueeze(0)
        return NestedExamples(self.whole, self.examples[numbers.start : numbers.stop])

    def write_rows(self, numbers: Sequence[int], rows: Tensor) -> None:
        """Write rows into these examples."""
        for n, row in zip(numbers, rows.unbind(), strict=True):
            self.examples[n].copy_(row)

    def find_offsets(self, examples: Sequence[Tensor]) -> tuple[Tensor, int] | None:
        """Return the offsets of the nested tensor and its ragged dim, if the lengths agree.

        ``examples`` are tensors whose sizes along one dim are compared with the lengths.
        """
        whole = self.whole
        if type(whole) is not Jagged or whole.lengths() is not None:
            return None
        own = find_jagged_dim(whole)
        lengths = [x.shape[own] for x in self.examples]
        for d in sorted(range(examples[0].dim()), key=lambda d: d != own):
            if lengths == [x.shape[d] for x in examples]:
                return whole.offsets(), d
        return None


def group_by_shape(given: Iterable[NestedExamples]) -> list[list[int]]:
    """Group the numbers of the examples so that each group has one shape in every argument."""
    found: dict[tuple, list[int]] = {}
    for n, row in enumerate(zip(*(x.examples for x in given), strict=True)):
        found.setdefault(tuple(x.shape for x in row), []).append(n)
    return [*found.values()]
