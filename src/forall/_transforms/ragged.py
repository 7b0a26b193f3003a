"""Results of examples that have different shapes, as nested tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._core.errors import columns
from forall._core.levels import top
from forall._torch import trees
from forall._torch.wrapper import Wrapper

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forall._core.errors import Call

    Tensor = torch.Tensor


class Ragged:
    """One result of each example, on its way out."""

    __slots__ = ("examples",)

    def __init__(self, examples: list[Tensor]) -> None:
        self.examples = examples


def apiece(call: Call, stack: Tensor, place: int) -> Tensor | Ragged:
    """A stack of results, one by one; numbers stay stacked."""
    if stack.dim() < 2:
        return stack
    if place % stack.dim():
        raise ValueError(
            f"{call}: ragged=True puts the examples first.\n"
            f"{columns([('out_dims', str(place))])}\n"
            "Give out_dims=0 (its default) for results of several shapes."
        )
    return Ragged([*stack.unbind()])


def together(parts: Sequence[Ragged], order: list[int]) -> Ragged:
    """The results of parts of the examples, in the examples' order."""
    found = dict(zip(order, (t for part in parts for t in part.examples), strict=True))
    return Ragged([found[n] for n in sorted(found)])


def nested(call: Call, tree: Any) -> Any:
    """The results as they leave: a jagged nested tensor for each `Ragged`."""

    def one(leaf: Any) -> Any:
        if type(leaf) is not Ragged:
            return leaf
        examples = leaf.examples
        if top() is not None or any(isinstance(t, Wrapper) for t in examples):
            raise NotImplementedError(
                f"{call}: ragged=True inside another transform.\n"
                "Torch's nested tensors take ordinary tensors alone.\n"
                "Pad the results to one shape, or use ragged=True in the outermost vmap."
            )
        several = sum(len({t.shape[d] for t in examples}) > 1 for d in range(examples[0].dim()))
        layout = torch.jagged if several < 2 else torch.strided
        return torch.nested.as_nested_tensor(examples, layout=layout)

    flat, spec = trees.flatten(tree)
    return trees.unflatten([one(leaf) for leaf in flat], spec)
