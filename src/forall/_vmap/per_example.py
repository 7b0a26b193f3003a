"""Examples taken out of their levels, one after another, in the order of the loop."""

from __future__ import annotations

import itertools
from functools import cmp_to_key
from typing import TYPE_CHECKING, Any

import torch

from forall._compat import pytree
from forall._compat.wrapper_tensor import Wrapper
from forall._vmap.batched_tensor import BatchedTensor, wrap_stack

if TYPE_CHECKING:
    from collections.abc import Iterator

ExampleNumbers = dict[Any, int]  # the number of an example of each vmap level


class CopyPerExample:
    """A tensor, or a list of them, that is to be copied for each example."""

    __slots__ = ("of",)

    def __init__(self, of: Any) -> None:
        self.of = of


def find_mapped_levels(flat: list) -> list:
    """The vmap levels among whose examples these tensors differ, the outermost first."""
    found: dict[Any, None] = {}
    for a in flat:
        for b in pytree.get_leaves(a.of) if type(a) is CopyPerExample else (a,):
            while isinstance(b, Wrapper):
                if type(b) is BatchedTensor and b.axis is not None:
                    found[b.level] = None
                b = b.value
    return sorted(found, key=cmp_to_key(lambda a, b: -1 if a.is_outside(b) else 1))


def iter_example_numbers(levels: list) -> Iterator[ExampleNumbers]:
    """Yield every example of these levels, in the order of the loop."""
    for numbers in itertools.product(*(range(level.size) for level in levels)):
        yield dict(zip(levels, numbers, strict=True))


def rewrap_examples(stack: torch.Tensor, levels: list) -> torch.Tensor:
    """Wrap a stack (N, *S) of the examples of these levels, in the loop's order, as one value."""
    out = stack.reshape(*(level.size for level in levels), *stack.shape[1:])
    for level in levels:
        out = wrap_stack(out, 0, level)
    return out


def select_example(a: Any, places: ExampleNumbers) -> Any:
    """One example as a plain tensor."""
    if type(a) is CopyPerExample:
        return pytree.map_tensors(lambda t: select_example(t, places).clone(), a.of)
    while isinstance(a, Wrapper):
        axis = a.axis if type(a) is BatchedTensor else None
        a = a.value if axis is None else a.value.select(axis, places[a.level])
    return a.detach() if isinstance(a, torch.Tensor) else a
