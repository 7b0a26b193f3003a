"""Placements: which tensor arguments of a sample are mapped, and along which axis."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .entries import EXAMPLES, Sample


@dataclass
class Case:
    sample: Sample
    pattern: str
    in_dims: tuple
    size: int = EXAMPLES

    @property
    def call(self) -> Callable[..., Any]:
        if self.sample.leaves[0]:
            return self.sample.call
        # A factory: nothing of its own to map, so it is called under a mapped argument it ignores.
        return lambda ignored: self.sample.call()

    def args(self, size: int | None = None) -> tuple:
        """The arguments, made anew each time: in-place functions write into them."""
        size = self.size if size is None else size
        examples = self.sample.leaves
        if not examples[0]:
            return (torch.arange(size),)
        return tuple(_place(j, d, examples, size) for j, d in enumerate(self.in_dims))

    def __str__(self) -> str:
        return (
            f"sample {self.sample.number} {self.sample.text}, in_dims={self.in_dims}, "
            f"{self.size} examples"
        )


def _place(j: int, dim: int | None, examples: list[list[Tensor]], size: int) -> Tensor:
    if dim is None:
        return examples[0][j].clone()
    if size == 0:
        return torch.stack([examples[0][j]], dim).narrow(dim, 0, 0).clone()
    return torch.stack([examples[k][j] for k in range(size)], dim)


def cases_of(
    sample: Sample, turn: int, storage: bool = False, any_value: bool = False
) -> Iterator[Case]:
    """The placements of one sample; ``turn`` is its place among the entry's samples.

    The sizes 1 and 0 come with the first sample only, and with each further one another single
    argument is the mapped one: all of it for all samples would say little more and take longer.
    """
    ranks = [x.ndim for x in sample.leaves[0]]
    n = len(ranks)
    if n == 0:
        yield Case(sample, "factory", (0,))
        return
    seen: set[tuple] = set()
    for pattern, in_dims in _patterns(ranks, turn):
        if storage and any(d not in (0, None) for d in in_dims):
            continue
        # -1 and a positive axis that mean the same are one placement.
        key = tuple(None if d is None else d % (r + 1) for d, r in zip(in_dims, ranks, strict=True))
        if key not in seen:
            seen.add(key)
            yield Case(sample, pattern, in_dims)
    if turn == 0:
        yield Case(sample, "size 1", (0,) * n, 1)
        yield Case(sample, "size 0", (0,) * n, 0)
    mixed = _mixed_dtypes(sample, turn)
    if mixed is not None:
        yield Case(mixed, "dtypes, all at 0", (0,) * n)
        yield Case(mixed, "dtypes, first only", (0,) + (None,) * (n - 1))
        yield Case(mixed, "dtypes, others only", (None,) + (0,) * (n - 1))

    special = _special_values(sample) if any_value else None
    if special is not None:
        yield Case(special, "special values, all at 0", (0,) * n)
        yield Case(special, "special values, first only", (0,) + (None,) * (n - 1))


def _special_values(sample: Sample) -> Sample | None:
    """NaN, infinity and 0 among the values, elsewhere in each example, and alike in all arguments.

    Random arguments are finite, not 0 and never equal: isnan, any and eq have one answer for them.
    """
    special = torch.tensor([float("nan"), float("inf"), 0.0, float("-inf")])
    if not any(_real(x) for x in sample.leaves[0]):
        return None

    def change(k: int, x: Tensor) -> Tensor:
        if not _real(x):
            return x
        flat = x.flatten().clone()
        for i in range(k, flat.numel(), 2):
            flat[i] = special[(i // 2 + k) % 4]
        return flat.reshape(x.shape)

    leaves = [[change(k, x) for x in values] for k, values in enumerate(sample.leaves)]
    return replace(sample, leaves=leaves, text=f"{sample.text} with special values")


def _mixed_dtypes(sample: Sample, turn: int) -> Sample | None:
    """One argument 0-dimensional and of a wider dtype than the others.

    A 0-dim tensor does not widen a result that others of its kind give dimensions to, and it has
    to stay 0-dim in that respect when it is mapped. Entries that refuse such arguments have no
    case.
    """
    first = sample.leaves[0]
    reals = [j for j, x in enumerate(first) if _real(x)]
    if len(reals) < 2:
        return None
    single = reals[-1 if turn % 2 == 0 else 0]
    # Floats in one half of the sweep, integers in the other.
    wide = first[single].dtype == torch.float64
    narrow, wider = (torch.float32, torch.float64) if wide else (torch.int32, torch.int64)

    def change(j: int, x: Tensor) -> Tensor:
        if j == single:
            return x.flatten()[0].to(wider)
        return x.to(narrow) if j in reals else x

    leaves = [[change(j, x) for j, x in enumerate(values)] for values in sample.leaves]
    text = f"{sample.text} with {narrow} and argument {single} a {wider} of no dimensions"
    return replace(sample, leaves=leaves, text=text, working=torch.float32)


def _real(x: Tensor) -> bool:
    return x.is_floating_point() and x.layout == torch.strided and x.numel() > 0


def _patterns(ranks: list[int], turn: int) -> Iterator[tuple[str, tuple]]:
    n = len(ranks)
    yield "all at 0", (0,) * n
    if n > 1:
        yield "first only", (0,) + (None,) * (n - 1)
        yield "others only", (None,) + (0,) * (n - 1)
    if n > 2:
        single = 1 + turn % (n - 1)
        yield f"only {single}", tuple(0 if j == single else None for j in range(n))
    yield "last, others at 0", (-1,) + (0,) * (n - 1)
    middle = tuple((r + 1) // 2 for r in ranks)
    yield "middle", middle
    if n > 1:
        yield "middle, others last", (middle[0],) + (-1,) * (n - 1)
