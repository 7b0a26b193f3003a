"""One tensor under several names: a joined tensor is a copy where the loop's is one of before.

    y = x
    if c: y = 2 * x
    y += 1           # in the loop, x too where not c

Each tensor that was ever joined has an identity, and a copy has, for some lanes, that of what it
was joined from. What is written into one of them is put into all that are alive and have the same
identity for the lanes that write. A view is kept alive by its copies: it is the way to what it
views, and what is written there by any name is put into them.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from forall._lanes.words import both, words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class _Identity:
    """What a tensor of the loop is; ``holders`` are tensors of ours that are it for some lanes."""

    __slots__ = ("holders",)

    def __init__(self) -> None:
        self.holders: list[tuple[Any, weakref.ref]] = []


_Pieces = list[tuple[Any, _Identity]]  # by lanes; None: for all
_PIECES: dict[int, tuple[weakref.ref, _Pieces]] = {}
# By copy: the views that it was joined from, for which lanes, and what memory they are of.
_VIEWS: dict[int, tuple[weakref.ref, list[tuple[Any, Any, weakref.ref]]]] = {}


def remember(copy: Any, parts: list[tuple[Any, Any]]) -> None:
    """``copy`` was joined from these; None is what nobody has under another name."""
    ref, mine = _known(copy)
    for world, tensor in parts:
        memory = None if tensor is None else words.viewed(tensor)
        if memory is not None:
            _views(copy).append((world, tensor, weakref.ref(memory)))
        theirs = [(None, _Identity())] if tensor is None else _known(tensor)[1]
        if not theirs:
            theirs.append((None, identity := _Identity()))
            identity.holders.append((None, _PIECES[id(tensor)][0]))
        for w, identity in theirs:
            lanes = world if w is None else both(world, w)
            if lanes is not None:
                mine.append((lanes, identity))
                identity.holders[:] = [h for h in identity.holders if h[1]() is not None]
                identity.holders.append((lanes, ref))


def _forgetting(entries: dict, key: int) -> Callable[[Any], Any]:
    """Bound here: as Python ends, a module's names are gone before its tensors."""
    return lambda _: entries.pop(key, None)


def _known(tensor: Any) -> tuple[weakref.ref, _Pieces]:
    """The tensor's entry, which goes when it does."""
    key = id(tensor)
    if key not in _PIECES:
        _PIECES[key] = (weakref.ref(tensor, _forgetting(_PIECES, key)), [])
    return _PIECES[key]


def _views(copy: Any) -> list[tuple[Any, Any, weakref.ref]]:
    key = id(copy)
    if key not in _VIEWS:
        _VIEWS[key] = (weakref.ref(copy, _forgetting(_VIEWS, key)), [])
    return _VIEWS[key][1]


def written(tensor: Any) -> None:
    """Something was written into a tensor, for the lanes that run."""
    if id(tensor) in _PIECES:
        now = words.now()
        for lanes, twin in [*_twins(tensor, now)]:
            _put(twin, tensor, lanes)
            _seen_to_change(twin, lanes, tensor)
    if _VIEWS:
        _seen_to_change(tensor, words.now(), tensor)


def _put(target: Any, value: Any, lanes: Any) -> None:
    with words.running(lanes):
        target.copy_(value)


def _twins(tensor: Any, now: Any) -> Iterator[tuple[Any, Any]]:
    """What is the tensor under another name, and for which lanes."""
    for world, identity in _PIECES[id(tensor)][1] if id(tensor) in _PIECES else ():
        lanes = now if world is None else both(world, now)
        for w, ref in list(identity.holders) if lanes is not None else ():
            other = ref()
            shared = lanes if w is None else both(lanes, w)
            if other is not None and other is not tensor and shared is not None:
                yield shared, other


def _seen_to_change(tensor: Any, now: Any, writer: Any) -> None:
    """What was written into a tensor, in copies that were joined from views of its memory."""
    memory = words.memory(tensor) if _VIEWS else None
    for reference, views in list(_VIEWS.values()) if memory is not None else ():
        copy = reference()
        for world, view, of in views:
            lanes = both(world, now)
            if copy is not None and copy is not writer and of() is memory and lanes is not None:
                _put(copy, view, lanes)
