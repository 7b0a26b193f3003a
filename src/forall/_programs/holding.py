"""Whether many things are what they were, in a few passes that do not come back to Python."""

from __future__ import annotations

from itertools import chain, repeat
from operator import attrgetter, is_, methodcaller
from types import CellType
from typing import TYPE_CHECKING, Any

import torch

from forall._core.remembering import contents

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

UNSET = object()
_EMPTY = contents(CellType())
_contents = attrgetter("cell_contents")
_values = methodcaller("values")
_kind = attrgetter("shape", "dtype", "requires_grad")


def holding(
    cells: Iterable[tuple[CellType, Any]],
    attributes: Iterable[tuple[Any, str, Any]],
    names: Iterable[tuple[Mapping, str, Any]],
    dicts: Iterable[tuple[Mapping, tuple, tuple]],
    lists: Iterable[tuple[Any, tuple]],
    tensors: Sequence[torch.Tensor],
) -> Callable[[], bool]:
    """A function that tells whether all of these hold what they held, compared by identity.

    Of tensors it is the layout, and whether they require grad.
    """
    dicts, lists = [*dicts], [*lists]
    sized = [row[0] for row in (*dicts, *lists)]
    sizes = [len(row[1]) for row in (*dicts, *lists)]
    passes = [
        *_of_cells([row for row in cells if row[1] is not _EMPTY]),
        *_of_attributes(*_columns(attributes, 3)),
        *_of_names(*_columns(names, 3)),
        *_if(sized, lambda: [*map(len, sized)] == sizes),
        *_of_dicts(*_columns([row for row in dicts if row[1]], 3)),  # most have nothing in them
        *_of_lists(*_columns([row for row in lists if row[1]], 2)),
        *_of_tensors(tensors),
    ]
    empty = [cell for cell, value in cells if value is _EMPTY]
    passes += _if(empty, lambda: not any(map(_is_full, empty)))

    def holds() -> bool:
        try:
            for check in passes:
                if not check():
                    return False
        except ValueError:  # a cell is empty now
            return False
        return True

    return holds


def _if(there: Any, check: Callable[[], bool]) -> list[Callable[[], bool]]:
    return [check] if there else []


def _of_cells(rows):
    cells, contents = _columns(rows, 2)
    return _if(cells, lambda: all(map(is_, map(_contents, cells), contents)))


def _of_attributes(things, names, values):
    return _if(things, lambda: all(map(is_, map(getattr, things, names, repeat(UNSET)), values)))


def _of_names(homes, names, values):
    return _if(homes, lambda: all(map(is_, map(dict.get, homes, names, repeat(UNSET)), values)))


def _of_dicts(dicts, keys, values):
    keys, values = [*chain(*keys)], [*chain(*values)]
    return _if(
        dicts,
        lambda: (
            all(map(is_, chain.from_iterable(map(_values, dicts)), values))
            and all(map(is_, chain.from_iterable(dicts), keys))
        ),
    )


def _of_lists(lists, entries):
    entries = [*chain(*entries)]
    return _if(lists, lambda: all(map(is_, chain.from_iterable(lists), entries)))


def _of_tensors(tensors):
    kinds, strides = [*map(_kind, tensors)], [*map(torch.Tensor.stride, tensors)]
    return _if(
        tensors,
        lambda: [*map(_kind, tensors)] == kinds and [*map(torch.Tensor.stride, tensors)] == strides,
    )


def _is_full(cell: CellType) -> bool:
    try:
        _contents(cell)
    except ValueError:
        return False
    return True


def _columns(rows: Iterable[tuple], count: int) -> list[list]:
    return [[row[i] for row in rows] for i in range(count)]
