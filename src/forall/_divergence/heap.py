"""The heap: lists, dicts, attributes, closure cells. They hold the values of the running lanes.

NOTE. While lanes have diverged, every write is logged first: the slot and its old content
(`HeapSlot.get`). When the other lanes run, the old content is restored for them
(`HeapSlot.store_content`). When lanes reconverge, the contents of all are joined in the same object
(`HeapSlot.join_contents`). The object's
identity never changes, so its names do not matter.

A list whose length differs between lanes can show the items of some lanes only. It is *mixed*:
`ThreadState.mixed` has its contents by active set, and the object itself holds one `Mixed`, which
raises when it is used. Operations on a mixed object run for one active set after the other.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import Any

from forall._core.reachable import view_raw_container
from forall._divergence.join import (
    UNDEFINED,
    Parts,
    merge,
    restrict_parts,
)
from forall._divergence.vmap_interface import interface

CONTAINERS: dict[type, Any] = {}


class Split:
    """The contents of one object by active set, where they cannot be joined."""

    __slots__ = ("parts",)

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    def restrict_to(self, world: Any) -> Any:
        """Return the contents for the lanes of this active set."""
        parts = restrict_parts(self.parts, world)
        return parts[0][1] if len(parts) == 1 else Split(parts)


class Mixed:
    """The only item of a container whose contents differ between lanes; any use of it raises."""

    def __init__(self, kind: type) -> None:
        self.kind = kind

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.refuse()

    def refuse(self, *_: Any) -> Any:
        raise Unsplittable(
            f"a {self.kind.__name__} that differs in length or keys between examples"
        )

    __bool__ = __iter__ = __call__ = __getitem__ = __len__ = __add__ = __radd__ = refuse
    __mul__ = __rmul__ = __sub__ = __rsub__ = __truediv__ = __rtruediv__ = __float__ = refuse
    __lt__ = __gt__ = __le__ = __ge__ = __int__ = __index__ = __neg__ = refuse


class Unsplittable(BaseException):
    """Lanes diverge where their states cannot be kept apart: the call is rerun for each group.

    This is no ``Exception``, so that the user's ``except Exception`` does not catch it.
    """


class SeveralKinds(Unsplittable):
    """The examples' results cannot be joined to one value, however they were computed."""


class HeapSlot:
    """A variable on the heap, identified by ``key``."""

    __slots__ = ("key", "owner")

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.key: Any = id(owner)

    def get(self, thread: Any) -> Any:
        raise NotImplementedError

    def store_content(self, thread: Any, content: Any) -> None:
        raise NotImplementedError

    def join_contents(self, thread: Any, parts: Parts) -> None:
        """Join the contents of the lanes that reconverge."""
        self.store_content(thread, merge(parts))

    def varies(self, thread: Any) -> bool:
        """True if the slot holds a value that varies between lanes."""
        return hasattr(type(self.get(thread)), "varies")

    def narrow(self, thread: Any) -> None:
        """Restrict the content to the lanes that run now."""
        self.store_content(thread, _restrict_varying(self.get(thread)))

    def has_other_references(self) -> bool:
        """True if there are references to the object besides this slot's and the call's own."""
        return sys.getrefcount(self.owner) > 2


def _restrict_varying(value: Any) -> Any:
    return merge([(interface.get_active_set(), value)]) if hasattr(type(value), "varies") else value


class AttributeSlot(HeapSlot):
    __slots__ = ("name",)

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self.key = (id(owner), name)

    def get(self, thread: Any) -> Any:
        own = getattr(self.owner, "__dict__", None)
        if own is not None and self.name in own:
            return own[self.name]
        if own is not None and hasattr(type(self.owner), self.name):
            descriptor = getattr(type(self.owner), self.name)
            if not hasattr(descriptor, "__set__"):
                return UNDEFINED  # shows what the class has
        return getattr(self.owner, self.name, UNDEFINED)

    def store_content(self, thread: Any, content: Any) -> None:
        if content is not UNDEFINED:
            setattr(self.owner, self.name, content)
        elif self.get(thread) is not UNDEFINED:
            delattr(self.owner, self.name)


class CellSlot(HeapSlot):
    __slots__ = ()

    def get(self, thread: Any) -> Any:
        try:
            return self.owner.cell_contents
        except ValueError:
            return UNDEFINED

    def store_content(self, thread: Any, content: Any) -> None:
        if content is not UNDEFINED:
            self.owner.cell_contents = content
        elif self.get(thread) is not UNDEFINED:
            del self.owner.cell_contents


class GlobalSlot(HeapSlot):
    __slots__ = ("name",)

    def __init__(self, owner: dict, name: str) -> None:
        self.owner, self.name = owner, name
        self.key = (id(owner), name)

    def get(self, thread: Any) -> Any:
        return self.owner.get(self.name, UNDEFINED)

    def store_content(self, thread: Any, content: Any) -> None:
        if content is UNDEFINED:
            self.owner.pop(self.name, None)
        else:
            self.owner[self.name] = content


class ContainerSlot(HeapSlot):
    """A list, dict, set or deque with all its items, as one slot."""

    __slots__ = ()

    @property
    def raw_view(self) -> Any:
        """The container without overrides of a user's class: only the user's code calls those."""
        return view_raw_container(self.owner)

    def read(self) -> Any:
        raise NotImplementedError

    def write(self, content: Any) -> None:
        raise NotImplementedError

    def join_parts(self, parts: Parts) -> Any:
        """Join the contents of all lanes into one; None if that is impossible."""
        raise NotImplementedError

    def get(self, thread: Any) -> Any:
        return thread.mixed[self.key][1] if self.key in thread.mixed else self.read()

    def store_content(self, thread: Any, content: Any) -> None:
        if type(content) is Split:
            thread.mixed[self.key] = (self, content)
            thread.loose = True
            self.write(self.make_placeholder())
        else:
            thread.mixed.pop(self.key, None)
            self.write(content)

    def values(self) -> Any:
        return self.raw_view

    def narrow(self, thread: Any) -> None:
        if self.key not in thread.mixed:
            self.write([_restrict_varying(v) for v in self.values()])

    def varies(self, thread: Any) -> bool:
        return self.key in thread.mixed or any(hasattr(type(v), "varies") for v in self.values())

    def make_placeholder(self) -> Any:
        return [Mixed(type(self.owner))]

    def join_contents(self, thread: Any, parts: Parts) -> None:
        flat: Parts = []
        for world, content in parts:
            inner = content.restrict_to(world) if type(content) is Split else content
            flat += inner.parts if type(inner) is Split else [(world, inner)]
        if not flat:  # unknown to all of these lanes
            return
        content = flat[0][1] if len(flat) == 1 else self.join_parts(flat)
        unchanged = [(i, i.find_unchanged(self.owner, flat)) for i in thread.copies.iterations]
        self.store_content(thread, Split(flat) if content is None else content)
        for iteration, places in unchanged:
            iteration.note_join(places)


class SequenceSlot(ContainerSlot):
    __slots__ = ()

    def read(self) -> list:
        return list(self.raw_view)

    def write(self, content: list) -> None:
        held = self.raw_view
        if isinstance(self.owner, deque):
            held.clear()
            held.extend(content)
        else:
            held[:] = content

    def join_parts(self, parts: Parts) -> list | None:
        length = len(parts[0][1])
        if any(len(content) != length for _, content in parts):
            return None
        return [merge([(w, content[n]) for w, content in parts]) for n in range(length)]


class MappingSlot(ContainerSlot):
    __slots__ = ()

    def read(self) -> dict:
        return dict(self.raw_view.items())

    def write(self, content: dict) -> None:
        """Replace the contents; equal keys are kept, since an iteration may be going on."""
        held = self.raw_view
        if list(held) != list(content):
            held.clear()
            held.update(content)
            return
        for key, value in content.items():
            if held[key] is not value:
                held[key] = value

    def values(self) -> Any:
        return self.raw_view.values()

    def narrow(self, thread: Any) -> None:
        if self.key not in thread.mixed:
            self.write({key: _restrict_varying(v) for key, v in self.raw_view.items()})

    def make_placeholder(self) -> dict:
        mixed = Mixed(type(self.owner))
        return {mixed: mixed}

    def join_parts(self, parts: Parts) -> dict | None:
        keys = list(parts[0][1])
        if any(list(content) != keys for _, content in parts):
            return None
        return {key: merge([(w, content[key]) for w, content in parts]) for key in keys}


class SetSlot(ContainerSlot):
    __slots__ = ()

    def read(self) -> set:
        return set(self.raw_view)

    def write(self, content: Any) -> None:
        held = self.raw_view
        held.clear()
        held.update(content)

    def join_parts(self, parts: Parts) -> set | None:
        first = parts[0][1]
        return first if all(content == first for _, content in parts) else None


CONTAINERS.update(
    {
        list: SequenceSlot,
        deque: SequenceSlot,
        bytearray: SequenceSlot,
        dict: MappingSlot,
        set: SetSlot,
    }
)
_OTHERS: dict[type, Any] = {}  # of subclasses


def slot_of(owner: Any) -> HeapSlot | None:
    """Return the slot of a container; None for any other object."""
    kind = type(owner)
    found = CONTAINERS.get(kind)
    if found is None:
        if kind not in _OTHERS:
            _OTHERS[kind] = next((CONTAINERS[k] for k in kind.__mro__ if k in CONTAINERS), None)
        found = _OTHERS[kind]
    return None if found is None else found(owner)


def find_active_contents(split: Split) -> Parts:
    """Return the contents of a mixed object for the lanes that run now."""
    inner = split.restrict_to(interface.get_active_set())
    return inner.parts if type(inner) is Split else [(interface.get_active_set(), inner)]
