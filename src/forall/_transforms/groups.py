"""Running a function once for every group of examples that agree, where they part.

The floor of data-dependent control flow: any Python, no source needed. A run that meets a question
its examples answer differently ends; what it did besides is undone; each group runs by itself, and
the results are put together again in the order of the examples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forall._batching.failing import name_example
from forall._core.remembering import Remembered
from forall._torch import generators
from forall._torch.dispatch import functions_off
from forall._transforms import mapping

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forall._batching.interpreter import VmapLevel
    from forall._transforms.vmap import Mapping, Places

    Part = tuple[Sequence[int], list, Any]  # numbers of examples, the results' leaves, their tree


class Groups(BaseException):
    """A run ended because its examples part into these groups."""

    def __init__(self, groups: list[list[int]]) -> None:
        super().__init__(groups)
        self.groups = groups


class once_more:
    """A run that can be undone: where its examples part, all is as it was before it began."""

    __slots__ = ("drawn", "level", "python")

    def __init__(self, call: Mapping, level: VmapLevel) -> None:
        self.level = level
        self.drawn = self.python = None
        if level.parts:
            self.python = Remembered(call.func, call.entering.given)
            if call.draws.flag != "error":
                self.drawn = generators.states(call.entering.leaves)

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, _error: object, _trace: object) -> None:
        parted = self.level.parted
        if parted is None:
            return
        # Whatever became of it on its way: a bare `except:` of the user's may have taken it.
        self.level.ledger.undo()
        if self.python is not None:
            self.python.restore()
        if self.drawn is not None:
            generators.restore(self.drawn)
        raise Groups(parted) from None


def in_groups(call: Mapping, groups: list[list[int]]) -> tuple[list, Any]:
    """The results of all examples; the error is the loop's, that of the first example to fail."""
    todo, parts = sorted(groups), []
    failed: tuple[int, Exception] | None = None
    drawn = generators.states(call.entering.leaves) if call.draws.flag == "same" else None
    while todo:
        numbers = todo.pop(0)
        if failed is not None and numbers[0] > failed[0]:
            continue
        part = call.some(numbers)
        if drawn is not None:
            generators.restore(drawn)
        try:
            flat, spec, written = part.once()
        except Groups as again:
            todo = sorted([*todo, *([numbers[n] for n in g] for g in again.groups)])
        except Exception as error:  # noqa: BLE001 - the user's error, whatever it is
            name_example(error, part.origin, 0)
            failed = numbers[0], error
        else:
            _put_back(call, part, numbers, written)
            parts.append((numbers, flat, spec))
    if failed is not None:
        raise failed[1]
    return joined(call.places, sorted(parts, key=lambda p: p[0][0]))


def _put_back(call: Mapping, part: Mapping, numbers: list[int], written: list[int]) -> None:
    """What the examples of a group wrote into mapped arguments, in the caller's own tensors."""
    with functions_off():
        for i in written:
            whole, dim = call.entering.leaves[i], call.entering.dims[i]
            rows = torch.tensor(numbers, device=whole.device)
            whole.index_copy_(dim, rows, part.entering.leaves[i])


def joined(places: Places, parts: list[Part]) -> tuple[list, Any]:
    """The results of all parts, examples in order."""
    numbers, _, spec = parts[0]
    for other, _, its_spec in parts:
        if its_spec != spec:
            raise mapping.trees_differ(places.call, numbers[0], spec, other[0], its_spec)
    order = [n for part in parts for n in part[0]]
    firsts = [part[0][0] for part in parts]
    columns = zip(*(flat for _, flat, _ in parts), strict=True)
    return [
        _in_order(mapping.joined(places.call, column, place, firsts), place, order)
        for column, place in zip(columns, places.of(spec), strict=True)
    ], spec


def _in_order(result: Any, place: int | None, order: list[int]) -> Any:
    ordered = all(n == i for i, n in enumerate(order))
    if ordered or place is None or not isinstance(result, torch.Tensor):
        return result
    back = torch.tensor(order, device=result.device).argsort()
    return result.index_select(place % result.dim(), back)
