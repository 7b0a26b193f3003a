"""What a program stands on: each change of it is seen, and nothing else is."""

from __future__ import annotations

import dataclasses
import operator
from collections import OrderedDict
from types import FunctionType

import numpy as np
import pytest
import torch
from torch.utils._pytree import _deregister_pytree_node, register_pytree_node, tree_map

from forall import jit, vmap
from forall._jit.guards.build import TOO_MUCH, Guards

X = torch.arange(6.0).view(2, 3)


class Slots:
    __slots__ = ("left", "right")

    def __init__(self):
        self.left = 1


class Thing:
    def __init__(self):
        self.a, self.b = 1, [2]
        self.slots = Slots()
        self.table = {"k": 1.0}
        self.order = OrderedDict(k=1)
        self.names = {"n"}
        self.data = bytearray(b"12")

    def call(self, x):
        return x * self.a

    def other(self, x, scale=2, *, shift=1):
        held = [self.b, self.slots.left, self.slots.right, self.table, self.order, self.names]
        return x * scale + shift if held or self.data or hasattr(self, "c") else x


def held():
    thing = Thing()
    return thing, Guards(lambda x: thing.call(thing.other(x)))


def renamed():
    def call(self, x):
        return x * self.a

    return call


CHANGES = {
    "an attribute": lambda t: setattr(t, "a", 2),
    "an equal one that is another": lambda t: setattr(t, "a", True),
    "a new attribute": lambda t: setattr(t, "c", 1),
    "one less": lambda t: delattr(t, "b"),
    "all attributes": lambda t: setattr(t, "__dict__", dict(vars(t))),
    "the class": lambda t: setattr(t, "__class__", type("Other", (Thing,), {})),
    "a list": lambda t: t.b.append(1),
    "a list's entry": lambda t: t.b.__setitem__(0, 2.0),
    "a dict's entry": lambda t: t.table.__setitem__("k", -1.0),
    "an ordered dict": lambda t: t.order.__setitem__("j", 1),
    "a set": lambda t: t.names.add("m"),
    "bytes": lambda t: t.data.__setitem__(0, 0),
    "a slot": lambda t: setattr(t.slots, "left", 2),
    "a slot that was empty": lambda t: setattr(t.slots, "right", 2),
    "a slot that is empty now": lambda t: delattr(t.slots, "left"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen(name):
    thing, guards = held()
    assert guards.hold()
    assert guards.hold()
    CHANGES[name](thing)
    assert not guards.hold()
    assert not guards.hold()


@pytest.mark.parametrize("name", ["__code__", "__defaults__", "__kwdefaults__", "__dict__"])
def test_a_changed_function_is_seen(name):
    _, guards = held()
    method = Thing.other
    before = getattr(method, name)
    others = {
        "__code__": renamed().__code__,
        "__defaults__": (2.0,),
        "__kwdefaults__": {"shift": 1},
        "__dict__": {},
    }
    assert guards.hold()
    try:
        setattr(method, name, others[name])
        assert not guards.hold()
    finally:
        setattr(method, name, before)
    assert guards.hold()


def test_a_changed_class_is_seen():
    _, guards = held()
    before = Thing.call
    assert guards.hold()
    try:
        Thing.call = renamed()
        assert not guards.hold()
    finally:
        Thing.call = before
    assert guards.hold()


def test_a_cell_is_seen():
    value = 1

    def f(x):
        return x * value

    guards = Guards(f)
    assert guards.hold()
    value = 2
    assert not guards.hold()
    value = 1
    assert guards.hold()


def test_a_cell_is_seen_to_be_emptied():
    value = 1

    def f(x):
        return x * value  # noqa: F821 - deleted below

    guards = Guards(f)
    assert guards.hold()
    del value
    assert not guards.hold()


def test_an_empty_cell_is_seen_to_be_filled():
    def f(x):
        return x * later

    guards = Guards(f)
    assert guards.hold()
    later = 1
    assert not guards.hold()


SCALE = 2


def scaled(x):
    return x * SCALE


class Model:
    """With methods that depend on a global each."""

    def call(self, x):
        return x

    def by_scale(self, x):
        return x * SCALE

    @property
    def scale(self):
        return SCALE


class Late(Model):
    pass


model, late = Model(), Late()
ASK = getattr
FOUND = {
    "by name": lambda x: model.by_scale(x),
    "of a base": lambda x: late.by_scale(x),
    "inside another function": lambda x: [model.by_scale(y) for y in x],
    "a property": lambda x: x * model.scale,
    "by getattr": lambda x: getattr(model, "by_" + "scale")(x),
    "by getattr under another name": lambda x: ASK(model, "by_" + "scale")(x),
    "by a name in a pattern": lambda x: matching(x),
    "by __dict__": lambda x: Model.__dict__["by_" + "scale"](model, x),
    "by operator": lambda x: operator.methodcaller("by_" + "scale", x)(model),
    "by a library": lambda x: np.vectorize(lambda m: m)([]) if x is None else x,
    # Who evaluates a text may ask for all that its module has: here that is little.
    "by eval": FunctionType(
        (lambda x: eval("model.by_" + "scale")(x)).__code__,  # noqa: S307
        {"model": model},
    ),
}


class Point:
    __match_args__ = ("first",)
    shift = 1.0

    def __init__(self):
        self.first = Held(1)
        self.second = Held(2)
        self.log = [0]

    def __eq__(self, other):
        return self.second.value == other.second.value

    def __hash__(self):
        return 0

    @classmethod
    def made(cls):
        return cls()

    def clone(self):
        return type(self)()

    def scaled(self, x):
        return x * self.first.value + self.shift

    def count(self):
        self.second.value += 1


class Held:
    def __init__(self, value):
        self.value = value


point = Point()
ASKED = {  # always: what == compares, and what a pattern may match
    "by name": (lambda x: point.scaled(x), "shift"),
    "by a method's name": (lambda x: point.count(), ""),
    "where it is made": (lambda x: Point(), "log"),
    "where it is made by its class": (lambda x: Point.made(), "log"),
    "where it is made by another": (lambda x: point.clone(), "log"),
    "where it is asked whether it is there": (lambda x: hasattr(point, "none"), "none"),
    "where nobody can tell": (lambda x: vars(point), "log none shift"),
    "by getattr": (lambda x: getattr(point, str(x)), "log none shift"),
    "by getattr and a text": (lambda x: getattr(point, "none", None), "none"),
    "by its fields": (lambda x: dataclasses.asdict(point), "log none shift"),
    "not at all": (lambda x: point, ""),
}


@pytest.mark.parametrize("name", ASKED)
def test_attributes_that_are_asked_for_are_watched(name, monkeypatch):
    f, asked = ASKED[name]
    guards = Guards(f, [point])
    for attribute in ("first", "second", "log", "none", "shift"):
        with monkeypatch.context() as patched:
            patched.setattr(point, attribute, Held(3), raising=False)
            always = attribute in ("first", "second")
            assert guards.hold() is not (always or attribute in asked.split())
        assert guards.hold()


def test_attributes_that_somebody_takes_apart_are_watched(monkeypatch):
    class Node:
        def __init__(self):
            self.value = 1.0

    torch.utils._pytree.register_pytree_node(
        Node, lambda n: ([n.value], None), lambda children, _: children[0]
    )
    node = Node()
    guards = Guards(lambda x: vmap(lambda y, n: y)(x, node))
    assert guards.hold()
    node.value = 2.0
    assert not guards.hold()


def test_what_an_attribute_leads_to_is_watched_where_it_is_asked_for():
    guards = Guards(lambda x: point.scaled(x))
    point.log.append(1)
    assert guards.hold()
    point.first.value = 5
    assert not guards.hold()
    point.first.value = 1
    assert guards.hold()


def matching(x):
    match model:
        case Model(scale=s):
            return x * s


@pytest.mark.parametrize("name", FOUND)
def test_what_a_method_reaches_is_seen(name, monkeypatch):
    guards = Guards(FOUND[name], [model])
    assert guards.hold()
    monkeypatch.setitem(globals(), "SCALE", 3)
    assert not guards.hold()


def test_what_a_method_reaches_that_nothing_calls_is_not_asked(monkeypatch):
    guards = Guards(lambda x: model.call(x))
    monkeypatch.setitem(globals(), "SCALE", 3)
    assert guards.hold()
    monkeypatch.setattr(Model, "by_scale", scaled)
    assert not guards.hold()  # the class is another


def test_a_global_is_seen_among_others_that_change(monkeypatch):
    guards = Guards(scaled)
    for i in range(3):
        monkeypatch.setitem(globals(), "NOISE", i)
        assert guards.hold()
    with monkeypatch.context() as patched:
        patched.setitem(globals(), "SCALE", 3)
        assert not guards.hold()
        patched.setitem(globals(), "NOISE", 4)
        assert not guards.hold()
    assert guards.hold()


def test_what_is_put_back_holds_again():
    thing, guards = held()
    one = thing.a
    thing.a = 2
    assert not guards.hold()
    thing.a = one
    assert guards.hold()


LAYOUTS = {
    "shape": lambda: torch.ones(1, 3),
    "strides": lambda: torch.ones(3, 2).t(),
    "dtype": lambda: torch.ones(2, 3, dtype=torch.float64),
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_captured_tensor_that_is_another_is_recorded_anew(name, calls, grad):
    w = torch.ones(2, 3)

    def f(x):
        return (w * 2 + torch.ones_like(w).cumsum(0) * x.sum()).sum()

    g = jit(f)
    with torch.set_grad_enabled(grad):
        for _ in range(calls):
            torch.testing.assert_close(g(X), f(X))
        w.data = LAYOUTS[name]()
        for _ in range(2):
            found, wanted = g(X), f(X)
            torch.testing.assert_close(found, wanted)


def test_a_captured_tensor_that_requires_grad_is_recorded_anew():
    w = torch.ones(2, 3)
    g = jit(lambda x: (w * x).sum())
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            for requires in (False, True, False, True):
                w.requires_grad_(requires)
                assert g(X).requires_grad == (requires and grad)


def test_many_things_are_held():
    things = [Thing() for _ in range(700)]
    guards = Guards(lambda x: things[0].other(x))
    assert guards.why is None
    assert guards.hold()
    things[-1].slots.left = 2
    assert not guards.hold()


class Many:
    """One of a library's collections: what takes it apart leads to all of that library."""


LIBRARY = {i: [i] for i in range(20_000)}


@pytest.fixture
def registered():
    node = (lambda m: ([len(LIBRARY)], None), lambda c, _: Many())
    register_pytree_node(Many, *node, serialized_type_name="tests.Many")
    yield
    _deregister_pytree_node(Many)


@pytest.mark.usefixtures("registered")
def test_of_what_is_registered_only_classes_that_are_reached_are_watched():
    table = Many()
    without = Guards(lambda x: tree_map(torch.sin, {"a": x}))
    assert without.why is None
    assert without.hold()
    assert Guards(lambda x: tree_map(torch.sin, {"a": x, "b": table})).why == TOO_MUCH
