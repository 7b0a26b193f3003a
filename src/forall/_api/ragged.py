"""Results of examples that have different shapes, as nested tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._api.mapped_inputs import LeafPlace
from forall._api.nested_components import NestedExamples
from forall._compat import pytree
from forall._compat.documented_error import documented_error
from forall._compat.wrapper_tensor import Wrapper
from forall._core.errors import format_columns
from forall._core.levels import top

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forall._core.errors import TransformCall

    Tensor = torch.Tensor


class RaggedResult:
    """One result of each example, unstacked; ``place`` is its out_dim."""

    __slots__ = ("examples", "place")

    def __init__(self, examples: list[Tensor], place: int) -> None:
        self.examples = examples
        self.place = place

    def stack_first(self) -> Tensor:
        """Return the result of the first example alone, as a stack."""
        return self.examples[0].unsqueeze(self.place)


def split_examples(stack: Tensor, place: int) -> Tensor | RaggedResult:
    """Return a stack of results as single results; numbers stay stacked."""
    if stack.dim() < 2:
        return stack
    return RaggedResult([*stack.unbind(place)], place)


def merge_ragged(parts: Sequence[Tensor | RaggedResult], order: list[int]) -> RaggedResult:
    """Return the results of groups of the examples, in the examples' order."""
    place = next(part.place for part in parts if isinstance(part, RaggedResult))
    rows = (t for p in parts for t in (p.examples if isinstance(p, RaggedResult) else p.unbind()))
    found = dict(zip(order, rows, strict=True))
    return RaggedResult([found[n] for n in sorted(found)], place)


def nest_results(call: TransformCall, tree: Any, given: Sequence[Any], *, always: bool) -> Any:
    """Return the results with a nested tensor in the place of each `RaggedResult`.

    The nested tensor is jagged if its examples differ in one dim at most. If it has the lengths of
    a mapped nested tensor among ``given``, it shares the offsets. Results of one shape are stacked,
    unless ``always``.
    """

    def one(leaf: Any, at: LeafPlace) -> Any:
        if type(leaf) is not RaggedResult:
            return leaf
        examples, place = leaf.examples, leaf.place
        shapes = [[*t.shape] for t in examples]
        other = next((n for n, shape in enumerate(shapes) if shape != shapes[0]), None)
        if other is None and not always:
            return torch.stack(examples, place)
        if place % (examples[0].dim() + 1):
            rows = [("out_dims", str(place))]
            if other is not None:
                rows += [(f"{at.describe()}example {n}", str(shapes[n])) for n in (0, other)]
            raise documented_error(ValueError, "results-differ-in-shape")(
                f"{call}: results of several shapes leave as a nested tensor, examples first.\n"
                f"{format_columns(rows)}\n"
                "Give out_dims=0 (its default), or return the same shape for every example."
            )
        if top() is not None or any(isinstance(t, Wrapper) for t in examples):
            raise documented_error(NotImplementedError, "results-differ-in-shape")(
                f"{call}: results of several shapes inside another transform.\n"
                "Torch's nested tensors take ordinary tensors alone.\n"
                "Pad the results to one shape, or return them from the outermost vmap."
            )
        if len({*map(len, shapes)}) > 1:
            rows = [(f"{at.describe()}example {n}", str(shapes[n])) for n in (0, other or 0)]
            raise documented_error(ValueError, "results-differ-in-shape")(
                f"{call}: the results of the examples differ in rank.\n{format_columns(rows)}\n"
                "A nested tensor has components of one rank. Return the same for every example."
            )
        several = sum(len({*sizes}) > 1 for sizes in zip(*shapes, strict=True))
        if several > 1:
            return torch.nested.as_nested_tensor(examples, layout=torch.strided)
        for argument in given:
            found = argument.find_offsets(examples) if type(argument) is NestedExamples else None
            if found is not None:
                offsets, d = found
                values = torch.cat(examples, d)
                return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=d + 1)
        return torch.nested.as_nested_tensor(examples, layout=torch.jagged)

    flat, spec = pytree.flatten(tree)
    return pytree.unflatten([one(leaf, LeafPlace(spec, n)) for n, leaf in enumerate(flat)], spec)
