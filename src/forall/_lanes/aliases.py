"""One tensor of several: a joined tensor is a copy where the loop's name is a tensor of before.

    y = x
    if c: y = 2 * x
    y += 1           # in the loop, x too where not c

What is written into the copy is put back into the tensors that it was joined from, and the reverse,
as far as these are still alive: what nobody holds any more nobody can see.
"""

from __future__ import annotations

import weakref
from typing import Any

from forall._lanes.words import both, words

Pairs = list[tuple[Any, weakref.ref]]
_SOURCES: dict[int, tuple[weakref.ref, Pairs]] = {}  # of a joined tensor: lanes, tensors
_COPIES: dict[int, tuple[weakref.ref, Pairs]] = {}  # of a tensor: lanes, what it was joined into


def remember(copy: Any, parts: list[tuple[Any, Any]]) -> None:
    """``copy`` was joined from these."""
    pairs = _pairs(_SOURCES, copy)
    for w, tensor in parts:
        known = _pairs(_COPIES, tensor)
        known[:] = [pair for pair in known if pair[1]() is not None]
        known.append((w, _SOURCES[id(copy)][0]))
        pairs.append((w, _COPIES[id(tensor)][0]))


def _pairs(table: dict[int, tuple[weakref.ref, Pairs]], tensor: Any) -> Pairs:
    """The tensor's entry, which goes when it does."""
    key = id(tensor)
    if key not in table:
        table[key] = (weakref.ref(tensor, lambda _: table.pop(key, None)), [])
    return table[key][1]


def _linked(tensor: Any) -> Pairs:
    return [
        pair for table in (_SOURCES, _COPIES) if id(tensor) in table for pair in table[id(tensor)][1]
    ]


def written(tensor: Any) -> None:
    """Something was written into a tensor, for the lanes that run."""
    if not _COPIES and not _SOURCES:
        return
    reached = {id(tensor)}
    waiting = [(tensor, words.now())]
    while waiting:
        source, world = waiting.pop()
        for w, ref in _linked(source):
            other, lanes = ref(), both(w, world)
            if other is None or lanes is None or id(other) in reached:
                continue
            reached.add(id(other))
            with words.running(lanes):
                other.copy_(source)
            waiting.append((other, lanes))
