"""Subscripts and attributes: ``x[k]``, ``x.a = v``, ``a, b = x``, ``for v in x``, converted."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

from forall._core.python_snapshot import PythonSnapshot
from forall._divergence.heap import (
    AttributeSlot,
    Unsplittable,
    find_active_contents,
    slot_of,
)
from forall._divergence.join import Parts, merge, restrict_parts
from forall._divergence.thread_state import run_each_set, thread
from forall._divergence.varying import Varying, find_uniform_sets, resolve_varying
from forall._divergence.vmap_interface import interface, unite_sets

PLAIN_KEYS = frozenset({int, str, type(None), bool})
BUILTIN = frozenset({list, tuple, dict, str, range})
END = object()


def run_per_set(values: tuple, run: Callable[[], Any]) -> Any:
    """Run once for each active set within which none of the values varies."""
    worlds = find_uniform_sets(values)
    return run_each_set([(world, None) for world in worlds], lambda _: run())


def is_mixed(value: Any) -> bool:
    return bool(thread.mixed) and id(value) in thread.mixed


def log_container(owner: Any) -> None:
    """Log the contents of a container before it changes."""
    slot = slot_of(owner)
    if slot is not None:
        thread.note(slot)


# --- reading


def get_item(x: Any, key: Any) -> Any:
    """Evaluate ``x[key]``."""
    kind = type(x)
    if kind is Varying:
        return x.each(lambda v: get_item(v, key))
    if thread.loose and (type(key) is Varying or is_mixed(x)):
        return run_per_set((x, key), lambda: get_item(resolve_varying(x), resolve_varying(key)))
    if kind in BUILTIN:
        if type(key) in PLAIN_KEYS:
            return x[key]
        return _look_up(x, key)
    if type(key) in PLAIN_KEYS:
        return x[key]
    own = getattr(kind, "__getitem__", None)
    if hasattr(own, "__code__") and not isinstance(x, interface.Tensor):
        return thread.call(own, x, key)
    return interface.run_per_group(lambda: x[key], merge) if _may_differ(key) else x[key]


def _look_up(x: Any, key: Any) -> Any:
    """Return an item of a builtin container by a key that may differ between lanes."""
    if _may_differ(key):
        return interface.run_per_group(lambda: x[_concretize_key(key)], merge)
    return x[key]


def _may_differ(key: Any) -> bool:
    """True if a key may differ between lanes: a tensor, a Number, or a slice or tuple of these."""
    kind = type(key)
    if kind is slice:
        return any(_may_differ(v) for v in (key.start, key.stop, key.step))
    if kind is tuple or kind is list:
        return any(_may_differ(v) for v in key)
    return kind is interface.BatchedScalar or isinstance(key, interface.Tensor)


def _concretize_key(key: Any) -> Any:
    """Return the key as a Python number. If lanes have different ones, they diverge."""
    return key.concretize() if type(key) is interface.BatchedScalar else key


def contains(item: Any, container: Any) -> Any:
    if thread.loose and (
        type(container) is Varying or type(item) is Varying or is_mixed(container)
    ):
        return run_per_set(
            (item, container), lambda: contains(resolve_varying(item), resolve_varying(container))
        )
    if (
        isinstance(item, interface.Tensor)
        or type(item) is interface.BatchedScalar
        or type(container) in (list, tuple)
    ):
        return interface.run_per_group(lambda: item in container, merge)
    return item in container


def unpack_items(value: Any) -> Any:
    """Return a value that is unpacked to several names as an iterable that all lanes have."""
    if type(value) is Varying or is_mixed(value):
        items = run_per_set((value,), lambda: tuple(resolve_varying(value)))
        if type(items) is Varying:
            raise Unsplittable("what is unpacked has another length for some examples")
        return items
    return value


starred = unpack_items


def unpack_mapping(value: Any) -> Any:
    """Return what ``**`` unpacks in a call as a mapping that all lanes have."""
    if type(value) is Varying or is_mixed(value):
        found = run_per_set((value,), lambda: tuple(resolve_varying(value).items()))
        if type(found) is Varying:
            raise Unsplittable("what is unpacked has other keys for some examples")
        return dict(found)
    return value


# --- displays


def make_dict(*entries: tuple) -> dict:
    """Make ``{key: value, **others}`` of entries ``(key, value)`` and ``(others,)``."""
    made: dict = {}
    for entry in entries:
        if len(entry) == 1:
            thread.call(made.update, entry[0])
        elif type(entry[0]) in PLAIN_KEYS and not thread.loose:
            made[entry[0]] = entry[1]
        else:
            store_item(entry[1], made, entry[0])
    return made


def make_list(*parts: tuple) -> list:
    """Make ``[item, *others]`` of parts ``(item,)`` and ``(others, True)``."""
    made: list = []
    for part in parts:
        thread.call(made.append if len(part) == 1 else made.extend, part[0])
    return made


def make_tuple(*parts: tuple) -> tuple:
    return thread.call(tuple, make_list(*parts))


def make_set(*parts: tuple) -> set:
    made: set = set()
    for part in parts:
        thread.call(made.add if len(part) == 1 else made.update, part[0])
    return made


# --- writing


def store_item(value: Any, x: Any, key: Any) -> None:
    """Run ``x[key] = value``."""
    if thread.loose and (type(x) is Varying or type(key) is Varying or is_mixed(x)):
        run_per_set((x, key), lambda: store_item(value, resolve_varying(x), resolve_varying(key)))
        return
    if isinstance(x, interface.Tensor):
        if thread.loose and type(value) is Varying:
            run_per_set((value,), lambda: store_item(resolve_varying(value), x, key))
            return
        x[key] = value
        return
    own = getattr(type(x), "__setitem__", None)
    if hasattr(own, "__code__"):
        thread.call(own, x, key, value)
    elif _may_differ(key):
        run_changing((x,), lambda: operator.setitem(x, _concretize_key(key), value))
    else:
        if thread.diverged:
            log_container(x)
        x[key] = value


def delete_item(x: Any, key: Any) -> None:
    """Run ``del x[key]``."""
    if thread.loose and (type(x) is Varying or type(key) is Varying or is_mixed(x)):
        run_per_set((x, key), lambda: delete_item(resolve_varying(x), resolve_varying(key)))
    elif _may_differ(key):
        run_changing((x,), lambda: operator.delitem(x, _concretize_key(key)))
    else:
        if thread.diverged:
            log_container(x)
        del x[key]


def run_changing(owners: Any, run: Callable[[], Any], state: PythonSnapshot | None = None) -> Any:
    """Run unconverted code that may change these containers; lanes may diverge inside.

    If some lanes alone run it, it must not change anything else in the snapshot ``state``.
    """
    slots = [slot for slot in map(slot_of, owners) if slot is not None]
    if not slots and state is None:
        return interface.run_per_group(run, merge)
    t = thread
    if t.diverged:
        for slot in slots:
            t.note(slot)
    before = [slot.get(t) for slot in slots]
    ran = False

    def run_and_read() -> Any:
        nonlocal ran
        for slot, content in zip(slots, before, strict=True) if ran else ():
            slot.store_content(t, content)
        check(ran)
        ran = True
        result = run()
        return result, [slot.get(t) for slot in slots]

    def check(alone: bool) -> None:
        if alone and state is not None and state.differs_from_now():
            raise Unsplittable("code that is not converted has changed what others see")

    def join(parts: Parts) -> Any:
        for n, slot in enumerate(slots):
            t.join_slot(slot, [(w, written[n]) for w, (_, written) in parts])
        check(True)
        return merge([(w, result) for w, (result, _) in parts]), None

    result, _ = interface.run_per_group(run_and_read, join)
    check(t.diverged > 0)
    return result


def store_attr(value: Any, x: Any, name: str) -> None:
    """Run ``x.name = value``."""
    if type(x) is Varying:
        x.each(lambda v: store_attr(value, v, name))
        return
    kind = type(x)
    found = getattr(kind, name, None)
    setter = found.fset if type(found) is property else None
    own = getattr(kind, "__setattr__", None)
    if setter is not None or (hasattr(own, "__code__") and not hasattr(x, "_parameters")):
        thread.call(setter, x, value) if setter is not None else thread.call(own, x, name, value)
        return
    if thread.diverged:
        thread.note(AttributeSlot(x, name))
    setattr(x, name, value)


def delete_attr(x: Any, name: str) -> None:
    if type(x) is Varying:
        x.each(lambda v: delete_attr(v, name))
        return
    if thread.diverged:
        thread.note(AttributeSlot(x, name))
    delattr(x, name)


def update_in_place(name: str, a: Any, b: Any) -> Any:
    """Run an in-place operator such as ``a += b``, and return the new ``a``."""
    if thread.loose and (type(a) is Varying or type(b) is Varying or is_mixed(a) or is_mixed(b)):
        if is_mixed(a):
            run_per_set((a, b), lambda: getattr(operator, name)(a, resolve_varying(b)))
            return a
        return run_per_set(
            (a, b), lambda: update_in_place(name, resolve_varying(a), resolve_varying(b))
        )
    if thread.diverged and not isinstance(a, interface.Tensor):
        log_container(a)
    return getattr(operator, name)(a, b)


# --- items one after another


def make_stepper(iterable: Any) -> Callable[[], tuple] | None:
    """Return a stepper through an iterable that differs between lanes; None for any other.

    Each call of it returns an answer and a function that gives the next item. The answer is a bool,
    True if there is an item, or two active sets: the lanes with an item and those without.
    """
    kind = type(iterable)
    if kind is Varying:
        value = merge(iterable.running_parts())
        parts = (
            [(interface.get_active_set(), value)]
            if type(value) is not Varying
            else value.running_parts()
        )
        return _step_together([(w, _start_iterator(w, v)) for w, v in parts], _Unchanged(iterable))
    if is_mixed(iterable):
        parts = find_active_contents(thread.mixed[id(iterable)][1])
        return _step_together(
            [(w, iter(list(content))) for w, content in parts], _Unchanged(iterable)
        )
    return None


class _Unchanged:
    """A check, before each item of a copy, that the copied containers have not changed.

    Python's iterators read the container at each step, and would see such changes.
    """

    __slots__ = ("__weakref__", "before")

    def __init__(self, made: Any) -> None:
        own = lists_in(made) if type(made) is Varying else [made]
        containers = [*thread.copies.find_sources(made), *own]
        self.before = [(c, _contents(c)) for c in containers]
        thread.copies.iterations.add(self)

    def check(self) -> None:
        """Raise `Unsplittable` if a container has changed for lanes that still go through it."""
        for container, before in self.before:
            if not _are_same(_contents(container), before):
                raise Unsplittable(_MEANWHILE)

    def find_unchanged(self, owner: Any, parts: Parts) -> list[int]:
        """Return where a container stands whose parts, which are to be joined, are as before."""
        return [
            n
            for n, (container, before) in enumerate(self.before)
            if container is owner and _are_same(parts, before)
        ]

    def note_join(self, places: list[int]) -> None:
        """Take the containers at these places anew: a join has put new items for the same ones."""
        world = interface.get_active_set()
        for n in places:
            container, before = self.before[n]
            others = [(w - world, items) for w, items in before]
            self.before[n] = (
                container,
                [*_contents(container), *[(w, items) for w, items in others if w is not None]],
            )


def lists_in(value: Any) -> list[Any]:
    """Return the value in a list if it is a list or dict; of a varying value, each lane's one."""
    values = [v for _, v in value.parts] if type(value) is Varying else [value]
    return [v for v in values if type(v) in (list, dict)]


_MEANWHILE = "a list that changes while it is gone through, and is another for some examples"


def _contents(container: Any) -> Parts:
    """Return the items of a container: one list, or one for each active set if it is mixed."""
    world = interface.get_active_set()
    parts = [(world, container)]
    if is_mixed(container):
        parts = find_active_contents(thread.mixed[id(container)][1])
    return [(w, [*content]) for w, content in parts]


def _are_same(parts: Parts, before: Parts) -> bool:
    """True if each lane of ``parts`` has the items that it has in ``before``."""
    return all(
        len(now) == len(then) and all(map(operator.is_, now, then))
        for world, now in parts
        for _, then in restrict_parts(before, world)
    )


def watch(values: Any, *, backwards: bool = False) -> Any:
    """Return an iterator of a list, which reads the list at each step; any other value as it is.

    The iterator raises if the list is mixed by then: Python's own would give items of no lane.
    """
    return _iterate(values, backwards=backwards) if type(values) is list else values


def iterate_unchanged(values: list) -> Iterator[Any]:
    """Yield the items of a copy; raise if the copied container has changed."""
    unchanged = _Unchanged(values)
    for value in values:
        unchanged.check()
        yield value


def _iterate(values: list, *, backwards: bool) -> Iterator[Any]:
    n = len(values) - 1 if backwards else 0
    while True:
        if thread.mixed and id(values) in thread.mixed:
            raise Unsplittable(_MEANWHILE)
        if not 0 <= n < len(values):
            return
        yield values[n]
        n += -1 if backwards else 1


def _start_iterator(world: Any, iterable: Any) -> Any:
    """Return the iterator of a value that these lanes alone have."""
    with interface.run_active_set(world):
        return iter(iterable)


def _step_together(parts: Parts, unchanged: _Unchanged | None = None) -> Callable[[], tuple]:
    """Return a stepper that takes one item from each part's iterator at a time."""

    def step() -> tuple:
        nonlocal parts
        if unchanged is not None:
            unchanged.check()
        on, out = [], []
        for world, iterator in restrict_parts(parts, interface.get_active_set()):
            with interface.run_active_set(world):
                item = next(iterator, END)
            if item is END:
                out.append(world)
            else:
                on.append((world, item, iterator))
        parts = [(w, iterator) for w, _, iterator in on]
        worlds = unite_sets([w for w, _ in parts])
        answer = (worlds, unite_sets(out)) if on and out else bool(on)
        return answer, lambda: merge([(w, item) for w, item, _ in on])

    return step
