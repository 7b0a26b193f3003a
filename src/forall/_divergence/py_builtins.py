"""Replacements of Python's builtins for arguments that differ between lanes."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import types
from collections.abc import Callable, Iterable
from typing import Any

from forall._divergence import converted_call, subscripts
from forall._divergence.branch_tests import (
    DivergedTest,
    evaluate_any_or_all,
    evaluate_if_exp,
    evaluate_lane_test,
)
from forall._divergence.join import merge
from forall._divergence.running_sum import SUM_KEEPS_LOSSES
from forall._divergence.thread_state import thread
from forall._divergence.varying import Varying, has_varying
from forall._divergence.vmap_interface import interface
from forall._vmap.fast_path.operators import evaluate_fused, make_operators

plus = make_operators()["add"]


def _is_per_lane(value: Any) -> bool:
    return type(value) is interface.BatchedScalar or isinstance(value, interface.Tensor)


def _has_per_lane(values: Any) -> bool:
    return any(_is_per_lane(v) for v in values)


def _has_loose(values: tuple) -> bool:
    return thread.loose and any(has_varying(v, 1) for v in values)


def _range(*args: Any) -> Any:
    if _has_loose(args):
        return converted_call.call_unconverted(range, args, {})
    if _has_per_lane(args):
        return interface.run_per_group(lambda: range(*args), merge)
    return range(*args)


def _len(value: Any) -> Any:
    if _has_loose((value,)):
        return subscripts.run_per_set((value,), lambda: len(subscripts.resolve_varying(value)))
    own = getattr(type(value), "__len__", None)
    if isinstance(own, types.FunctionType) and not isinstance(value, interface.Tensor):
        return converted_call.call_converted(own, value)
    return len(value)


def _bool(*args: Any) -> Any:
    if not args:
        return False
    answer = evaluate_lane_test(args[0])
    return answer if type(answer) is bool else DivergedTest(*answer).value()


def _isinstance(value: Any, kinds: Any) -> Any:
    if type(value) is Varying:
        return value.each(lambda v: isinstance(v, kinds))
    return isinstance(value, kinds)


def _type(*args: Any, **kwargs: Any) -> Any:
    if len(args) == 1:
        if type(args[0]) is Varying:
            return args[0].each(_type)
        return args[0].kind if type(args[0]) is interface.BatchedScalar else type(args[0])
    return converted_call.call_unconverted(type, args, kwargs)


def _make_min_or_max(name: str) -> Callable:
    """Return a replacement of ``min`` or ``max``: of equal values the first is the result."""
    builtin = {"min": min, "max": max}[name]
    less = name == "min"

    def best(*args: Any, **kwargs: Any) -> Any:
        if _has_loose(args):
            return converted_call.call_unconverted(builtin, args, kwargs)
        values = args[0] if len(args) == 1 else args
        if isinstance(values, interface.Tensor) or type(values) in (set, dict, str):
            return converted_call.call_unconverted(builtin, args, kwargs)
        values = list(values)
        key = kwargs.get("key")
        if not values or set(kwargs) - {"key"}:
            return builtin(values, **kwargs)
        ranks = values if key is None else [converted_call.call_converted(key, v) for v in values]
        if not any(_is_per_lane(r) for r in ranks):
            return values[builtin(range(len(ranks)), key=ranks.__getitem__)]
        return _select_best(values, ranks, less)

    return best


def _select_best(values: list, ranks: list, less: bool) -> Any:
    value, rank = values[0], ranks[0]
    for other, its in zip(values[1:], ranks[1:], strict=True):
        better = its < rank if less else its > rank
        value, rank = evaluate_if_exp(
            better, lambda o=other, i=its: (o, i), lambda v=value, r=rank: (v, r)
        )
    return value


def _make_conversion(kind: type) -> Callable:
    """Return a replacement of ``int``, ``float`` or ``complex``: one number for each lane."""

    def convert(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            (x,) = args
            if isinstance(x, interface.Tensor):
                x = x.item()
            if type(x) is interface.BatchedScalar:
                return interface.convert_number(x, kind)
        return converted_call.call_unconverted(kind, args, kwargs)

    return convert


def _make_math_function(f: Callable) -> Callable:
    """Return a replacement of a function of ``math``: one result for each lane."""

    def calculate(*args: Any, **kwargs: Any) -> Any:
        if _has_loose((*args, *kwargs.values())):
            return converted_call.call_unconverted(f, args, kwargs)
        args = tuple(list(a) if hasattr(type(a), "__next__") else a for a in args)
        return interface.call_math(f, args, kwargs)

    return calculate


def _sum(values: Any, /, start: Any = 0) -> Any:
    """Replace ``sum``: use ``+`` if there are tensors among the items of a list."""
    if _has_loose((values, start)) or type(values) not in (list, tuple):
        return converted_call.call_unconverted(sum, (values, start), {})
    if not any(isinstance(v, interface.Tensor) for v in (*values, start)):
        if SUM_KEEPS_LOSSES and any(map(_is_per_lane, (*values, start))):
            return interface.call_math(sum, (values, start), {})
        return converted_call.call_unconverted(sum, (values, start), {})
    found = evaluate_fused(_add_up_values, (start, *values))
    return functools.reduce(plus, values, start) if found is None else found


def _add_up_values(*values: Any) -> Any:
    return functools.reduce(operator.add, values)


def _note_sources(copy: Any, values: Iterable[Any]) -> Any:
    """Note the lists that a copy was made of, so that changes of them can be detected."""
    lists = []
    for value in values:
        lists += subscripts.lists_in(value)
        lists += thread.copies.find_sources(value)
    thread.copies.note_copy(copy, lists)
    return copy


def _zip(*args: Any, **kwargs: Any) -> Any:
    if _has_loose(args):
        found = converted_call.call_unconverted(lambda *a: list(zip(*a, **kwargs)), args, {})  # noqa: B905 - as written
        return _note_sources(found, args)
    return zip(*map(subscripts.watch, args), **kwargs)  # noqa: B905 - as the user wrote it


def _enumerate(iterable: Any, start: Any = 0) -> Any:
    if _has_loose((iterable,)):
        found = converted_call.call_unconverted(
            lambda i: list(enumerate(i, start)), (iterable,), {}
        )
        return _note_sources(found, (iterable,))
    return enumerate(subscripts.watch(iterable), start)


def _make_lazy_iterator(make: Any) -> Callable:
    """Return a replacement of ``iter`` or a class of `itertools`, which reads lists lazily."""

    def run(*args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        if _has_loose(values):
            return _note_sources(
                converted_call.call_unconverted(_make_copying_call(make), args, kwargs), values
            )
        args = tuple(map(subscripts.watch, args))
        return converted_call.call_unconverted(
            make, args, {name: subscripts.watch(v) for name, v in kwargs.items()}
        )

    return run


def _make_copying_call(make: Any) -> Callable:
    """Return ``make`` applied to copies of its lists and dicts."""

    def copy(value: Any) -> Any:
        return [*value] if type(value) in (list, dict) else value

    def run(*args: Any, **kwargs: Any) -> Any:
        return make(*map(copy, args), **{name: copy(v) for name, v in kwargs.items()})

    return run


_reversed_copy = _make_lazy_iterator(reversed)


def _iterate_reversed(values: Any) -> Any:
    if _has_loose((values,)) or type(values) is not list:
        return _reversed_copy(values)
    return subscripts.watch(values, backwards=True)


def _setattr(x: Any, name: str, value: Any) -> None:
    subscripts.store_attr(value, x, name)


def _print(*args: Any, **kwargs: Any) -> None:
    """Replace ``print``: show numbers for all lanes at once, without divergence."""
    shown = (repr(a) if type(a) is interface.BatchedScalar else a for a in args)
    converted_call.call_unconverted(print, tuple(shown), kwargs)


def _make_converting_caller(builtin: Any) -> Callable:
    """Return a replacement of ``map`` or ``reduce`` that converts the function passed to it."""

    def run(f: Any, *rest: Any, **kwargs: Any) -> Any:
        if _has_loose((*rest, *kwargs.values())):
            found = converted_call.call_unconverted(
                _make_copying_call(builtin), (converted_call.wrap_converted(f), *rest), kwargs
            )
            return _note_sources(found, rest)
        call = functools.partial(converted_call.call_converted, f)
        return builtin(call, *map(subscripts.watch, rest), **kwargs)

    return run


def _filter(f: Any, iterable: Any) -> Any:
    if _has_loose((iterable,)):
        found = converted_call.call_unconverted(lambda i: list(_filter(f, i)), (iterable,), {})
        return _note_sources(found, (iterable,))
    kept: list = []

    def keep(v: Any) -> None:
        converted_call.call_converted(kept.append, v)

    for v in subscripts.watch(iterable):
        evaluate_if_exp(
            v if f is None else converted_call.call_converted(f, v),
            functools.partial(keep, v),
            lambda: None,
        )
    _note_sources(kept, (iterable,))
    return kept if subscripts.is_mixed(kept) else subscripts.iterate_unchanged(kept)


# Iterators that read their arguments lazily; `product` and its like copy them first.
_LATER = (
    iter, itertools.accumulate, itertools.chain, itertools.chain.from_iterable, itertools.compress,
    itertools.cycle, itertools.dropwhile, itertools.filterfalse, itertools.groupby,
    itertools.islice, itertools.pairwise, itertools.starmap, itertools.takewhile, itertools.tee,
    itertools.zip_longest,
)  # fmt: skip
converted_call.OVERRIDDEN.update({f: _make_lazy_iterator(f) for f in _LATER})
converted_call.OVERRIDDEN.update(
    {f: _make_math_function(f) for f in vars(math).values() if callable(f)}
)
converted_call.OVERRIDDEN.update(
    {
        range: _range,
        len: _len,
        bool: _bool,
        int: _make_conversion(int),
        float: _make_conversion(float),
        complex: _make_conversion(complex),
        isinstance: _isinstance,
        type: _type,
        min: _make_min_or_max("min"),
        max: _make_min_or_max("max"),
        sum: _sum,
        any: lambda values: evaluate_any_or_all(values, stop=True),
        all: lambda values: evaluate_any_or_all(values, stop=False),
        zip: _zip,
        enumerate: _enumerate,
        reversed: _iterate_reversed,
        setattr: _setattr,
        print: _print,
        map: _make_converting_caller(map),
        filter: _filter,
        functools.reduce: _make_converting_caller(functools.reduce),
    }
)
