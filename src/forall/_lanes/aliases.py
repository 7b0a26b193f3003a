"""One tensor under several names: a joined tensor is a copy where the loop's is one of before.

    y = x
    if c: y = 2 * x
    y += 1           # in the loop, x too where not c

Each tensor that was ever joined has an identity, and a copy has, for some lanes, that of what it
was joined from. What is written into one of them is put into all that are alive and have the same
identity for the lanes that write.
"""

from __future__ import annotations

import weakref
from typing import Any

from forall._lanes.words import both, words


class _Identity:
    """What a tensor of the loop is; ``holders`` are tensors of ours that are it for some lanes."""

    __slots__ = ("holders",)

    def __init__(self) -> None:
        self.holders: list[tuple[Any, weakref.ref]] = []


_Pieces = list[tuple[Any, _Identity]]  # by lanes; None: for all
_PIECES: dict[int, tuple[weakref.ref, _Pieces]] = {}


def remember(copy: Any, parts: list[tuple[Any, Any]]) -> None:
    """``copy`` was joined from these; None is what nobody has under another name."""
    ref, mine = _known(copy)
    for world, tensor in parts:
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


def _known(tensor: Any) -> tuple[weakref.ref, _Pieces]:
    """The tensor's entry, which goes when it does."""
    key = id(tensor)
    if key not in _PIECES:
        _PIECES[key] = (weakref.ref(tensor, lambda _: _PIECES.pop(key, None)), [])
    return _PIECES[key]


def written(tensor: Any) -> None:
    """Something was written into a tensor, for the lanes that run."""
    if id(tensor) not in _PIECES:
        return
    now = words.now()
    for world, identity in _PIECES[id(tensor)][1]:
        lanes = now if world is None else both(world, now)
        if lanes is None:
            continue
        for w, ref in list(identity.holders):
            other = ref()
            shared = lanes if w is None else both(lanes, w)
            if other is not None and other is not tensor and shared is not None:
                with words.running(shared):
                    other.copy_(tensor)
