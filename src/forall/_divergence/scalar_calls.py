"""Scalar code, called for one example after another on Python's own values.

`_ast_rewrite.scalar_code` finds statements that compute with numbers, strings and lists alone.
This module turns the numbers that they need into columns: one Python value for each running
example. It runs the code on each row, and turns the results into columns again. Numbers of one type
become a `BatchedScalar`, lists of one length become a list of these.

This may fail: an example raises, lists differ in length, or there are listeners to reads of values.
Since the code is pure, it then simply runs as it is written, which also raises the proper error.
"""

from __future__ import annotations

import itertools
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forall._compat.call_site import SourceLine
from forall._compat.dispatch_state import functions_off, no_dispatch
from forall._compat.private_api import PLAIN
from forall._core.host_reads import notify_host_read
from forall._core.levels import stack
from forall._divergence import scalar_storage
from forall._divergence.batched_scalar import BatchedScalar
from forall._divergence.join import UNDEFINED, merge
from forall._divergence.scalar_semantics import DTYPES
from forall._divergence.thread_state import thread
from forall._divergence.vmap_interface import interface
from forall._vmap.active_set.active_mask import ActiveSet
from forall._vmap.active_set.merge import is_stale, restrict_to_running
from forall._vmap.active_set.sub_level import select_sub_level
from forall._vmap.concretize import read_answers
from forall._vmap.vmap_level import VmapLevel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from types import CodeType, FunctionType

Tensor = torch.Tensor
_TRIES = 4  # how often in a row the code may be abandoned without a result
_MOST_TEXTS = 8  # the most different texts among the examples
_FEW_EQUAL = 0.9  # if this share of rows is unique, results are no longer looked up by row
_AT_A_TIME = 256  # examples between two checks of the time limit
_ATOMS = frozenset({*DTYPES, str, bytes, type(None)})
_TOLD = _ATOMS | {torch.Size, torch.dtype, torch.device}
_CONTAINERS = (list, dict, set)
_CONVERSIONS = {"int": int, "float": float, "bool": bool}

_tries: dict[CodeType, int] = {}
_bindings: dict[CodeType, tuple[Any, Any]] = {}


class _AsideError(Exception):
    """An error that makes the code run as it is written."""


def run_scalar_code(
    function: FunctionType,
    names: tuple[tuple[str, ...], tuple[str, ...]],
    local: dict[str, Any],
    reads: tuple[tuple[str, Callable[[], Any]], ...],
    gives: tuple[int, ...],
    may_change: bool,
) -> tuple | None:
    """Return the index of the exit taken and the values of all exits; None to run it as written."""
    code = function.__code__
    if thread.report is not None:  # the report lists each step, so the code runs as it is written
        if _is_pure(function):
            thread.report.scalar.add(SourceLine(code.co_filename, code.co_firstlineno))
        return None
    if not _tries.get(code, _TRIES) or not _may_diverge() or not _is_pure(function):
        return None
    examples = _Examples(may_change=may_change)

    def find_given() -> list[_NameValues]:
        given = [_NameValues(UNDEFINED), *(examples.find_named(local[name]) for name in names[0])]
        given += [examples.find_named(local.get(name, UNDEFINED)) for name in names[1]]
        return given + [examples.read(how, tensor()) for how, tensor in reads]

    given = _attempt(code, find_given)
    if given is None:
        return None
    if examples.level is not None:
        notify_host_read()
    if not _has_no_listener():
        return None
    found = _attempt(code, lambda: examples.run(function, given, gives))
    if found is not None and code in _tries:
        _tries[code] = min(_tries[code] + 1, _TRIES)
    return found


def _attempt(code: CodeType, run: Callable[[], Any]) -> Any:
    """Call ``run``; return None if it fails, so that the code runs as it is written."""
    try:
        return run()
    except (Exception, interface.UndefinedForExamples):  # noqa: BLE001 - run as written it tells why
        _tries[code] = _tries.get(code, _TRIES) - 1
        return None


def _has_no_listener() -> bool:
    """Return True if no listener is notified of reads of values."""
    return all(listener.is_idle for listener in stack.listening)


def _may_diverge() -> bool:
    """Return True if no level limits the divergence of its examples."""
    if thread.loose:
        return False
    level: Any = stack.top
    while level is not None:
        if isinstance(level, VmapLevel) and (level.state.limit or not level.config.diverges):
            return False
        level = level.parent
    return True


def _is_pure(function: FunctionType) -> bool:
    """Return True if a function is pure and captures no tensors."""
    code, cells = function.__code__, function.__closure__
    known = _bindings.get(code)
    if known is not None:
        bindings, before = known
        is_same = cells is None or all(map(is_, cells, before))
        if is_same and (bindings is None or bindings.hold(function)):
            return bindings is not None
    bindings = interface.find_pure_bindings(function)
    if bindings is not None and bindings.tensors:
        bindings = None
    if bindings is None and cells is not None:  # another closure of this code may qualify
        _tries[code] = _tries.get(code, _TRIES) - 1
    else:
        _bindings[code] = bindings, cells
    return bindings is not None


class _NameValues(NamedTuple):
    """The value of one name for scalar code: one value for all, or one for each example."""

    same: Any = None
    each: Callable[[int, int], Sequence[Any]] | None = None  # the values of examples i to j
    repeats: bool = False  # True if examples often have equal values: these are integers


def _may_repeat(given: list[_NameValues]) -> bool:
    """Return True if many examples may have equal rows, and rows are hashable."""
    each = [g for g in given if g.each is not None]
    same = [g.same for g in given if g.each is None]
    are_told = not any(isinstance(value, (list, tuple, dict)) for value in same)
    return bool(each) and are_told and all(g.repeats for g in each)


class _Examples:
    """The running examples, and the values that scalar code gets for them."""

    def __init__(self, *, may_change: bool) -> None:
        self.may_change = may_change
        self.level: Any = None  # whose examples these are
        self.size = 1
        self.known: list[Any] = []  # containers that other code refers to

    def find_named(self, value: Any) -> _NameValues:
        """Find the values of a name."""
        kind = type(value)
        if kind in _TOLD or value is UNDEFINED:
            return _NameValues(value)
        if kind is BatchedScalar:
            return self._find_numbers(value.tensor, flat=True)
        if kind in (list, tuple):
            return self._find_container(value, list(value), kind)
        if kind is dict:
            keys = [*value]
            return self._find_container(
                value, [*value.values()], lambda v: dict(zip(keys, v, strict=True))
            )
        raise _AsideError

    def _find_container(self, value: Any, items: list, make: Callable) -> _NameValues:
        given = [self.find_named(item) for item in items]
        if type(value) is not tuple:
            if self.may_change:
                raise _AsideError
            self.known.append(value)
        if all(g.each is None for g in given):
            return _NameValues(value)
        return _NameValues(None, lambda i, j: [*map(make, _iterate_rows(given, i, j))])

    def read(self, how: str, value: Any) -> _NameValues:
        """Find the values that a method reads of a tensor, or of a number in its place."""
        kind = _CONVERSIONS.get(how)
        if not isinstance(value, Tensor):
            if how and kind is None:
                raise _AsideError
            found = self.find_named(value)
        elif how == "tolist":
            return self._find_numbers(value)
        elif how:
            found = self._find_numbers(value, flat=True)
        else:
            raise _AsideError
        if kind is None:
            return found
        each = found.each
        if each is None:
            return _NameValues(kind(found.same))
        is_whole = found.repeats or kind is not float
        return _NameValues(None, lambda i, j: [*map(kind, each(i, j))], is_whole)

    def _find_numbers(self, t: Tensor, *, flat: bool = False) -> _NameValues:
        """Find the numbers of a tensor: for each example nested lists, or one number."""
        stack.asked = True
        if stack.diverged and is_stale(t):
            t = restrict_to_running(t)
        numbers, levels = read_answers(t)
        if type(numbers) not in PLAIN or len(levels) > 1:
            raise _AsideError
        with functions_off(), no_dispatch():
            if not levels:
                return _NameValues(numbers.item() if flat else numbers.tolist())
            size = numbers.shape[0]
            is_whole = not (numbers.is_floating_point() or numbers.is_complex())
            if flat and numbers.dim() > 1:
                numbers = numbers.reshape(size, -1).squeeze(1)
        if self.level is None:
            self.level, self.size = levels[0], size
        if levels[0] is not self.level or size != self.size or (flat and numbers.dim() > 1):
            raise _AsideError

        def each(i: int, j: int) -> list:
            with functions_off(), no_dispatch():
                return numbers[i:j].tolist()

        return _NameValues(None, each, flat and is_whole)

    def run(self, function: Callable, given: list[_NameValues], gives: tuple[int, ...]) -> tuple:
        """Call the code for each example, and return the results of all.

        The code is pure, so that examples with equal numbers have one result.
        """
        taken: list[int] = []
        seen: dict[tuple, tuple] | None = {} if _may_repeat(given) else None
        values: list[list[_ResultColumn]] = [
            [] for _ in gives
        ]  # for each exit, of those that took it
        # A few at a time, so that few rows and lists are alive at once.
        for start in range(0, self.size, _AT_A_TIME):
            rows = [*_iterate_rows(given, start, min(start + _AT_A_TIME, self.size))]
            if seen is None:
                results = [*itertools.starmap(function, rows)]
            else:
                before = len(seen)
                for row in rows:
                    if row not in seen:
                        seen[row] = function(*row)
                results = [seen[row] for row in rows]
                if len(seen) - before > _FEW_EQUAL * len(rows):
                    seen = None
            if stack.late is not None:
                stack.late()
            ways = [result[0] for result in results]
            taken += ways
            for way in {*ways}:
                self._add([r for r in results if r[0] == way], values[way])
        found: list[Any] = [self.value(taken)]
        for way, count in enumerate(gives):
            chosen = [w == way for w in taken]
            found += [v.build(self, chosen) for v in values[way]] or [None] * count
        return tuple(found)

    def _add(self, results: list[tuple], values: list[_ResultColumn]) -> None:
        """Add the results of some examples that have taken one exit."""
        columns = [*zip(*results, strict=True)][1:]
        self._check_names(results, columns)
        if not values:
            values += [_make_column(column[0]) for column in columns]
        for found, column in zip(values, columns, strict=True):
            found.add(column)

    def _check_names(self, results: list[tuple], columns: list[Sequence]) -> None:
        """Raise if a container has two names, or if other code refers to it."""
        firsts = [column[0] for column in columns if type(column[0]) in _CONTAINERS]
        if not firsts or (len(firsts) == 1 and not self.known and not _is_nested(firsts[0])):
            return
        known = {id(value) for value in self.known}
        for result in results:
            _check_once(result, set(known))

    def number(self, values: list, kind: type) -> Any:
        """Make a `BatchedScalar` of numbers of one type."""
        if self.level is None or (kind is int and values.count(values[0]) == len(values)):
            return values[0]  # an int that all examples have can be a size
        return BatchedScalar(
            scalar_storage.rebuild_tensor(values, DTYPES[kind], (self.size,), [self.level])
        )

    def value(self, values: list) -> Any:
        """Make one value of the values of all examples: numbers of any types, or a few texts."""
        kinds = [*map(type, values)]
        kind = kinds[0]
        if kind in DTYPES and kinds.count(kind) == len(kinds):
            return self.number(values, kind)
        keys = [k if k in DTYPES else v for k, v in zip(kinds, values, strict=True)]
        different = dict.fromkeys(keys)
        if len(different) == 1:
            return values[0]
        if len(different) > _MOST_TEXTS or stack.diverged or self.level.parent is not None:
            raise _AsideError
        places: dict[Any, list[int]] = {key: [] for key in different}
        for n, key in enumerate(keys):
            places[key].append(n)
        parts = []
        for key, at in places.items():
            part = select_sub_level(self.level, at)
            of_part = key
            if key in DTYPES:
                numbers = [values[n] for n in at]
                of_part = BatchedScalar(
                    scalar_storage.rebuild_tensor(numbers, DTYPES[key], (len(at),), [part])
                )
            parts.append((ActiveSet.from_level(part), of_part))
        return merge(parts)


def _iterate_rows(given: list[_NameValues], i: int, j: int) -> Iterator[tuple]:
    """Return an iterator over the rows of examples i to j."""
    if not given:
        return iter([()] * (j - i))
    columns = [itertools.repeat(g.same, j - i) if g.each is None else g.each(i, j) for g in given]
    return zip(*columns, strict=True)


class _ResultColumn:
    """A column of results: one value of each example."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def add(self, values: Sequence[Any]) -> None:
        """Add the values of some more examples."""
        if not _ATOMS.issuperset(map(type, values)):
            raise _AsideError
        self.values += values

    def build(self, examples: _Examples, chosen: list[bool]) -> Any:
        """Return one value for all examples; those not chosen get any value: it is never read."""
        if len(self.values) == len(chosen):
            return examples.value(self.values)
        values = iter(self.values)
        first = self.values[0]
        return examples.value([next(values) if is_chosen else first for is_chosen in chosen])


class _ContainerColumn(_ResultColumn):
    """A column of lists of one length, or of dicts with the same keys."""

    def __init__(self, first: Any) -> None:
        self.kind = type(first)
        self.keys = [*first] if self.kind is dict else None
        if self.keys is not None and not all(type(key) in (int, str) for key in self.keys):
            raise _AsideError
        self.parts = [_make_column(v) for v in _items(first)]

    def add(self, values: Sequence[Any]) -> None:
        if {*map(type, values)} != {self.kind}:
            raise _AsideError
        if self.keys is not None and any([*v] != self.keys for v in values):
            raise _AsideError
        if {*map(len, values)} != {len(self.parts)}:
            raise _AsideError
        for part, column in zip(self.parts, zip(*map(_items, values), strict=True), strict=True):
            part.add(column)

    def build(self, examples: _Examples, chosen: list[bool]) -> Any:
        found = [part.build(examples, chosen) for part in self.parts]
        return self.kind(found) if self.keys is None else dict(zip(self.keys, found, strict=True))


def _make_column(first: Any) -> _ResultColumn:
    """Return a column for values of the type of ``first``."""
    kind = type(first)
    if kind in (list, tuple, dict):
        return _ContainerColumn(first)
    if kind in _ATOMS:
        return _ResultColumn()
    raise _AsideError


def _is_nested(value: Any) -> bool:
    return any(type(v) in (*_CONTAINERS, tuple) for v in _items(value))


def _items(value: Any) -> Iterable[Any]:
    return value.values() if type(value) is dict else value


def _check_once(value: Any, seen: set[int]) -> None:
    """Raise if a container in a result has been seen already."""
    if type(value) in _CONTAINERS:
        if id(value) in seen:
            raise _AsideError
        seen.add(id(value))
    if type(value) in (list, tuple, dict):
        for item in _items(value):
            _check_once(item, seen)
