"""`vmap` as the loop that it is equal to: each example by itself, on ordinary tensors.

This is for functions that only compute (`computing`), outside of other transforms. No level is
entered, so no operator costs more than in a loop that the user writes. What an example does to its
own row of an argument, and the history that its result has, are what they are in the loop. Where
anything else would have to be told (an example fails, results do not fit together), all is put
back, and the call is made in the other way, which tells it.
"""

from __future__ import annotations

from math import inf
from operator import is_
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from forall._core.levels import stack
from forall._lanes import is_running
from forall._torch import trees
from forall._torch.dispatch import dispatch_modes, function_modes
from forall._torch.names import PLAIN, set_version, version

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forall._transforms.computing import Bindings
    from forall._transforms.vmap import Mapping

    Tensor = torch.Tensor


class ElsewhereError(Exception):
    """The call has to be made in another way; nothing has changed."""


class TooLongError(ElsewhereError):
    """The loop takes longer than it may; ``seconds`` is an estimate for all examples."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds


def may_run(call: Mapping, bindings: Bindings) -> bool:
    """Return True if the loop over the examples gives all that a call has to give."""
    options, entering = call.options, call.entering
    if options.divergence != "split" or options.ragged or options.max_steps is not None:
        return False
    if options.report is not None or options.spares or entering.looks:
        return False
    if type(call.draws.flag) is not str or stack.top is not None or stack.listening:
        return False
    if is_running() or dispatch_modes() or function_modes():
        return False
    return bindings.may_take(entering.leaves)


def run(call: Mapping, bindings: Bindings, seconds: float = inf) -> tuple[list, Any]:
    """Return the results of all examples; raise `TooLongError` after so many seconds."""
    shared, own = [*bindings.tensors], []
    for leaf, dim in zip(call.entering.leaves, call.entering.dims, strict=True):
        if type(leaf) in PLAIN:
            (shared if dim is None else own).append(leaf)
    before = _Before([*shared, *own], copies=bindings.writes)
    try:
        found = _stacked(call, _results(call, bindings, seconds))
    except TooLongError:
        before.put_back()
        raise
    except Exception:
        if not before.can_be_put_back():
            raise
        found = None  # the other way tells it, and of which example
    except BaseException:
        before.put_back()
        raise
    if found is None or before.has_changed(len(shared)):
        before.put_back()
        raise ElsewhereError
    return found


class _Before:
    """The values of tensors before a call that may write into them."""

    __slots__ = ("copies", "tensors", "versions")

    def __init__(self, tensors: list[Tensor], *, copies: bool) -> None:
        self.tensors = tensors
        self.versions = [version(x) for x in tensors]
        self.copies = [x.clone() for x in tensors] if copies else []

    def has_changed(self, first: int) -> bool:
        """Return True if anything has been written into the first of them."""
        pairs = zip(self.tensors[:first], self.versions, strict=False)
        return any(version(x) != number for x, number in pairs)

    def can_be_put_back(self) -> bool:
        """Return True if nothing has changed of which there is no copy."""
        return bool(self.copies) or not self.has_changed(len(self.tensors))

    def put_back(self) -> None:
        """Undo what has been written since, where there are copies."""
        for x, number, copy in zip(self.tensors, self.versions, self.copies, strict=False):
            if version(x) != number:
                with torch.no_grad():
                    x.copy_(copy)
                set_version(x, number)


def _results(call: Mapping, bindings: Bindings, seconds: float) -> list[Any]:
    """Call ``func`` for one example after another."""
    entering, func = call.entering, call.func
    rows = [
        [leaf] * entering.size if dim is None else _rows(leaf, dim, bindings)
        for leaf, dim in zip(entering.leaves, entering.dims, strict=True)
    ]
    args, kwargs = entering.given
    is_flat = not kwargs and len(args) == len(rows) and all(map(is_, args, entering.leaves))
    results = []
    start = perf_counter()
    for row in zip(*rows, strict=True):
        args, kwargs = (row, {}) if is_flat else entering.unflatten([*row])
        results.append(func(*args, **kwargs))
        taken = perf_counter() - start
        if taken > seconds and len(results) < entering.size:
            raise TooLongError(taken / len(results) * entering.size)
    return results


def _rows(leaf: Tensor, dim: int, bindings: Bindings) -> Sequence[Tensor]:
    """Return the examples of a stack, each a view of its own if it may be written to."""
    if bindings.writes:
        return [leaf.select(dim, n) for n in range(leaf.shape[dim])]
    return leaf.unbind(dim)


def _stacked(call: Mapping, results: list[Any]) -> tuple[list, Any] | None:
    """Stack the results as `vmap` does; None if they do not fit together."""
    first = results[0]
    if type(first) is torch.Tensor:
        spec = trees.flatten(first)[1]
        columns: list[Sequence[Any]] = [results]
    else:
        leaves, spec = trees.flatten(first)
        flat = [leaves]
        for result in results[1:]:
            more, its_spec = trees.flatten(result)
            if its_spec != spec:
                return None
            flat.append(more)
        columns = [*zip(*flat, strict=True)]
    if trees.contexts(spec):
        return None
    left = []
    for column, place in zip(columns, call.places.of(spec), strict=True):
        whole = _column(column, place)
        if whole is None:
            return None
        left.append(whole[0])
    return left, spec


def _column(column: Sequence[Any], place: int | None) -> tuple[Any] | None:
    """Stack one result of all examples, in a tuple of one; None if they do not fit together."""
    first = column[0]
    kind = type(first)
    if any(type(x) is not kind for x in column):
        return None
    if kind is torch.Tensor and place is not None:
        rank = first.dim() + 1
        if not -rank <= place < rank or any(
            x.shape != first.shape or x.dtype != first.dtype or x.layout is not torch.strided
            for x in column
        ):
            return None
        return (torch.stack([*column], place % rank),)
    if kind in (int, float, bool, complex) and place is not None and place in (0, -1):
        return (torch.tensor([*column]),)
    if (first is None or kind is str) and all(x == first for x in column):
        return (first,)
    return None
