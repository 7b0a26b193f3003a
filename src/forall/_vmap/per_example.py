"""Examples taken out of their levels, one after another, in the order of the loop."""

from __future__ import annotations

import itertools
from functools import cmp_to_key
from typing import TYPE_CHECKING, Any

import torch

from forall._compat import pytree
from forall._compat.wrapper_tensor import Wrapper
from forall._vmap.batched_tensor import Batched, wrap

if TYPE_CHECKING:
    from collections.abc import Iterator

Places = dict[Any, int]  # the number of an example of each vmap level


class Copied:
    """A tensor, or a list of them, that is to be copied for each example."""

    __slots__ = ("of",)

    def __init__(self, of: Any) -> None:
        self.of = of


def levels_of(flat: list) -> list:
    """The vmap levels among whose examples these tensors differ, the outermost first."""
    found: dict[Any, None] = {}
    for a in flat:
        for b in pytree.leaves(a.of) if type(a) is Copied else (a,):
            while isinstance(b, Wrapper):
                if type(b) is Batched and b.axis is not None:
                    found[b.level] = None
                b = b.value
    return sorted(found, key=cmp_to_key(lambda a, b: -1 if a.is_outside(b) else 1))


def all_places(levels: list) -> Iterator[Places]:
    """Yield every example of these levels, in the order of the loop."""
    for numbers in itertools.product(*(range(level.size) for level in levels)):
        yield dict(zip(levels, numbers, strict=True))


def back_in(stack: torch.Tensor, levels: list) -> torch.Tensor:
    """Wrap a stack (N, *S) of the examples of these levels, in the loop's order, as one value."""
    out = stack.reshape(*(level.size for level in levels), *stack.shape[1:])
    for level in levels:
        out = wrap(out, 0, level)
    return out


def example_of(a: Any, places: Places) -> Any:
    """One example as a plain tensor."""
    if type(a) is Copied:
        return pytree.map_tensors(lambda t: example_of(t, places).clone(), a.of)
    while isinstance(a, Wrapper):
        axis = a.axis if type(a) is Batched else None
        a = a.value if axis is None else a.value.select(axis, places[a.level])
    return a.detach() if isinstance(a, torch.Tensor) else a
