"""`MappedCall`: one call of a mapped function, on all or some of its examples."""

from __future__ import annotations

from array import array
from contextlib import nullcontext
from itertools import islice
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forall._api.nested_components import NestedExamples
from forall._api.subclass_arguments import ExampleAttributes, find_example_attributes
from forall._compat import pytree, tensordict, trace_modes
from forall._compat.tensor_subclass import is_of_users_class, strip_users_class
from forall._core.levels import run_outside, top
from forall._core.named_axes import make_axis

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from forall._api.mapped_inputs import OutDims
    from forall._core.errors import CallOrigin, TransformCall
    from forall._core.named_axes import Axis
    from forall._divergence.report import Report
    from forall._vmap.mutation.mutation_log import MutationLog
    from forall._vmap.randomness import CallRandomness
    from forall._vmap.vmap_level import VmapLevel

    Tensor = torch.Tensor


class VmapOptions(NamedTuple):
    """The options for running examples that diverge."""

    divergence: str
    ragged: bool
    max_steps: int | None
    report: Report | None
    retries_on_oom: bool = False  # True if a run is undone when memory does not suffice
    logs: list[MutationLog] | None = None  # collects the mutation log of each run
    # Returns True if a run that ended with an error is to be run in another way.
    must_rerun: Callable[[VmapOptions, VmapLevel, BaseException], bool] | None = None


class MappedArguments(NamedTuple):
    """The arguments of a call, each with the dim that counts its examples, or None."""

    leaves: list
    spec: Any
    dims: list
    size: int
    given: tuple  # args and kwargs, as they came
    looks: dict[int, ExampleAttributes]  # by the position of a leaf of a class of the user's

    def strip_user_classes(self, call: TransformCall) -> MappedArguments:
        """Return the arguments as plain tensors, with the user's classes noted in ``looks``."""
        found = {
            i: find_example_attributes(call, leaf, dim, self.size)
            for i, (leaf, dim) in enumerate(zip(self.leaves, self.dims, strict=True))
            if dim is not None and is_of_users_class(leaf)
        }
        leaves = [strip_users_class(x) if i in found else x for i, x in enumerate(self.leaves)]
        return self._replace(leaves=leaves, looks=found)

    def make_axis(self, name: Hashable, chunk_size: Any, ranks: Any = None) -> Axis:
        """Return a named axis of all examples."""
        for leaf, dim in zip(self.leaves, self.dims, strict=True):
            if dim is not None:
                device = leaf.whole.device if type(leaf) is NestedExamples else leaf.device
                return make_axis(name, self.size, device, chunk_size, ranks)
        return make_axis(name, self.size, torch.get_default_device(), chunk_size, ranks)

    def unflatten(self, entered: list) -> tuple[tuple, dict]:
        """Return args and kwargs of an example; arguments without mapped leaves are the same."""
        old, old_named = self.given
        if not old_named and len(old) == len(entered) and all(map(is_, old, self.leaves)):
            return tuple(entered), {}
        args, kwargs = pytree.unflatten(entered, tensordict.make_example_spec(self.spec, self.dims))
        if None not in self.dims:
            return args, kwargs
        by_place, by_name = (s.children() for s in self.spec.children())
        left = iter(self.dims)
        kept = [
            all(d is None for d in [*islice(left, child.num_leaves)])
            for child in (*by_place, *by_name)
        ]
        n = len(args)
        args = tuple(o if k else a for o, a, k in zip(old, args, kept[:n], strict=True))
        named = {key: old_named[key] for key, k in zip(kwargs, kept[n:], strict=True) if k}
        return args, {**kwargs, **named}


class MappedCall(NamedTuple):
    """One call of a mapped function, on all or some of its examples."""

    func: Callable
    arguments: MappedArguments
    places: OutDims  # of the axes of examples in the results
    draws: CallRandomness
    origin: CallOrigin  # the user's call, and the numbers of these examples in it
    options: VmapOptions
    groups: list[list[int]] | None = None  # of examples that agree, once they are known
    axis: Axis | None = None  # if the call has named it

    def some(self, numbers: Sequence[int]) -> MappedCall:
        """Return the call on some of the examples, from 0: views for a range, else copies."""
        arguments, origin = self.arguments, self.origin
        leaves = [
            leaf if dim is None else _select_examples(leaf, dim, numbers)
            for leaf, dim in zip(arguments.leaves, arguments.dims, strict=True)
        ]
        if isinstance(numbers, range):
            known = origin.numbers[numbers.start : numbers.stop]
        elif origin.numbers == range(origin.size):
            known = numbers
        else:
            known = [origin.numbers[n] for n in numbers]
        return self._replace(
            arguments=arguments._replace(
                leaves=leaves,
                size=len(numbers),
                looks={
                    i: found.select_attributes(lambda t: _select_examples(t, 0, numbers))
                    for i, found in arguments.looks.items()
                },
            ),
            origin=origin._replace(numbers=known),
        )


def _select_examples(leaf: Any, dim: int, numbers: Sequence[int]) -> Any:
    if isinstance(leaf, NestedExamples):
        return leaf.some(numbers)
    if isinstance(numbers, range):
        return leaf.narrow(dim, numbers.start, len(numbers))
    return select_rows(leaf, dim, numbers)


def make_index(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Return whole numbers as a tensor: `torch.tensor` would inspect the type of each.

    A mode beneath forall's, as that of fake tensors, has to see the tensor being made.
    """
    if not numbers or trace_modes.has_foreign_mode():
        return torch.tensor(numbers, dtype=torch.int64, device=device)
    return torch.frombuffer(array("q", numbers), dtype=torch.int64).to(device)


def select_rows(leaf: Tensor, dim: int, numbers: Sequence[int]) -> Tensor:
    """Return these examples of a stack, in a tensor of their own."""
    at = make_index(numbers, leaf.device)
    return RowSelection.apply(leaf, dim, at) if leaf.requires_grad else leaf.index_select(dim, at)


class RowSelection(torch.autograd.Function):
    """`index_select` with a backward that acts under the level where the forward ran."""

    @staticmethod
    def forward(stack: Tensor, dim: int, at: Tensor) -> Tensor:
        return stack.index_select(dim, at)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:  # noqa: ARG004
        stack, ctx.dim, ctx.at = inputs
        ctx.shape, ctx.level = stack.shape, top()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:
        with _act_under(ctx.level):
            return g.new_zeros(ctx.shape).index_copy(ctx.dim, ctx.at, g), None, None

    @staticmethod
    def jvp(ctx: Any, t: Tensor | None, *_: None) -> Tensor | None:
        return None if t is None else t.index_select(ctx.dim, ctx.at)


def _act_under(level: Any) -> Any:
    """Act as code under ``level``, if a backward pass runs further in."""
    inner: Any = top()
    while inner is not None and inner.parent is not level:
        inner = inner.parent
    return nullcontext() if inner is None else run_outside(inner)
