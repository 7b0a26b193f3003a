"""Items and attributes: ``x[k]``, ``x.a = v``, ``a, b = x``, ``for v in x`` in converted code."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

from forall._core.python_state import Remembered
from forall._divergence.heap import (
    Attribute,
    Unsplittable,
    active,
    slot_of,
)
from forall._divergence.join import Parts, merge, within
from forall._divergence.thread_state import each_world, thread
from forall._divergence.varying import Varying, resolved, worlds_of
from forall._divergence.vmap_interface import either, words

PLAIN_KEYS = frozenset({int, str, type(None), bool})
BUILTIN = frozenset({list, tuple, dict, str, range})
END = object()


def apiece(values: tuple, run: Callable[[], Any]) -> Any:
    """Run once for each world in which none of the values varies."""
    worlds = worlds_of(values)
    return each_world([(world, None) for world in worlds], lambda _: run())


def is_mixed(value: Any) -> bool:
    return bool(thread.mixed) and id(value) in thread.mixed


def note(owner: Any) -> None:
    """A container is about to change."""
    slot = slot_of(owner)
    if slot is not None:
        thread.note(slot)


# --- reading


def get(x: Any, key: Any) -> Any:
    """``x[key]``."""
    kind = type(x)
    if kind is Varying:
        return x.each(lambda v: get(v, key))
    if thread.loose and (type(key) is Varying or is_mixed(x)):
        return apiece((x, key), lambda: get(resolved(x), resolved(key)))
    if kind in BUILTIN:
        if type(key) in PLAIN_KEYS:
            return x[key]
        return _looked_up(x, key)
    if type(key) in PLAIN_KEYS:
        return x[key]
    own = getattr(kind, "__getitem__", None)
    if hasattr(own, "__code__") and not isinstance(x, words.Tensor):
        from forall._divergence.converted_call import call  # which looks up items

        return call(own, x, key)
    return words.apart(lambda: x[key], merge) if _may_part(key) else x[key]


def _looked_up(x: Any, key: Any) -> Any:
    """An item of Python's own container by a key that may differ between lanes."""
    if _may_part(key):
        return words.apart(lambda: x[_hard(key)], merge)
    return x[key]


def _may_part(key: Any) -> bool:
    """Whether a key may have another meaning for each lane: a mask, bounds of a slice, a number."""
    kind = type(key)
    if kind is slice:
        return any(_may_part(v) for v in (key.start, key.stop, key.step))
    if kind is tuple or kind is list:
        return any(_may_part(v) for v in key)
    return kind is words.Number or isinstance(key, words.Tensor)


def _hard(key: Any) -> Any:
    """The key as Python's number. Where lanes want different ones, they part."""
    return key.one() if type(key) is words.Number else key


def contains(item: Any, container: Any) -> Any:
    if thread.loose and (
        type(container) is Varying or type(item) is Varying or is_mixed(container)
    ):
        return apiece((item, container), lambda: contains(resolved(item), resolved(container)))
    if (
        isinstance(item, words.Tensor)
        or type(item) is words.Number
        or type(container) in (list, tuple)
    ):
        return words.apart(lambda: item in container, merge)
    return item in container


def unpacked(value: Any) -> Any:
    """What is assigned to several names: an iterable that every lane has."""
    if type(value) is Varying or is_mixed(value):
        items = apiece((value,), lambda: tuple(resolved(value)))
        if type(items) is Varying:
            raise Unsplittable("what is unpacked has another length for some examples")
        return items
    return value


starred = unpacked


# --- writing


def store(value: Any, x: Any, key: Any) -> None:
    """``x[key] = value``."""
    if thread.loose and (type(x) is Varying or type(key) is Varying or is_mixed(x)):
        apiece((x, key), lambda: store(value, resolved(x), resolved(key)))
        return
    if isinstance(x, words.Tensor):
        if thread.loose and type(value) is Varying:
            apiece((value,), lambda: store(resolved(value), x, key))
            return
        x[key] = value
        return
    own = getattr(type(x), "__setitem__", None)
    if hasattr(own, "__code__"):
        from forall._divergence.converted_call import call  # which stores items

        call(own, x, key, value)
    elif _may_part(key):
        changing((x,), lambda: operator.setitem(x, _hard(key), value))
    else:
        if thread.parted:
            note(x)
        x[key] = value


def delete(x: Any, key: Any) -> None:
    """``del x[key]``."""
    if thread.loose and (type(x) is Varying or type(key) is Varying or is_mixed(x)):
        apiece((x, key), lambda: delete(resolved(x), resolved(key)))
    elif _may_part(key):
        changing((x,), lambda: operator.delitem(x, _hard(key)))
    else:
        if thread.parted:
            note(x)
        del x[key]


def changing(owners: Any, run: Callable[[], Any], state: Remembered | None = None) -> Any:
    """Run what is not converted and may change these containers; lanes may part inside.

    Where some lanes alone run it, nothing else of ``state`` may have changed.
    """
    slots = [slot for slot in map(slot_of, owners) if slot is not None]
    if not slots and state is None:
        return words.apart(run, merge)
    t = thread
    if t.parted:
        for slot in slots:
            t.note(slot)
    before = [slot.get(t) for slot in slots]
    ran = False

    def again() -> Any:
        nonlocal ran
        for slot, content in zip(slots, before, strict=True) if ran else ():
            slot.put(t, content)
        check(ran)
        ran = True
        result = run()
        return result, [slot.get(t) for slot in slots]

    def check(alone: bool) -> None:
        if alone and state is not None and state.changed():
            raise Unsplittable("code that is not converted has changed what others see")

    def join(parts: Parts) -> Any:
        for n, slot in enumerate(slots):
            t.met(slot, [(w, written[n]) for w, (_, written) in parts])
        check(True)
        return merge([(w, result) for w, (result, _) in parts]), None

    result, _ = words.apart(again, join)
    check(t.parted > 0)
    return result


def store_attr(value: Any, x: Any, name: str) -> None:
    """``x.name = value``."""
    if type(x) is Varying:
        x.each(lambda v: store_attr(value, v, name))
        return
    kind = type(x)
    found = getattr(kind, name, None)
    setter = found.fset if type(found) is property else None
    own = getattr(kind, "__setattr__", None)
    if setter is not None or (hasattr(own, "__code__") and not hasattr(x, "_parameters")):
        from forall._divergence.converted_call import call  # which stores attributes

        call(setter, x, value) if setter is not None else call(own, x, name, value)
        return
    if thread.parted:
        thread.note(Attribute(x, name))
    setattr(x, name, value)


def delete_attr(x: Any, name: str) -> None:
    if type(x) is Varying:
        x.each(lambda v: delete_attr(v, name))
        return
    if thread.parted:
        thread.note(Attribute(x, name))
    delattr(x, name)


def updated(name: str, a: Any, b: Any) -> Any:
    """``a += b``, ..: the new value of a."""
    if thread.loose and (type(a) is Varying or type(b) is Varying or is_mixed(a) or is_mixed(b)):
        if is_mixed(a):
            apiece((a, b), lambda: getattr(operator, name)(a, resolved(b)))
            return a
        return apiece((a, b), lambda: updated(name, resolved(a), resolved(b)))
    return getattr(operator, name)(a, b)


# --- items one after another


def stepwise(iterable: Any) -> Callable[[], tuple] | None:
    """How to go through what has other items, or more of them, for some lanes; else None.

    Each call gives whether there is one more (or the two worlds), and a function for that item.
    """
    kind = type(iterable)
    if kind is Varying:
        value = merge(iterable.now())
        parts = [(words.now(), value)] if type(value) is not Varying else value.now()
        return _in_step([(w, _begun(w, v)) for w, v in parts], _Unchanged(iterable))
    if is_mixed(iterable):
        parts = active(thread.mixed[id(iterable)][1])
        return _in_step([(w, iter(list(content))) for w, content in parts], _Unchanged(iterable))
    return None


class _Unchanged:
    """Asks before each item of a copy whether what the copy was made of is as it was.

    Python goes through a container as it is by then, and not as it was when it began.
    """

    def __init__(self, made: Any) -> None:
        own = lists_in(made) if type(made) is Varying else [made]
        containers = [*thread.made_of.get(id(made), ())[1:], *own]
        self.before = [(c, _contents(c)) for c in containers]

    def check(self) -> None:
        """Raise `Unsplittable` where it is not."""
        for container, before in self.before:
            now = _contents(container)
            if len(now) != len(before) or not all(map(_are_same, now, before)):
                raise Unsplittable(_MEANWHILE)


def lists_in(value: Any) -> list[Any]:
    """Return the list or dict that a value is, or those that it is for some lanes each."""
    values = [v for _, v in value.parts] if type(value) is Varying else [value]
    return [v for v in values if type(v) in (list, dict)]


_MEANWHILE = "a list that changes while it is gone through, and is another for some examples"


def _contents(container: Any) -> list:
    """Return the items of a container, for each of the worlds that have other ones."""
    if is_mixed(container):
        return [[*content] for _, content in active(thread.mixed[id(container)][1])]
    return [[*container]]


def _are_same(now: list, before: list) -> bool:
    return len(now) == len(before) and all(map(operator.is_, now, before))


def watch(values: Any, *, backwards: bool = False) -> Any:
    """Return an iterator of a list, which gives the items that it has by then; else the value.

    While it is another list for some lanes, an iterator of Python's would see that of no lane.
    """
    return _iterate(values, backwards=backwards) if type(values) is list else values


def iterate_unchanged(values: list) -> Iterator[Any]:
    """Give the items of a copy, as long as what it was made of is as it was."""
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


def _begun(world: Any, iterable: Any) -> Any:
    """The iterator of a value that these lanes alone have."""
    with words.running(world):
        return iter(iterable)


def _in_step(parts: Parts, unchanged: _Unchanged | None = None) -> Callable[[], tuple]:
    """All parts' iterators, one item of each at a time."""

    def step() -> tuple:
        nonlocal parts
        if unchanged is not None:
            unchanged.check()
        on, out = [], []
        for world, iterator in within(parts, words.now()):
            with words.running(world):
                item = next(iterator, END)
            if item is END:
                out.append(world)
            else:
                on.append((world, item, iterator))
        parts = [(w, iterator) for w, _, iterator in on]
        worlds = either([w for w, _ in parts])
        answer = (worlds, either(out)) if on and out else bool(on)
        return answer, lambda: merge([(w, item) for w, item, _ in on])

    return step
