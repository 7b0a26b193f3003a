"""Joins: where lanes reconverge, one value is made from the values of each active set."""

from __future__ import annotations

import math
from typing import Any

import torch

from forall._compat.dispatch_state import functions_off
from forall._compat.tensor_subclass import (
    convert_to_class,
    get_users_attributes,
    get_users_class,
    posing,
    unwrap_posed,
)
from forall._divergence import aliases, scalar_storage
from forall._divergence.vmap_interface import interface, intersect_sets, unite_sets

Parts = list[tuple[Any, Any]]  # disjoint active sets, and the values of their lanes


class _Undefined:
    """Stands for a name that has no value."""

    def __repr__(self) -> str:
        return "undefined"


UNDEFINED: Any = _Undefined()
NUMBERS = (bool, int, float, complex)
_DTYPES: Any = dict(
    zip(NUMBERS, (torch.bool, torch.int64, torch.float64, torch.complex128), strict=True)
)
_make_varying: Any = None  # set by `varying`, which needs this file


def merge(parts: Parts) -> Any:
    """Join the values of these parts into one; their lanes are those that run now.

    A value that some lanes lack is kept as a varying one: only a read of it may raise.
    """
    first = parts[0][1]
    for _, value in parts:
        if value is not first:
            break
    else:
        if not hasattr(type(first), "varies"):
            return first
    groups = _group_by_value(parts)
    if not groups:
        return UNDEFINED
    covered = unite_sets([w for w, _ in groups])
    if interface.get_active_set() - covered is not None:
        return _make_varying(groups)
    if len(groups) == 1:
        return groups[0][1]
    try:
        found = _merge_values(groups)
    except interface.UndefinedForExamples:  # an object made after some lanes left
        groups = [(w, v) for w, v in groups if _is_available(w, v)]
        return _make_varying(groups) if groups else UNDEFINED
    return _make_varying(groups) if found is UNDEFINED else found


def _is_available(world: Any, value: Any) -> bool:
    """True if all lanes of an active set have this value."""
    try:
        with interface.run_active_set(world):
            if type(value) is interface.BatchedScalar:
                _ = value.tensor
            elif isinstance(value, interface.Tensor):
                value.detach()
    except interface.UndefinedForExamples:
        return False
    return True


def restrict_parts(parts: Parts, world: Any) -> Parts:
    """Restrict parts to the lanes of one active set."""
    for w, v in parts:
        if w == world:  # no other part has any of its lanes
            return [(w, v)]
    found = [(intersect_sets(w, world), v) for w, v in parts]
    return [(w, v) for w, v in found if w is not None]


def _group_by_value(parts: Parts) -> Parts:
    """Return one part for each value: varying values are split, undefined ones left out."""
    groups: dict[int, tuple[Any, Any]] = {}
    for world, value in parts:
        inner = [(world, value)]
        if hasattr(type(value), "varies"):
            inner = restrict_parts(value.parts, world)
        for w, v in inner:
            if v is not UNDEFINED:
                known = groups.get(id(v))
                groups[id(v)] = (w if known is None else known[0] | w, v)
    return list(groups.values())


def _merge_values(parts: Parts) -> Any:
    """Join values into one for all lanes, or return UNDEFINED."""
    values = [v for _, v in parts]
    first = values[0]
    if isinstance(first, interface.Tensor):
        return merge_tensors(parts) if all(_is_alike(first, v) for v in values[1:]) else UNDEFINED
    if _number_type(first) is not None:
        return _merge_numbers(parts)
    if type(first) is tuple or (isinstance(first, tuple) and hasattr(first, "_make")):
        return _merge_tuples(parts)
    if type(first) in (str, bytes, slice, range) and all(
        type(v) is type(first) and v == first for v in values
    ):
        return first
    return UNDEFINED


def merge_tensors(parts: Parts) -> Any:
    """Join tensors into one for all lanes, and note its aliases in the loop."""
    bares = [(w, unwrap_posed(t)) for w, t in parts] if posing.used else parts
    joined = interface.join_tensors(bares)
    aliases.note_join(joined, bares)
    if bares is parts or all(b is t for (_, b), (_, t) in zip(bares, parts, strict=True)):
        return joined
    return _give_class(joined, parts)


def _give_class(joined: Any, parts: Parts) -> Any:
    """Give a joined tensor the class of its parts, and join their attributes."""
    own = [(w, get_users_attributes(t)) for w, t in parts]
    made = convert_to_class(joined, get_users_class(parts[0][1]))
    for name in dict.fromkeys(k for _, found in own for k in found):
        value = merge([(w, found.get(name, UNDEFINED)) for w, found in own])
        if value is not UNDEFINED:
            made.__dict__[name] = value
    return made


def _is_alike(a: Any, b: Any) -> bool:
    if not isinstance(b, interface.Tensor):
        return False
    if type(a) is not type(b) and get_users_class(a) is not get_users_class(b):
        return False
    if posing.used:
        a, b = unwrap_posed(a), unwrap_posed(b)
    with functions_off():
        return (a.shape, a.dtype, a.device, a.layout) == (b.shape, b.dtype, b.device, b.layout)


def _number_type(value: Any) -> type | None:
    """Return the type of a Python number or a Number; None for other values."""
    kind = type(value)
    if kind is interface.BatchedScalar:
        return value.kind
    return kind if kind in NUMBERS else None


def _merge_numbers(parts: Parts) -> Any:
    values = [v for _, v in parts]
    kind = _number_type(values[0])
    if any(_number_type(v) is not kind for v in values):
        return UNDEFINED
    if all(type(v) is kind and _is_same_number(v, values[0]) for v in values):
        return values[0]
    if kind is int and any(type(v) is int and not -(2**63) <= v < 2**63 for v in values):
        return UNDEFINED
    if all(type(v) is kind for v in values):
        return interface.BatchedScalar(interface.join_numbers(parts, _DTYPES[kind]))
    numbers = scalar_storage.move_to_one_device([_number_to_tensor(v, kind) for v in values])
    joined = interface.join_tensors([(w, t) for (w, _), t in zip(parts, numbers, strict=True)])
    return interface.BatchedScalar(joined)


def _is_same_number(a: Any, b: Any) -> bool:
    if type(a) is float:
        return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (
            math.isnan(a) and math.isnan(b)
        )
    return a == b


def _number_to_tensor(value: Any, kind: Any) -> Any:
    """Return a number as a tensor, without a check that it is of the lanes that run."""
    if type(value) is interface.BatchedScalar:
        return value.whole
    return torch.tensor(value, dtype=_DTYPES[kind])


def _merge_tuples(parts: Parts) -> Any:
    first = parts[0][1]
    if any(type(v) is not type(first) or len(v) != len(first) for _, v in parts):
        return UNDEFINED
    items = [merge([(w, v[n]) for w, v in parts]) for n in range(len(first))]
    return tuple(items) if type(first) is tuple else first._make(items)


def unify_varying(value: Any, peek: Any = lambda _, v: v) -> Any:
    """Turn a varying list, tuple or dict into one with varying items, if the structures agree.

    This is for results, which are new objects.
    """
    if not hasattr(type(value), "varies"):
        return value
    parts = [(w, peek(w, v)) for w, v in restrict_parts(value.parts, interface.get_active_set())]
    first = parts[0][1]
    if any(type(v) is not type(first) for _, v in parts):
        return value
    if type(first) in (list, tuple):
        if any(len(v) != len(first) for _, v in parts):
            return value
        items = [
            unify_varying(merge([(w, v[n]) for w, v in parts]), peek) for n in range(len(first))
        ]
        return type(first)(items)
    if type(first) is dict:
        if any(list(v) != list(first) for _, v in parts):
            return value
        return {k: unify_varying(merge([(w, v[k]) for w, v in parts]), peek) for k in first}
    return value
