"""Whether many things are what they were, asked with as little Python as can be."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from itertools import chain, repeat, starmap
from operator import is_, methodcaller
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forall._compat.native_guards import (
    alike,
    beneath,
    is_counted,
    writes_into,
)
from forall._compat.storage import has_memory
from forall._core.python_state import UNSET, Weakly
from forall._jit.guards.identity import EXACT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_SIZED = (dict, OrderedDict)  # that are true where they hold anything
_offset = torch.Tensor.storage_offset
_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_NONE: Mapping[str, str] = MappingProxyType({})
_FEW = 4  # entries of a list, each of which is asked for by itself
_MANY = 64  # tests, beside which one more call is nothing, and one more text to compile is much
_values = methodcaller("values")


class Tests(NamedTuple):
    """Tests as text, and what they name. Written out, each costs what it does and no call more.

    The text has no word of the user's: ``given`` are the things that it names, and ``attributes``
    the true names of what it asks them for, which may be any text, a keyword too.
    """

    texts: list[str]
    given: dict[str, Any]
    attributes: Mapping[str, str] = _NONE

    def __add__(self, other: Tests) -> Tests:
        if any(
            other.given[name] is not self.given[name] for name in self.given & other.given.keys()
        ):
            raise ValueError("two things have one name")
        if not self.attributes.keys().isdisjoint(other.attributes):
            raise ValueError("two attributes have one name")
        attributes = {**self.attributes, **other.attributes}
        return Tests(self.texts + other.texts, self.given | other.given, attributes)

    def written_out(self, arguments: str = "") -> Callable[..., bool]:
        """A function that makes all of them; where one raises, it says no."""
        tests = " and ".join(self.texts) or True
        source = f"def holds({arguments}):\n try: return {tests}\n except Exception: return False"
        names = {**self.given, "__name__": __name__}
        exec(source, names)  # noqa: S102 - our own text
        holds = names["holds"]
        if self.attributes:  # code asks for whatever its names are; only text has to be Python
            code = holds.__code__
            asked = tuple(self.attributes.get(name, name) for name in code.co_names)
            holds.__code__ = code.replace(co_names=asked)
        return holds


class Holding(NamedTuple):
    """Whether things hold what they held: a yes is sure; a no of ``quickly`` says nothing."""

    quickly: Callable[[], bool]
    certainly: Callable[[], bool]
    at_once: Tests  # what ``quickly`` makes, to be written out among others


def holding(
    attributes: Iterable[tuple[Any, str, Any]],
    names: Iterable[tuple[Mapping, str, Any]],
    missing: Iterable[tuple[Mapping, frozenset[str]]],
    dicts: Iterable[tuple[Mapping, tuple, tuple]],
    lists: Iterable[tuple[Any, tuple]],
    looks: Looks,
    weakly: Iterable[tuple[Weakly, str, Any]] = (),
    of_libraries: tuple[Sequence, Sequence] = ((), ()),
    others: Iterable[Callable[[], bool]] = (),
) -> Holding:
    """What tells whether all of these hold what they held, compared by identity."""
    attributes, dicts, lists = [*attributes], [*dicts], [*lists]
    empty = [row[0] for row in dicts if not row[1] and type(row[0]) in _SIZED]
    dicts = [row for row in dicts if row[1] or type(row[0]) not in _SIZED]
    own, others_own = _Dicts([*names], [*missing], dicts).by_whether_counted()
    names, dicts_of_libraries = of_libraries
    # Apart: whoever writes into a global of theirs has not all of these looked at.
    theirs, others_theirs = _Dicts([*names], [], [*dicts_of_libraries]).by_whether_counted()
    counted, counts, unwritten = _of_dicts([own, theirs])
    rest = _of_attributes([row for row in attributes if row[2] is not UNSET], empty)
    rest += _of_weakly([*weakly])
    rest += _of_short([row for row in lists if _is_short(*row)])
    rest += _of_calls(
        [
            *_of_unset([row[:2] for row in attributes if row[2] is UNSET]),
            *_of_lists(*_columns([row for row in lists if not _is_short(*row)], 2)),
            *others_own.checks(),
            *others_theirs.checks(),
            *others,
        ]
    )
    at_once = rest + _of_tensors(looks.tensors, looks.at_once or looks.exactly)
    if looks.offsets:  # torch's own look does not ask for them
        given = {"map": map, "offset_of": _offset, "offsets": looks.offsets}
        at_once += Tests(["[*map(offset_of, held)] == offsets"], given)
    if counted:
        given = {"of": writes_into, "map": map, "counted": counted, "counts": counts}
        at_once += Tests(["[*map(of, counted)] == counts"], given)
    certainly = Tests(["unwritten()"], {"unwritten": unwritten}) + rest
    certainly += _of_tensors(looks.tensors, looks.exactly)
    quickly = at_once.written_out()
    if len(at_once.texts) > _MANY:
        at_once = Tests(["quickly()"], {"quickly": quickly})
    return Holding(quickly, certainly.written_out(), at_once)


class Looks:
    """What tensors look like now: they are to stay so, but for their numbers."""

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        self.tensors = [*tensors]
        self.at_once = alike(self.tensors)
        self.offsets = [*map(_offset, self.tensors)] if self.at_once else []
        self._now = [*map(_look, self.tensors)]

    def exactly(self, *tensors: torch.Tensor) -> bool:
        return [*map(_look, tensors)] == self._now


def _look(t: torch.Tensor) -> tuple:
    strides = t.stride() if has_memory(t) else t.layout
    bits = t.is_conj(), t.is_neg(), t.is_inference()
    return type(t), t.shape, t.dtype, t.device, t.requires_grad, strides, bits, _rest(t)


def _rest(t: torch.Tensor) -> tuple:
    """What else Python may be told of it, and keep as a number."""
    if has_memory(t):
        return (t.storage_offset(),)
    if t.layout in _SPARSE:
        return (t._nnz(), t.is_coalesced() if t.layout == torch.sparse_coo else None)
    return ()


def if_any(there: Any, check: Callable[[], bool]) -> list[Callable[[], bool]]:
    return [check] if there else []


def _is_short(entries: Any, known: tuple) -> bool:
    return type(entries) is list and len(known) <= _FEW


def _of_attributes(rows: Sequence[tuple[Any, str, Any]], empty: Sequence[Any]) -> Tests:
    given = {f"a{i}": thing for i, (thing, _, _) in enumerate(rows)}
    given |= {f"v{i}": value for i, (_, _, value) in enumerate(rows)}
    given |= {f"e{i}": d for i, d in enumerate(empty)}
    of = [f"a{i}.of()" if type(row[0]) is Weakly else f"a{i}" for i, row in enumerate(rows)]
    tests = [f"{thing}.asked{i} is v{i}" for i, thing in enumerate(of)]
    tests += [f"not e{i}" for i, _ in enumerate(empty)]
    # Where Python keeps a text as a name of code, it wants one of its own class.
    asked = {f"asked{i}": str.__str__(name) for i, (_, name, _) in enumerate(rows)}
    return Tests(tests, given, asked)


def _of_weakly(rows: Sequence[tuple[Weakly, str, Any]]) -> Tests:
    given = {f"w{i}": weakly for i, (weakly, _, _) in enumerate(rows)}
    given |= {f"w{i}_name": name for i, (_, name, _) in enumerate(rows)}
    given |= {f"w{i}_value": value for i, (_, _, value) in enumerate(rows)}
    tests = [f"w{i}.of().__dict__[w{i}_name] is w{i}_value" for i, _ in enumerate(rows)]
    return Tests(tests, given)


def _of_tensors(tensors: Sequence[torch.Tensor], look: Callable[..., bool]) -> Tests:
    return Tests(["look(*held)"] if tensors else [], {"look": look, "held": tensors})


def _of_short(lists: Sequence[tuple[list, tuple]]) -> Tests:
    tests, given = [], {}
    for i, (entries, known) in enumerate(lists):
        given |= {f"l{i}": entries} | {f"l{i}_{k}": x for k, x in enumerate(known)}
        tests += [f"len(l{i}) == {len(known)}"] if known else [f"not l{i}"]
        tests += [f"l{i}[{k}] is l{i}_{k}" for k, _ in enumerate(known)]
    return Tests(tests, given)


def _of_calls(checks: Sequence[Callable[[], bool]]) -> Tests:
    given = {f"o{i}": check for i, check in enumerate(checks)}
    return Tests([f"{name}()" for name in given], given)


class _Dicts(NamedTuple):
    """Entries of dicts, and those that are not there."""

    names: list[tuple[Any, str, Any]]
    missing: list[tuple[Any, frozenset[str]]]
    dicts: list[tuple[Any, tuple, tuple]]

    def by_whether_counted(self) -> tuple[_Dicts, _Dicts]:
        """Return those whose writes are counted, and the others."""
        counted = _Dicts(*([row for row in rows if is_counted(row[0])] for rows in self))
        return counted, _Dicts(*([r for r in rows if not is_counted(r[0])] for rows in self))

    def homes(self) -> list[Any]:
        return [beneath(row[0]) for row in (*self.names, *self.missing, *self.dicts)]

    def checks(self) -> list[Callable[[], bool]]:
        missing = self.missing
        return [
            *_of_names(*_columns(self.names, 3)),
            *if_any(missing, lambda: all(none.isdisjoint(home) for home, none in missing)),
            *_of_entries(*_columns(self.dicts, 3)),
        ]


def _of_dicts(groups: Sequence[_Dicts]) -> tuple[list[dict], list[int], Callable[[], bool]]:
    """Dicts, how often each was written into when all were looked at, and what looks anew.

    A group is looked at where one of its own was written into.
    """
    counted: list[dict] = []
    parts: list[tuple[slice, list[Callable[[], bool]]]] = []
    for group in groups:
        found = {id(d): d for d in group.homes()}
        parts.append((slice(len(counted), len(counted) + len(found)), group.checks()))
        counted += found.values()
    counts: list[int] = []

    def unwritten() -> bool:
        now = [*map(writes_into, counted)]
        if now != counts:
            for part, checks in parts:
                written = now[part] != counts[part] or not counts
                if written and not all(check() for check in checks):
                    return False
            counts[:] = now
        return True

    return counted, counts, unwritten


def _of_unset(rows):
    return if_any(rows, lambda: not any(starmap(_is_set, rows)))


def _of_names(homes, names, values):
    return if_any(homes, lambda: _are_same(map(dict.get, homes, names, repeat(UNSET)), values))


def _of_entries(dicts, keys, values):
    sizes = [*map(len, keys)]
    keys, values = [*chain(*keys)], [*chain(*values)]
    return if_any(
        dicts,
        lambda: (
            [*map(len, dicts)] == sizes
            and _are_same(chain.from_iterable(map(_values, dicts)), values)
            and _are_same(chain.from_iterable(dicts), keys)
        ),
    )


def _of_lists(lists, entries):
    sizes, entries = [*map(len, entries)], [*chain(*entries)]
    return if_any(
        lists,
        lambda: [*map(len, lists)] == sizes and _are_same(chain.from_iterable(lists), entries),
    )


def _are_same(now: Iterable[Any], before: Sequence[Any]) -> bool:
    """Whether these are the very things, or values of which all is said by their equality."""
    now = [*now]
    return all(map(is_, now, before)) or all(map(_is_same, now, before))


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and type(a) in EXACT and a == b)


def _is_set(thing: Any, name: str) -> bool:
    try:
        getattr(thing.of() if type(thing) is Weakly else thing, name)
    except (AttributeError, ValueError):  # a cell's is the latter
        return False
    return True


def _columns(rows: Iterable[tuple], count: int) -> list[list]:
    rows = [*rows]
    return [[row[i] for row in rows] for i in range(count)]
