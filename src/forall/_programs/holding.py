"""Whether many things are what they were, in a few passes that do not come back to Python."""

from __future__ import annotations

from itertools import chain, repeat, starmap
from operator import attrgetter, is_, methodcaller
from typing import TYPE_CHECKING, Any

import torch

from forall._torch.unchanged import alike, beneath, writes_into

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

UNSET = object()
_values = methodcaller("values")
_kind = attrgetter("shape", "dtype", "requires_grad")


def holding(
    attributes: Iterable[tuple[Any, str, Any]],
    names: Iterable[tuple[Mapping, str, Any]],
    dicts: Iterable[tuple[Mapping, tuple, tuple]],
    lists: Iterable[tuple[Any, tuple]],
    tensors: Sequence[torch.Tensor],
    others: Iterable[Callable[[], bool]] = (),
) -> Callable[[], bool]:
    """A function that tells whether all of these hold what they held, compared by identity.

    Of tensors it is the layout, and whether they require grad.
    """
    attributes, names, dicts = [*attributes], [*names], [*dicts]
    each = [
        *_of_attributes([row for row in attributes if row[2] is not UNSET]),
        *_of_unset([row[:2] for row in attributes if row[2] is UNSET]),
        *_of_lists(*_columns(lists, 2)),
        *_unless_untouched(
            [row[0] for row in (*names, *dicts)],
            [*_of_names(*_columns(names, 3)), *_of_dicts(*_columns(dicts, 3))],
        ),
        *_of_tensors(tensors),
        *others,
    ]

    def holds() -> bool:
        try:
            for check in each:
                if not check():
                    return False
        except (AttributeError, ValueError):  # it has none now, or a cell is empty
            return False
        return True

    return holds


def _unless_untouched(
    dicts: Iterable[Mapping], careful: list[Callable[[], bool]]
) -> list[Callable[[], bool]]:
    """What is found once of dicts stays so for as long as nobody writes into any of them."""
    counted = [*{id(d): d for d in map(beneath, dicts)}.values()]
    if any(type(d) is not dict for d in counted):
        return careful
    found: list[int] = []

    def check() -> bool:
        now = [*map(writes_into, counted)]
        if now != found:
            if not all(check() for check in careful):
                return False
            found[:] = now
        return True

    return if_any(counted, check)


def if_any(there: Any, check: Callable[[], bool]) -> list[Callable[[], bool]]:
    return [check] if there else []


def _of_attributes(rows):
    """Written out as Python, which takes half of what a pass over columns does."""
    given = {
        f"{c}{i}": x for i, row in enumerate(rows) for c, x in zip("av", row[::2], strict=True)
    }
    tests = [f"a{i}.{name} is v{i}" for i, (_, name, _) in enumerate(rows)]
    return if_any(rows, eval(f"lambda: {' and '.join(tests) or None}", given))  # noqa: S307 - our own


def _of_unset(rows):
    return if_any(rows, lambda: not any(starmap(_is_set, rows)))


def _of_names(homes, names, values):
    return if_any(homes, lambda: all(map(is_, map(dict.get, homes, names, repeat(UNSET)), values)))


def _of_dicts(dicts, keys, values):
    sizes = [*map(len, keys)]
    keys, values = [*chain(*keys)], [*chain(*values)]
    return if_any(
        dicts,
        lambda: (
            [*map(len, dicts)] == sizes
            and all(map(is_, chain.from_iterable(map(_values, dicts)), values))
            and all(map(is_, chain.from_iterable(dicts), keys))
        ),
    )


def _of_lists(lists, entries):
    sizes, entries = [*map(len, entries)], [*chain(*entries)]
    return if_any(
        lists,
        lambda: [*map(len, lists)] == sizes and all(map(is_, chain.from_iterable(lists), entries)),
    )


def _of_tensors(tensors):
    kinds, strides = [*map(_kind, tensors)], [*map(torch.Tensor.stride, tensors)]

    def careful() -> bool:
        return [*map(_kind, tensors)] == kinds and [*map(torch.Tensor.stride, tensors)] == strides

    quick = alike(tensors)
    return if_any(tensors, lambda: quick(*tensors) or careful())


def _is_set(thing: Any, name: str) -> bool:
    try:
        getattr(thing, name)
    except (AttributeError, ValueError):  # a cell's is the latter
        return False
    return True


def _columns(rows: Iterable[tuple], count: int) -> list[list]:
    rows = [*rows]
    return [[row[i] for row in rows] for i in range(count)]
