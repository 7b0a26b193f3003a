"""Scalar code, called for one example after another on Python's own values.

`forall._source.scalar_code` finds statements that compute with numbers, strings and lists alone.
Here the numbers that they need become columns, one value of Python's for each example that runs;
the code runs on each row; and what it gives becomes columns again: a `Number` where the examples
have numbers of one type, a list of these where they have lists of one length.

Where anything is other than that (an example raises, lists differ in length, somebody listens to
what is asked of examples), nothing has happened: the code computes and does nothing else, so it
runs as it is written, which tells what is wrong.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forall._batching.merging import is_stale, narrow
from forall._batching.parts import chosen
from forall._batching.worlds import World
from forall._core.levels import stack
from forall._lanes import stacks
from forall._lanes.arithmetic import DTYPES
from forall._lanes.merging import merge
from forall._lanes.numbers import Number, told
from forall._lanes.state import thread
from forall._lanes.words import words
from forall._torch.dispatch import functions_off, no_dispatch
from forall._torch.names import PLAIN

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import CodeType, FunctionType

Tensor = torch.Tensor
_TRIES = 4  # how often in a row the code may be left without a result
_MOST_TEXTS = 8  # of examples, with which all others agree
_AT_A_TIME = 256  # examples, before it is asked whether the call takes too long
_CONSTANTS = frozenset({int, float, bool, complex, str, bytes, type(None)})
_TOLD = _CONSTANTS | {torch.Size, torch.dtype, torch.device}
_CONTAINERS = (list, dict, set)
_CONVERSIONS = {"int": int, "float": float, "bool": bool}

_tries: dict[CodeType, int] = {}
_bindings: dict[CodeType, tuple[Any, Any]] = {}


class _AsideError(Exception):
    """The code has to run as it is written."""


def run(
    function: FunctionType,
    names: tuple[str, ...],
    local: dict[str, Any],
    reads: tuple[tuple[str, Callable[[], Any]], ...],
    gives: tuple[int, ...],
    may_change: bool,
) -> tuple | None:
    """The number of the way out and the values of all ways; None where it runs as it is written."""
    code = function.__code__
    left = _tries.get(code, _TRIES)
    if not left or not _may_run() or not _only_computes(function):
        return None
    try:
        columns = _Columns(may_change=may_change)
        given = [columns.of(local[name]) for name in names]
        given += [columns.read(how, tensor()) for how, tensor in reads]
        results = columns.results(function, given)
        found = _packed(results, gives, columns)
    except (Exception, words.Undefined):  # noqa: BLE001 - as it is written it tells what is wrong
        _tries[code] = left - 1
        return None
    if left < _TRIES:
        _tries[code] = left + 1
    return found


def _may_run() -> bool:
    """Return True if nobody hears what is asked, and examples may part."""
    if thread.report is not None or thread.loose:
        return False
    if stack.listening and not all(listener.is_idle for listener in stack.listening):
        return False
    level: Any = stack.top
    while level is not None:
        if getattr(level, "limit", None) is not None or not getattr(level, "parts", True):
            return False
        level = level.parent
    return True


def _only_computes(function: FunctionType) -> bool:
    """Return True if a function does nothing but compute, without tensors that it captures."""
    code, cells = function.__code__, function.__closure__
    known = _bindings.get(code)
    if known is not None:
        bindings, before = known
        if cells is None or (before and all(a is b for a, b in zip(cells, before, strict=True))):
            if bindings is None or bindings.hold(function):
                return bindings is not None
    bindings = words.bindings_of(function)
    if bindings is not None and bindings.tensors:
        bindings = None
    _bindings[code] = bindings, cells
    return bindings is not None


class _Row(NamedTuple):
    """One value for each example; or one for all of them."""

    values: Sequence[Any] | None
    same: Any = None


class _Columns:
    """What scalar code is given: one value for each example that runs."""

    def __init__(self, *, may_change: bool) -> None:
        self.may_change = may_change
        self.level: Any = None  # whose examples these are
        self.size = 1
        self.kept: list[Any] = []  # containers that others know

    def of(self, value: Any) -> _Row:
        """The values of a name."""
        kind = type(value)
        if kind in _TOLD:
            return _Row(None, value)
        if kind is Number:
            return self._numbers(value.tensor)
        if kind in (list, tuple):
            return self._container(value, list(value), kind)
        if kind is dict:
            return self._container(value, [*value.values()], lambda v: dict(zip(value, v, strict=True)))
        raise _AsideError

    def _container(self, value: Any, items: list, make: Callable) -> _Row:
        rows = [self.of(item) for item in items]
        if type(value) is not tuple:
            if self.may_change:
                raise _AsideError
            self.kept.append(value)
        if all(row.values is None for row in rows):
            return _Row(None, value)
        columns = [itertools.repeat(r.same) if r.values is None else r.values for r in rows]
        return _Row([make(v) for v in zip(*columns, strict=False)])

    def read(self, how: str, value: Any) -> _Row:
        """What a method reads of a tensor."""
        kind = _CONVERSIONS.get(how)
        if not isinstance(value, Tensor):
            if how == "":
                return self.of(value)
            if kind is None:
                raise _AsideError
            row = self.of(value)
            return _Row(None, kind(row.same)) if row.values is None else _Row([*map(kind, row.values)])
        if how == "tolist":
            return self._numbers(value)
        if how == "" or value.numel() != 1:
            raise _AsideError
        row = self._numbers(value, flat=True)
        if kind is None:
            return row
        return _Row(None, kind(row.same)) if row.values is None else _Row([*map(kind, row.values)])

    def _numbers(self, t: Tensor, *, flat: bool = False) -> _Row:
        """The numbers of a tensor, as lists of lists, for each example that runs."""
        stack.asked = True
        if stack.parted and is_stale(t):
            t = narrow(t)
        numbers, levels = stacks.read(t)
        if type(numbers) not in PLAIN or len(levels) > 1:
            raise _AsideError
        with functions_off(), no_dispatch():
            if not levels:
                return _Row(None, numbers.item() if flat else numbers.tolist())
            (level,) = levels
            axis = t.axis if hasattr(t, "axis") else 0
            numbers = numbers.movedim(axis or 0, 0)
            numbers = numbers.reshape(-1) if flat else numbers
            if self.level is None:
                self.level, self.size = level, len(numbers)
            if level is not self.level or len(numbers) != self.size:
                raise _AsideError
            return _Row(numbers.tolist())

    def results(self, function: Callable, given: list[_Row]) -> list[tuple]:
        """What the code gives for each example."""
        if self.level is None:
            return [function(*[row.same for row in given])]
        rows = zip(*[
            itertools.repeat(row.same, self.size) if row.values is None else row.values
            for row in given
        ], strict=True)  # fmt: skip
        if stack.late is None:
            return [*itertools.starmap(function, rows)]
        results: list[tuple] = []
        while len(results) < self.size:
            results += itertools.starmap(function, itertools.islice(rows, _AT_A_TIME))
            stack.late()
        return results

    def number(self, values: list, kind: type) -> Any:
        """Numbers of one type, as what each example has."""
        if self.level is None:
            return values[0]
        return told(stacks.rebuilt(values, DTYPES[kind], (self.size,), [self.level]))

    def text(self, values: list) -> Any:
        """Texts, of which there are a few."""
        different = dict.fromkeys(values)
        if len(different) > _MOST_TEXTS or stack.parted or self.level.parent is not None:
            raise _AsideError
        places: dict[Any, list[int]] = {text: [] for text in different}
        for n, text in enumerate(values):
            places[text].append(n)
        return merge([(World.alone(chosen(self.level, at)), text) for text, at in places.items()])


def _packed(results: list[tuple], gives: tuple[int, ...], columns: _Columns) -> tuple:
    """The results of all examples as one."""
    ways = [result[0] for result in results]
    found: list[Any] = [columns.number(ways, int)]
    for way, count in enumerate(gives):
        some = results if len(gives) == 1 else [r for r in results if r[0] == way]
        if not some:
            found += [None] * count
            continue
        if len(some) < len(results):  # the others never look
            some = [r if r[0] == way else some[0] for r in results]
        values = [*zip(*some, strict=True)][1:]
        if any(type(column[0]) in _CONTAINERS for column in values):
            for result in some:
                _check_names(result, columns.kept)
        found += [_column(column, columns) for column in values]
    return tuple(found)


def _column(values: Sequence[Any], columns: _Columns) -> Any:
    """One value of all examples."""
    kinds = {*map(type, values)}
    first = values[0]
    if len(kinds) > 1:
        raise _AsideError
    (kind,) = kinds
    if kind in DTYPES:
        return columns.number(list(values), kind)
    if kind in (list, tuple):
        if any(len(v) != len(first) for v in values):
            raise _AsideError
        parts = [_column(part, columns) for part in zip(*values, strict=True)]
        return kind(parts)
    if kind is dict:
        keys = [*first]
        if any([*v] != keys for v in values) or not all(type(k) in (int, str) for k in keys):
            raise _AsideError
        return {k: _column([v[k] for v in values], columns) for k in keys}
    if kind in (str, bytes, type(None)):
        return first if all(v == first for v in values) else columns.text(list(values))
    raise _AsideError


def _check_names(result: tuple, kept: list[Any]) -> None:
    """Leave where a container has two names, or is one that others know."""
    seen = {id(value) for value in kept}

    def look(value: Any) -> None:
        if type(value) in _CONTAINERS:
            if id(value) in seen:
                raise _AsideError
            seen.add(id(value))
        if type(value) in (list, tuple):
            for item in value:
                look(item)
        elif type(value) is dict:
            for item in value.values():
                look(item)

    look(result)
