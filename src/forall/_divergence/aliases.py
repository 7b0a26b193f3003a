"""Aliases across joins: a joined tensor is a copy, where a loop over examples has the original.

    y = x
    if c: y = 2 * x
    y += 1           # in the loop over examples, this writes x too where not c

Each tensor that was ever joined has an identity in the loop. For some lanes a copy has the identity
of the tensor that it was joined from. A write into one tensor is repeated on all live tensors that
have the same identity for the writing lanes. Writes are found by the memory that they change, under
whichever name. A copy keeps its view alive: through the view, writes to the base reach the copy.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from forall._divergence.vmap_interface import interface, intersect_sets, unite_sets

if TYPE_CHECKING:
    from collections.abc import Iterator


_WAITS: Any = object()  # in place of lanes: the name is no alias until it is joined itself


class _LoopIdentity:
    """A tensor of the loop over examples; ``names`` are our tensors that are it for some lanes."""

    __slots__ = ("names",)

    def __init__(self) -> None:
        self.names: list[tuple[Any, weakref.ref[AliasName]]] = []

    def add(self, lanes: Any, name: AliasName) -> None:
        self.names[:] = [(w, known) for w, known in self.names if known() is not None]
        self.names.append((lanes, weakref.ref(name)))

    def is_only(self, name: AliasName) -> bool:
        return all(known() in (None, name) for _, known in self.names)


class _Piece(NamedTuple):
    lanes: Any  # None: all
    identity: _LoopIdentity
    way: Any  # the view that these lanes have, which has to stay alive


class AliasName:
    """A tensor of ours and its identities in the loop. The tensor's memory object holds it."""

    __slots__ = ("__weakref__", "kind", "memory", "pieces", "tensor", "views")

    def __init__(self, tensor: Any, memory: Any) -> None:
        self.tensor = weakref.ref(tensor)
        self.memory = _nothing if memory is None else weakref.ref(memory)
        self.kind, self.views = type(tensor), interface.is_partial_name(tensor)
        self.pieces: list[_Piece] = []

    def find_live_tensor(self) -> Any:
        """Return the tensor, or another one of all its memory; None if none is alive."""
        tensor, memory = self.tensor(), self.memory()
        if tensor is not None or memory is None or self.views:
            return tensor
        return interface.make_new_name(self.kind, memory)

    def may_reach_others(self) -> bool:
        """True if a write under this name is possible and may have to reach other tensors."""
        if self.tensor() is not None:
            return True
        return not self.views and not all(p.identity.is_only(self) for p in self.pieces)

    def merge_own_pieces(self) -> list[_Piece]:
        """Return the pieces, with those of no other tensor merged into one."""
        alone = [p for p in self.pieces if p.way is None and p.identity.is_only(self)]
        if len(alone) > 1 or not self.pieces:
            mine = {id(p) for p in alone}
            shared = [p for p in self.pieces if id(p) not in mine]
            lanes = unite_sets([p.lanes for p in alone]) if shared else None
            self.pieces = [*shared, _Piece(lanes, identity := _LoopIdentity(), None)]
            identity.add(lanes, self)
        return self.pieces

    def find_twins(self, lanes: Any) -> Iterator[tuple[AliasName, Any]]:
        """Yield the names of the same tensor in the loop, each with its share of these lanes."""
        for piece in self.pieces:
            mine = lanes if piece.lanes is None else intersect_sets(piece.lanes, lanes)
            for w, known in [*piece.identity.names] if mine is not None else ():
                twin = known()
                if w is _WAITS:
                    continue
                shared = mine if w is None else intersect_sets(mine, w)
                if twin is not None and twin is not self and shared is not None:
                    yield twin, shared


def _nothing() -> None:
    return None


def note_join(copy: Any, parts: list[tuple[Any, Any]], *, follows: bool = True) -> None:
    """Note that ``copy`` was joined from these ``parts``; None is a tensor without aliases.

    Without ``follows``, writes do not reach ``copy`` until it is joined itself.
    """
    name = _find_name(copy)
    for world, tensor in parts:
        for w, identity, way in _pieces_of(tensor):
            lanes = world if w is None else intersect_sets(world, w)
            if lanes is not None:
                name.pieces.append(_Piece(lanes, identity, way))
                identity.add(lanes if follows else _WAITS, name)


def _pieces_of(tensor: Any) -> list[_Piece]:
    """Return the identities of a tensor in the loop, for a copy that is joined from it."""
    if tensor is None:
        return [_Piece(None, _LoopIdentity(), None)]
    name = _find_name(tensor)
    pieces = name.merge_own_pieces()
    way = tensor if name.views else name if name.memory() is None else None
    return [p if p.way is not None else p._replace(way=way) for p in pieces]


def _find_name(tensor: Any) -> AliasName:
    memory = interface.find_alias_family(tensor)
    if memory is None:  # from outside of all lanes
        return AliasName(tensor, None)
    names = memory.names = [name for name in memory.names or () if name.may_reach_others()]
    for name in names:
        if name.tensor() is tensor:
            return name
    names.append(AliasName(tensor, memory))
    return names[-1]


def propagate_writes() -> None:
    """Repeat the last writes of the running lanes on all tensors that are the same in the loop.

    The search starts at the memory that was written and visits each memory once for each lane.
    """
    now = interface.get_active_set()
    todo = [(memory, now) for memory in interface.take_written_families()]
    reached = {id(memory): [now] for memory, _ in todo}
    for memory, lanes in todo:  # it grows
        for name in [*memory.names]:
            for twin, shared in name.find_twins(lanes):
                rest = _subtract_sets(shared, reached.get(id(twin.memory()), ()))
                target = None if rest is None else twin.find_live_tensor()
                if target is not None:
                    interface.write_examples(target, name.find_live_tensor(), rest)
                    for other in interface.take_written_families():
                        todo.append((other, rest))
                        reached.setdefault(id(other), []).append(rest)


def _subtract_sets(lanes: Any, worlds: Any) -> Any:
    for world in worlds:
        lanes = None if lanes is None else lanes - world
    return lanes
