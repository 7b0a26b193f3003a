"""Whether many things are what they were, asked with as little Python as can be."""

from __future__ import annotations

from collections import OrderedDict
from itertools import chain, repeat, starmap
from operator import is_, methodcaller
from typing import TYPE_CHECKING, Any

import torch

from forall._core.remembering import UNSET
from forall._torch.memory import has_memory
from forall._torch.unchanged import alike, beneath, writes_into

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

_SIZED = (dict, OrderedDict)  # that are true where they hold anything
_values = methodcaller("values")


def holding(
    attributes: Iterable[tuple[Any, str, Any]],
    names: Iterable[tuple[Mapping, str, Any]],
    missing: Iterable[tuple[Mapping, frozenset[str]]],
    dicts: Iterable[tuple[Mapping, tuple, tuple]],
    lists: Iterable[tuple[Any, tuple]],
    looks: Looks,
    others: Iterable[Callable[[], bool]] = (),
) -> Callable[[], bool]:
    """A function that tells whether all of these hold what they held, compared by identity."""
    attributes, dicts = [*attributes], [*dicts]
    empty = [row[0] for row in dicts if not row[1] and type(row[0]) in _SIZED]
    dicts = [row for row in dicts if row[1] or type(row[0]) not in _SIZED]
    counted, counts, unwritten = _of_dicts([*names], [*missing], dicts)
    rows = [row for row in attributes if row[2] is not UNSET]
    same, slowly = (
        _of_attributes(rows, empty, counted, counts, looks.tensors, check)
        for check in (looks.at_once or looks.exactly, looks.exactly)
    )
    rest = [
        *_of_unset([row[:2] for row in attributes if row[2] is UNSET]),
        *_of_lists(*_columns(lists, 2)),
        *_of_entries(*_columns([r for r in dicts if type(beneath(r[0])) is not dict], 3)),
        *others,
    ]

    def holds() -> bool:
        try:
            return (same() or (unwritten() and slowly())) and (
                not rest or all(check() for check in rest)
            )
        except Exception:  # noqa: BLE001 - it has none now, a cell is empty, or the user's raises
            return False

    return holds


class Looks:
    """What tensors look like now: they are to stay so, but for their numbers."""

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        self.tensors = [*tensors]
        self.at_once = alike(self.tensors)
        self._now = [*map(_look, self.tensors)]

    def exactly(self, *tensors: torch.Tensor) -> bool:
        return [*map(_look, tensors)] == self._now


def _look(t: torch.Tensor) -> tuple:
    strides = t.stride() if has_memory(t) else t.layout
    return type(t), t.shape, t.dtype, t.device, t.requires_grad, strides, t.is_inference()


def if_any(there: Any, check: Callable[[], bool]) -> list[Callable[[], bool]]:
    return [check] if there else []


def written_out(tests: Iterable[str], given: dict[str, Any], arguments: str = "") -> Callable:
    """One line of Python for all tests: each costs what it does, and nothing is called for it."""
    given["__name__"] = __name__
    return eval(f"lambda {arguments}: {' and '.join(tests) or True}", given)  # noqa: S307 - ours


def _of_attributes(
    rows: Sequence[tuple[Any, str, Any]],
    empty: Sequence[Any],
    counted: Sequence[dict],
    counts: list[int],
    tensors: Sequence[torch.Tensor],
    look: Callable[..., bool],
) -> Callable[[], bool]:
    given = {f"a{i}": thing for i, (thing, _, _) in enumerate(rows)}
    given |= {f"v{i}": value for i, (_, _, value) in enumerate(rows)}
    given |= {f"e{i}": d for i, d in enumerate(empty)}
    given |= {"of": writes_into, "counted": counted, "counts": counts, "map": map}
    given |= {"look": look, "tensors": tensors}
    tests = [f"a{i}.{name} is v{i}" for i, (_, name, _) in enumerate(rows)]
    tests += [f"not e{i}" for i, _ in enumerate(empty)]
    tests += ["[*map(of, counted)] == counts"] if counted else []
    tests += ["look(*tensors)"] if tensors else []
    return written_out(tests, given)


def _of_dicts(
    names: list, missing: list, dicts: list
) -> tuple[list[dict], list[int], Callable[[], bool]]:
    """Dicts, how often each was written into when all were looked at, and what looks anew."""
    homes = [beneath(row[0]) for row in (*names, *missing, *dicts)]
    counted = [*{id(d): d for d in homes if type(d) is dict}.values()]
    checks = [
        *_of_names(*_columns(names, 3)),
        *if_any(missing, lambda: all(none.isdisjoint(home) for home, none in missing)),
        *_of_entries(*_columns(dicts, 3)),
    ]
    counts: list[int] = []

    def unwritten() -> bool:
        now = [*map(writes_into, counted)]
        if now != counts:
            if not all(check() for check in checks):
                return False
            counts[:] = now
        return True

    return counted, counts, unwritten


def _of_unset(rows):
    return if_any(rows, lambda: not any(starmap(_is_set, rows)))


def _of_names(homes, names, values):
    return if_any(homes, lambda: all(map(is_, map(dict.get, homes, names, repeat(UNSET)), values)))


def _of_entries(dicts, keys, values):
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


def _is_set(thing: Any, name: str) -> bool:
    try:
        getattr(thing, name)
    except (AttributeError, ValueError):  # a cell's is the latter
        return False
    return True


def _columns(rows: Iterable[tuple], count: int) -> list[list]:
    rows = [*rows]
    return [[row[i] for row in rows] for i in range(count)]
