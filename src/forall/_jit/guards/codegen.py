"""Code generation for guards: checks of many objects with as little Python as possible."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from itertools import chain, repeat, starmap
from operator import is_, methodcaller
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forall._compat.native_guards import (
    get_dict_version,
    get_written_dict,
    is_versioned,
    make_tensor_check,
)
from forall._compat.storage import has_memory
from forall._core.python_state import UNSET, WeakBox
from forall._core.reachable import view_raw_container
from forall._jit.guards.identity import EXACT_CLASSES
from forall._jit.guards.leaves import HEAP_TYPE_FLAG, ask_safely, read_buffer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_SIZED = (dict, OrderedDict)  # their truth value tells whether they are empty
_offset = torch.Tensor.storage_offset
_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_NONE: Mapping[str, str] = MappingProxyType({})
_FEW = 4  # entries of the longest list whose entries are tested one by one
_MANY = 64  # tests beside which one more call costs nothing, but more text to compile does
_values = methodcaller("values")


class GuardTests(NamedTuple):
    """Tests as source text, and the objects that they name, to be compiled into one function.

    The text holds none of the user's names. ``given`` maps names to objects, and ``attributes``
    maps placeholders to the true names of attributes, which may be any text, a keyword too.
    """

    texts: list[str]
    given: dict[str, Any]
    attributes: Mapping[str, str] = _NONE

    def __add__(self, other: GuardTests) -> GuardTests:
        if any(
            other.given[name] is not self.given[name] for name in self.given & other.given.keys()
        ):
            raise ValueError("two things have one name")
        if not self.attributes.keys().isdisjoint(other.attributes):
            raise ValueError("two attributes have one name")
        attributes = {**self.attributes, **other.attributes}
        return GuardTests(self.texts + other.texts, self.given | other.given, attributes)

    def compile_tests(self, arguments: str = "") -> Callable[..., bool]:
        """Compile a function that returns True if all tests hold, and False where one raises."""
        tests = " and ".join(self.texts) or True
        source = f"def holds({arguments}):\n try: return {tests}\n except Exception: return False"
        names = {**self.given, "__name__": __name__}
        exec(source, names)  # noqa: S102 - our own text
        holds = names["holds"]
        if self.attributes:  # the names in code may be any text; those in source may not
            code = holds.__code__
            asked = tuple(self.attributes.get(name, name) for name in code.co_names)
            holds.__code__ = code.replace(co_names=asked)
        return holds


class GuardChecks(NamedTuple):
    """A fast and a full check that objects hold what they held.

    True of either is certain. False of ``quickly`` is not: then ``certainly`` decides.
    """

    quickly: Callable[[], bool]
    certainly: Callable[[], bool]
    at_once: GuardTests  # the tests of ``quickly``, to be compiled together with others


class WatchedState:
    """A record of what objects held when they were visited, to compare by identity with now."""

    def __init__(self) -> None:
        self.attributes: list[tuple[Any, str, Any]] = []
        self.names: list[tuple[Any, str, Any]] = []  # entries of namespaces
        self.missing: list[tuple[Any, frozenset[str]]] = []  # names that they lack
        self.of_weakly: list[tuple[WeakBox, str, Any]] = []  # entries of an object's `__dict__`
        self.dicts: list[tuple[Any, tuple, tuple]] = []
        self.lists: list[tuple[Any, tuple]] = []
        self.data: list[tuple[Any, tuple]] = []  # of arrays and buffers
        self.answers: dict[Callable[[], Any], Any] = {}  # of functions that return torch's state
        self.others: list[Callable[[], bool]] = []

    def watch_entries(self, container: Any) -> None:
        """Watch the entries of a container, unless its class has no way to change them."""
        if isinstance(container, (list, set)):
            self.lists.append((container, tuple(container)))
        elif not isinstance(container, (tuple, frozenset)):
            names: Mapping[Any, Any] = view_raw_container(container)
            self.dicts.append((names, tuple(names), tuple(names.values())))

    def list_tests(self) -> list[Callable[[], bool]]:
        """Return the tests that are calls, whatever they compare."""
        data, answers = self.data, self.answers.items()
        return [
            *check_if_any(data, lambda: all(read_buffer(known) == copy for known, copy in data)),
            *check_if_any(answers, lambda: all(ask_safely(ask) == known for ask, known in answers)),
            *self.others,
        ]


class LibraryState:
    """Libraries' state, which is hardly ever written into and therefore compared separately."""

    def __init__(self) -> None:
        self.names: list[tuple[Any, str, Any]] = []
        self.classes: list[tuple[Any, tuple, tuple]] = []
        self._known: dict[int, type] = {}  # the classes whose state that is

    def watch_class(self, kind: type) -> None:
        """Watch the attributes of a class and of its bases, if they are mutable."""
        for base in kind.__mro__:
            if base.__flags__ & HEAP_TYPE_FLAG and id(base) not in self._known:
                self._known[id(base)] = base
                names = vars(base)
                self.classes.append((names, tuple(names), tuple(names.values())))


def make_guard_checks(
    state: WatchedState, libraries: LibraryState, looks: TensorMetadata
) -> GuardChecks:
    """Return the checks that all of these hold the same objects, compared by identity."""
    empty = [row[0] for row in state.dicts if not row[1] and type(row[0]) in _SIZED]
    dicts = [row for row in state.dicts if row[1] or type(row[0]) not in _SIZED]
    own, others_own = _DictRows([*state.names], [*state.missing], dicts).split_by_counted()
    # Separate groups: a write into a library's global does not cause a check of all dicts.
    rows = _DictRows([*libraries.names], [], [*libraries.classes])
    theirs, others_theirs = rows.split_by_counted()
    counted, counts, unwritten = _group_dicts([own, theirs])
    rest = _test_attributes([row for row in state.attributes if row[2] is not UNSET], empty)
    rest += _test_weak_entries(state.of_weakly)
    rest += _test_short_lists([row for row in state.lists if _is_short(*row)])
    rest += _test_calls(
        [
            *_check_unset([row[:2] for row in state.attributes if row[2] is UNSET]),
            *_check_lists(*_transpose_rows([r for r in state.lists if not _is_short(*r)], 2)),
            *others_own.list_checks(),
            *others_theirs.list_checks(),
            *state.list_tests(),
        ]
    )
    at_once = rest + _test_tensors(looks.tensors, looks.at_once or looks.matches_exactly)
    if looks.offsets:  # torch's own check does not compare storage offsets
        given = {"map": map, "offset_of": _offset, "offsets": looks.offsets}
        at_once += GuardTests(["[*map(offset_of, held)] == offsets"], given)
    if counted:
        given = {"of": get_dict_version, "map": map, "counted": counted, "counts": counts}
        at_once += GuardTests(["[*map(of, counted)] == counts"], given)
    certainly = GuardTests(["unwritten()"], {"unwritten": unwritten}) + rest
    certainly += _test_tensors(looks.tensors, looks.matches_exactly)
    quickly = at_once.compile_tests()
    if len(at_once.texts) > _MANY:
        at_once = GuardTests(["quickly()"], {"quickly": quickly})
    return GuardChecks(quickly, certainly.compile_tests(), at_once)


class TensorMetadata:
    """The metadata of tensors now, and checks that it is unchanged; their data may change."""

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        self.tensors = [*tensors]
        self.at_once = make_tensor_check(self.tensors)
        self.offsets = [*map(_offset, self.tensors)] if self.at_once else []
        self._now = [*map(_read_metadata, self.tensors)]

    def matches_exactly(self, *tensors: torch.Tensor) -> bool:
        return [*map(_read_metadata, tensors)] == self._now


def _read_metadata(t: torch.Tensor) -> tuple:
    strides = t.stride() if has_memory(t) else t.layout
    bits = t.is_conj(), t.is_neg(), t.is_inference()
    return type(t), t.shape, t.dtype, t.device, t.requires_grad, strides, bits, _read_numbers(t)


def _read_numbers(t: torch.Tensor) -> tuple:
    """Other metadata that Python can read as numbers: storage offset, nnz, `is_coalesced`."""
    if has_memory(t):
        return (t.storage_offset(),)
    if t.layout in _SPARSE:
        return (t._nnz(), t.is_coalesced() if t.layout == torch.sparse_coo else None)
    return ()


def check_if_any(there: Any, check: Callable[[], bool]) -> list[Callable[[], bool]]:
    return [check] if there else []


def _is_short(entries: Any, known: tuple) -> bool:
    return type(entries) is list and len(known) <= _FEW


def _test_attributes(rows: Sequence[tuple[Any, str, Any]], empty: Sequence[Any]) -> GuardTests:
    given = {f"a{i}": thing for i, (thing, _, _) in enumerate(rows)}
    given |= {f"v{i}": value for i, (_, _, value) in enumerate(rows)}
    given |= {f"e{i}": d for i, d in enumerate(empty)}
    of = [f"a{i}.of()" if type(row[0]) is WeakBox else f"a{i}" for i, row in enumerate(rows)]
    tests = [f"{thing}.asked{i} is v{i}" for i, thing in enumerate(of)]
    tests += [f"not e{i}" for i, _ in enumerate(empty)]
    # Python wants names of code to be of class str itself, not of a subclass.
    asked = {f"asked{i}": str.__str__(name) for i, (_, name, _) in enumerate(rows)}
    return GuardTests(tests, given, asked)


def _test_weak_entries(rows: Sequence[tuple[WeakBox, str, Any]]) -> GuardTests:
    given = {f"w{i}": weakly for i, (weakly, _, _) in enumerate(rows)}
    given |= {f"w{i}_name": name for i, (_, name, _) in enumerate(rows)}
    given |= {f"w{i}_value": value for i, (_, _, value) in enumerate(rows)}
    tests = [f"w{i}.of().__dict__[w{i}_name] is w{i}_value" for i, _ in enumerate(rows)]
    return GuardTests(tests, given)


def _test_tensors(tensors: Sequence[torch.Tensor], look: Callable[..., bool]) -> GuardTests:
    return GuardTests(["look(*held)"] if tensors else [], {"look": look, "held": tensors})


def _test_short_lists(lists: Sequence[tuple[list, tuple]]) -> GuardTests:
    tests, given = [], {}
    for i, (entries, known) in enumerate(lists):
        given |= {f"l{i}": entries} | {f"l{i}_{k}": x for k, x in enumerate(known)}
        tests += [f"len(l{i}) == {len(known)}"] if known else [f"not l{i}"]
        tests += [f"l{i}[{k}] is l{i}_{k}" for k, _ in enumerate(known)]
    return GuardTests(tests, given)


def _test_calls(checks: Sequence[Callable[[], bool]]) -> GuardTests:
    given = {f"o{i}": check for i, check in enumerate(checks)}
    return GuardTests([f"{name}()" for name in given], given)


class _DictRows(NamedTuple):
    """Entries that dicts have, names that they lack, and dicts with all their entries."""

    names: list[tuple[Any, str, Any]]
    missing: list[tuple[Any, frozenset[str]]]
    dicts: list[tuple[Any, tuple, tuple]]

    def split_by_counted(self) -> tuple[_DictRows, _DictRows]:
        """Return the rows of dicts whose writes are counted, and the other rows."""
        counted = _DictRows(*([row for row in rows if is_versioned(row[0])] for rows in self))
        return counted, _DictRows(*([r for r in rows if not is_versioned(r[0])] for rows in self))

    def list_dicts(self) -> list[Any]:
        return [get_written_dict(row[0]) for row in (*self.names, *self.missing, *self.dicts)]

    def list_checks(self) -> list[Callable[[], bool]]:
        missing = self.missing
        return [
            *_check_names(*_transpose_rows(self.names, 3)),
            *check_if_any(missing, lambda: all(none.isdisjoint(home) for home, none in missing)),
            *_check_entries(*_transpose_rows(self.dicts, 3)),
        ]


def _group_dicts(groups: Sequence[_DictRows]) -> tuple[list[dict], list[int], Callable[[], bool]]:
    """Return the dicts of the groups, their write counts at the last check, and a check.

    The check compares a group's entries only if one of the group's dicts was written into.
    """
    counted: list[dict] = []
    parts: list[tuple[slice, list[Callable[[], bool]]]] = []
    for group in groups:
        found = {id(d): d for d in group.list_dicts()}
        parts.append((slice(len(counted), len(counted) + len(found)), group.list_checks()))
        counted += found.values()
    counts: list[int] = []

    def unwritten() -> bool:
        now = [*map(get_dict_version, counted)]
        if now != counts:
            for part, checks in parts:
                written = now[part] != counts[part] or not counts
                if written and not all(check() for check in checks):
                    return False
            counts[:] = now
        return True

    return counted, counts, unwritten


def _check_unset(rows):
    return check_if_any(rows, lambda: not any(starmap(_is_set, rows)))


def _check_names(homes, names, values):
    return check_if_any(
        homes, lambda: are_all_same(map(dict.get, homes, names, repeat(UNSET)), values)
    )


def _check_entries(dicts, keys, values):
    sizes = [*map(len, keys)]
    keys, values = [*chain(*keys)], [*chain(*values)]
    return check_if_any(
        dicts,
        lambda: (
            [*map(len, dicts)] == sizes
            and are_all_same(chain.from_iterable(map(_values, dicts)), values)
            and are_all_same(chain.from_iterable(dicts), keys)
        ),
    )


def _check_lists(lists, entries):
    sizes, entries = [*map(len, entries)], [*chain(*entries)]
    return check_if_any(
        lists,
        lambda: [*map(len, lists)] == sizes and are_all_same(chain.from_iterable(lists), entries),
    )


def are_all_same(now: Iterable[Any], before: Sequence[Any]) -> bool:
    """True if the objects are identical, or are constants of one class that compare equal."""
    now = [*now]
    return all(map(is_, now, before)) or all(map(_is_same, now, before))


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and type(a) in EXACT_CLASSES and a == b)


def _is_set(thing: Any, name: str) -> bool:
    try:
        getattr(thing.of() if type(thing) is WeakBox else thing, name)
    except (AttributeError, ValueError):  # an empty cell raises the latter
        return False
    return True


def _transpose_rows(rows: Iterable[tuple], count: int) -> list[list]:
    rows = [*rows]
    return [[row[i] for row in rows] for i in range(count)]
