"""Indices of one example, as indices of the stack."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._vmap.rule_makers.basic import (
    MappedStack,
    expand_stack,
    is_mapped,
    lower_shared,
    move_to_front,
    pad_example_rank,
    reenter_level,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

aten = torch.ops.aten
Tensor = torch.Tensor
MASKS = (torch.bool, torch.uint8)


def make_example_index(size: int, device: torch.device, rank: int) -> Tensor:
    """(B, 1, .., 1): the number of each example, to index its axis with."""
    return torch.arange(size, device=device).reshape(size, *(1,) * rank)


class StackIndices:
    """The indices of ``x[i, :, j, ..]`` over stacks, and where their dims ``*I`` come out.

    Torch puts ``*I`` where the indices stand if they stand side by side (``lead`` dims before
    them), and first if they do not.
    """

    __slots__ = ("adjacent", "consumed", "indices", "lead", "mapped", "rank")

    def __init__(self, size: int, indices: Sequence[Any]) -> None:
        self.mapped = any(isinstance(i, MappedStack) for i in indices)
        entries = _replace_masks(indices) if self.mapped else list(indices)
        given = [n for n, i in enumerate(entries) if i is not None]
        self.lead = given[0]
        self.adjacent = given[-1] - given[0] + 1 == len(given)
        self.consumed = sum(entries[n].dim() if _is_mask(entries[n]) else 1 for n in given)
        self.rank = max(_index_rank(entries[n]) for n in given)
        self.indices = [pad_example_rank(i, self.rank) for i in entries]

    def index_examples(self, size: int, device: torch.device) -> list:
        """The indices to apply to the stack (B, *S)."""
        if not self.mapped:
            return [None, *self.indices]
        return [make_example_index(size, device, self.rank), *self.indices]

    def find_dim_shift(self) -> tuple[list[int], list[int]] | None:
        """The positions of the moved dims in (B, *R), and in the result of indexing (B, *S)."""
        if self.mapped and self.adjacent and self.lead:
            block = range(1, self.rank + 1)
            return [d + self.lead for d in block], list(block)
        if not self.mapped and not self.adjacent:
            return [0], [self.rank]
        return None


def _is_mask(i: Any) -> bool:
    return isinstance(i, Tensor) and i.dtype in MASKS


def _index_rank(i: Any) -> int:
    return i.v.dim() - 1 if isinstance(i, MappedStack) else 1 if _is_mask(i) else i.dim()


def _replace_masks(indices: Sequence[Any]) -> list:
    """Replace masks by the indices they name, which broadcast against indices with an axis B."""
    found: list = []
    for i in indices:
        found.extend(aten.nonzero.default(i).unbind(1) if _is_mask(i) else [i])
    return found


def take_indices(indices: Sequence[Any], level: Any, mask: bool = False) -> list:
    """The indices as a rule gets them; a mapped mask as the indices it names, or as it is."""
    found: list = []
    for i in indices:
        if not is_mapped(i, level):
            found.append(lower_shared(i, level))
        elif mask or i.dtype not in MASKS:
            found.append(MappedStack(move_to_front(i)))
        else:
            with reenter_level(level):
                places = aten.nonzero.default(i)
            found.extend(MappedStack(p) for p in move_to_front(places).unbind(2))
    return found


def stack_with_dim(a: Any, size: int) -> Tensor:
    """The stack (B, *S); an example of rank 0 gets one dim of size 1, to be indexed by dim 0."""
    v = expand_stack(a, size)
    return v.unsqueeze(1) if v.dim() == 1 else v


def is_rank_zero(a: Any) -> bool:
    return (a.v.dim() == 1) if isinstance(a, MappedStack) else a.dim() == 0


def expand_index(index: Tensor, dim: int, shape: Sequence[int]) -> Tensor:
    """(B, n) as an index of stacks of this shape, the same for all that lies beside ``dim``."""
    size, n = index.shape
    index = index.reshape(size, *(1,) * (dim - 1), n, *(1,) * (len(shape) - dim - 1))
    sizes = list(shape)
    sizes[dim] = n
    return index.expand(sizes)


def flatten_examples(v: Tensor) -> Tensor:
    """(B, *S) -> (B, N)."""
    return v.flatten(1) if v.dim() > 1 else v.unsqueeze(1)


def number_true_entries(mask: Tensor) -> Tensor:
    """(B, N): for each true entry which one it is, from 1; 0 for the false ones."""
    mask = flatten_examples(mask)
    return mask.cumsum(1) * mask


def spread_over_mask(mask: Tensor, source: Tensor) -> Tensor:
    """(B, N): the entries of source (B, n), one after another, where the mask is true.

    Entry 0 is for the false ones; too short a source is out of bounds, as it has to be.
    """
    return aten.constant_pad_nd.default(source, [1, 0]).gather(1, number_true_entries(mask))
