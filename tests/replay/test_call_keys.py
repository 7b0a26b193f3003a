"""What a recorded call compares of its arguments: from both sides, what changes it and what not."""

from __future__ import annotations

import array
import datetime as dt
import decimal
import enum
import fractions
import functools
import io
import itertools
import math
import operator
import os
import types
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from forall import grad, jacrev, jit, vmap

X = torch.arange(1.0, 4.0)
T = torch.ones(3)
ONCE = [1.0]
NAN, OTHER_NAN = float("nan"), float("inf") - float("inf")
WHOLE = torch.arange(6.0)
HERE = WHOLE[:3]


class Plain:
    def __init__(self, scale: Any) -> None:
        self.scale = scale


class Loose(Plain):
    """Equal to all others."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Loose)

    def __hash__(self) -> int:
        return 0


class Node:
    """A registered container with a context."""

    def __init__(self, t: Any, kept: Any) -> None:
        self.t, self.kept = t, kept


class Silent:
    """A registered container that does not tell its class of all it has."""

    def __init__(self, t: Any) -> None:
        self.t, self.scale = t, 2.0


class Slotted:
    __slots__ = ("scale", "t")

    def __init__(self, t: Any) -> None:
        self.t, self.scale = t, 2.0


class OfClass:
    """A registered container, of whose class a function asks."""

    scale = 2.0

    def __init__(self, t: Any) -> None:
        self.t = t


class Named(NamedTuple):
    t: Any
    n: Any


class NamedOfClass(NamedTuple):
    t: Any

    def times(self) -> float:
        return NamedOfClass.factor

    factor = 2.0


class NamedMore(Named):  # with attributes
    pass


@dataclass
class Data:
    t: Any
    n: Any = 2.0
    kept: list = field(default_factory=list)


for kind in (Silent, Slotted, OfClass):
    pytree.register_pytree_node(kind, lambda s: ([s.t], None), lambda c, _, kind=kind: kind(*c))
pytree.register_pytree_node(Node, lambda n: ([n.t], n.kept), lambda c, kept: Node(*c, kept))
pytree.register_dataclass(Data, field_names=["t", "n", "kept"])


def made(of: Any, *args: Any, **attributes: Any) -> Any:
    """An object of a class, with these attributes besides."""
    thing = of(*args)
    for name, value in attributes.items():
        setattr(thing, name, value)
    return thing


class Level(int):
    pass


class Ratio(float):
    pass


class Mode(str):  # noqa: SLOT000 - with attributes
    pass


class Wrong(float):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = float.__hash__


class Wide(np.float64):
    pass


class Flag(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Text(enum.StrEnum):
    LOW = "low"
    HIGH = "high"


class Mark(enum.Enum):
    LOW = 1
    HIGH = 1.5


def tagged(value: Any) -> torch.Tensor:
    return made(torch.Tensor.clone, T, tag=value)


def of_value(x: Any) -> float:
    """Another number for each class and value."""
    sign = math.copysign(1.0, x) if isinstance(x, (int, float)) else 1.0
    names = ["bool", "int", "float", "str", "NoneType"]
    return sign * (1.0 + [*names, type(x).__name__].index(type(x).__name__))


def in_order(things: Any) -> float:
    return sum((i + 1.0) * float(v) for i, v in enumerate(things))


def set_to(thing: Any, name: str, value: Any) -> Any:
    setattr(thing, name, value)
    return thing


def put(things: Any, key: Any, value: Any) -> Any:
    things[key] = value
    return things


def of_the_class(value: float) -> OfClass:
    OfClass.scale = value
    return OfClass(T)


def of_the_named_class(value: float) -> NamedOfClass:
    NamedOfClass.factor = value
    return NamedOfClass(T)


def member(value: float) -> Flag:
    Flag.LOW.scale = value
    return Flag.LOW


KEPT, CONTEXT = Plain(2.0), [2.0]
THING, TIME = Plain(2.0), dt.UTC
ARRAY = np.ones(3)


def by_identity(a: Any, b: Any) -> float:
    return 2.0 if a is b else 3.0


# name: what is read of the arguments; the arguments of early calls; those of later ones.
CASES: dict[str, tuple[Any, Any, Any]] = {
    # numbers and texts that are equal
    "one and true": (of_value, lambda: [1], lambda: [True]),
    "one and a float": (of_value, lambda: [1], lambda: [1.0]),
    "true and a float": (of_value, lambda: [True], lambda: [1.0]),
    "zero and minus zero": (of_value, lambda: [0.0], lambda: [-0.0]),
    "complex zeros": (
        lambda c: math.copysign(1.0, c.imag),
        lambda: [complex(1, 0.0)],
        lambda: [complex(1, -0.0)],
    ),
    "zeros in a tuple": (lambda p: of_value(p[0]), lambda: [(0.0, 1)], lambda: [(-0.0, 1)]),
    "one in a list": (lambda p: of_value(p[0]), lambda: [[1]], lambda: [[True]]),
    "one in a dict": (lambda p: of_value(p["a"]), lambda: [{"a": 1}], lambda: [{"a": 1.0}]),
    "nan in a list": (
        lambda x: 2.0 if x in (NAN, 1.0) else 3.0,
        lambda: [NAN],
        lambda: [OTHER_NAN],
    ),
    "a number with an attribute": (
        lambda x: x.scale,
        lambda: [made(Level, 3, scale=2.0)],
        lambda: [made(Level, 3, scale=5.0)],
    ),
    "a float with an attribute": (
        lambda x: x.scale,
        lambda: [made(Ratio, 3.0, scale=2.0)],
        lambda: [made(Ratio, 3.0, scale=5.0)],
    ),
    "a text with an attribute": (
        lambda x: x.scale,
        lambda: [made(Mode, "a", scale=2.0)],
        lambda: [made(Mode, "a", scale=5.0)],
    ),
    "a number and one of a class": (of_value, lambda: [3], lambda: [Level(3)]),
    "numbers that are all equal": (
        lambda x: float.__add__(x, 0.0),
        lambda: [Wrong(2)],
        lambda: [Wrong(5)],
    ),
    "numpy's and Python's": (of_value, lambda: [2.0], lambda: [np.float64(2.0)]),
    "numpy's widths": (
        lambda x: float(x.itemsize),
        lambda: [np.float32(2.0)],
        lambda: [np.float64(2.0)],
    ),
    "numpy's numbers": (float, lambda: [np.int64(2)], lambda: [np.int64(3)]),
    "numpy's with an attribute": (
        lambda x: x.scale,
        lambda: [made(Wide, 3.0, scale=2.0)],
        lambda: [made(Wide, 3.0, scale=5.0)],
    ),
    "members of an enum of numbers": (
        lambda x: float(x.name == "LOW"),
        lambda: [Flag.LOW],
        lambda: [Flag.HIGH],
    ),
    "a member and its number": (of_value, lambda: [1], lambda: [Flag.LOW]),
    "members of an enum of texts": (
        lambda x: float(x is Text.LOW),
        lambda: [Text.LOW],
        lambda: [Text.HIGH],
    ),
    "a text and a member": (lambda x: float(x is Text.LOW), lambda: [Text.LOW], lambda: ["low"]),
    "members of an enum": (lambda x: x.value, lambda: [Mark.LOW], lambda: [Mark.HIGH]),
    "an attribute of a member": (lambda x: x.scale, lambda: [member(2.0)], lambda: [member(5.0)]),
    "decimals": (
        lambda d: 1.0 - d.as_tuple().exponent,
        lambda: [decimal.Decimal("1.0")],
        lambda: [decimal.Decimal("1.00")],
    ),
    "fractions and numbers": (
        lambda x: 2.0 if isinstance(x, fractions.Fraction) else 3.0,
        lambda: [fractions.Fraction(2)],
        lambda: [2],
    ),
    "times in two zones": (
        lambda t: 1.0 + t.hour,
        lambda: [dt.datetime(2020, 1, 1, 12, tzinfo=TIME)],
        lambda: [dt.datetime(2020, 1, 1, 13, tzinfo=dt.timezone(dt.timedelta(hours=1)))],
    ),
    "folds of a time": (
        lambda t: 1.0 + t.fold,
        lambda: [dt.datetime(2020, 1, 1, tzinfo=TIME)],
        lambda: [dt.datetime(2020, 1, 1, fold=1, tzinfo=TIME)],
    ),
    # containers of Python's own
    "keys that are equal": (
        lambda d: of_value(first_key(d)),
        lambda: [{1: 2.0}],
        lambda: [{True: 2.0}],
    ),
    "zeros as keys": (
        lambda d: of_value(first_key(d)),
        lambda: [{0.0: 2.0}],
        lambda: [{-0.0: 2.0}],
    ),
    "keys in tuples": (
        lambda d: of_value(first_key(d)[0]),
        lambda: [{(1, "a"): 2.0}],
        lambda: [{(True, "a"): 2.0}],
    ),
    "keys of a class": (
        lambda d: first_key(d).scale,
        lambda: [{Loose(2.0): 1.0}],
        lambda: [{Loose(5.0): 1.0}],
    ),
    "keys that change": (
        lambda d: first_key(d).scale,
        lambda: [{set_to(KEPT, "scale", 2.0): 1.0}],
        lambda: [{set_to(KEPT, "scale", 5.0): 1.0}],
    ),
    "keys with attributes": (
        lambda d: first_key(d).scale,
        lambda: [{made(Mode, "a", scale=2.0): 1.0}],
        lambda: [{made(Mode, "a", scale=5.0): 1.0}],
    ),
    "the order of a dict": (
        lambda d: in_order(d.values()),
        lambda: [{"a": 1.0, "b": 2.0}],
        lambda: [{"b": 2.0, "a": 1.0}],
    ),
    "the order of an ordered dict": (
        lambda d: in_order(d.values()),
        lambda: [OrderedDict(a=1.0, b=2.0)],
        lambda: [OrderedDict(b=2.0, a=1.0)],
    ),
    "dicts of two classes": (
        lambda d: 2.0 if isinstance(d, OrderedDict) else 3.0,
        lambda: [OrderedDict(a=1.0)],
        lambda: [{"a": 1.0}],
    ),
    "an attribute of an ordered dict": (
        lambda d: d.scale,
        lambda: [made(OrderedDict, [("a", 1.0)], scale=2.0)],
        lambda: [made(OrderedDict, [("a", 1.0)], scale=5.0)],
    ),
    "what an attribute of a dict holds": (
        lambda d: d.scale[0],
        lambda: [made(OrderedDict, [("a", 1.0)], scale=[2.0])],
        lambda: [made(OrderedDict, [("a", 1.0)], scale=[5.0])],
    ),
    "default factories": (
        lambda d: d.default_factory(5) + 1.0,
        lambda: [defaultdict(float, a=1.0)],
        lambda: [defaultdict(bool, a=1.0)],
    ),
    "default factories of one's own": (
        lambda d: d.default_factory(),
        lambda: [defaultdict(lambda: 2.0, a=1.0)],
        lambda: [defaultdict(lambda: 5.0, a=1.0)],
    ),
    "lengths of deques": (
        lambda d: float(d.maxlen or 7),
        lambda: [deque([1.0], maxlen=2)],
        lambda: [deque([1.0], maxlen=3)],
    ),
    "counters": (lambda c: float(c["a"]), lambda: [Counter("a")], lambda: [Counter("aa")]),
    "sets": (lambda s: of_value(first_key(s)), lambda: [{1}], lambda: [{True}]),
    "frozen sets": (
        lambda s: of_value(first_key(s)),
        lambda: [frozenset([1])],
        lambda: [frozenset([1.0])],
    ),
    "sizes and tuples": (
        lambda s: 2.0 if isinstance(s, torch.Size) else 3.0,
        lambda: [torch.Size([2, 3])],
        lambda: [(2, 3)],
    ),
    "sizes": (lambda s: float(s[0]), lambda: [torch.Size([2, 3])], lambda: [torch.Size([4, 3])]),
    "slices": (lambda s: s.start, lambda: [slice(2.0, None)], lambda: [slice(5.0, None)]),
    "what slices hold": (
        lambda s: s.start[0],
        lambda: [slice(put(CONTEXT, 0, 2.0), None)],
        lambda: [slice(put(CONTEXT, 0, 5.0), None)],
    ),
    "ranges": (lambda r: float(r.stop), lambda: [range(0, 3, 2)], lambda: [range(0, 4, 2)]),
    "ellipsis": (lambda e: 2.0 if e is ... else 3.0, lambda: [...], lambda: [None]),
    "dtypes": (lambda d: float(d.itemsize), lambda: [torch.float32], lambda: [torch.float64]),
    "devices": (
        lambda d: 1.0 + (d.index or 0),
        lambda: [torch.device("cpu")],
        lambda: [torch.device("meta", 1)],
    ),
    "classes": (lambda k: float(k("2")), lambda: [float], lambda: [bool]),
    "bytes": (lambda b: float(b[0]), lambda: [b"a"], lambda: [b"b"]),
    "byte arrays": (
        lambda b: float(b[0]),
        lambda: [put(BYTES, 0, 2)],
        lambda: [put(BYTES, 0, 5)],
    ),
    "views of memory": (
        lambda b: float(b[0]),
        lambda: [memoryview(put(BYTES, 0, 2))],
        lambda: [memoryview(put(BYTES, 0, 5))],
    ),
    "arrays of Python's": (
        lambda a: a[0],
        lambda: [put(ARRAY_OF_PYTHON, 0, 2.0)],
        lambda: [put(ARRAY_OF_PYTHON, 0, 5.0)],
    ),
    "arrays": (lambda a: float(a[0]), lambda: [put(ARRAY, 0, 2.0)], lambda: [put(ARRAY, 0, 5.0)]),
    "arrays with a mask": (
        lambda a: float(a.sum()),
        lambda: [set_to(MASKED, "mask", [False, False])],
        lambda: [set_to(MASKED, "mask", [True, False])],
    ),
    # what is told by its identity
    "objects": (lambda o: o.scale, lambda: [Plain(2.0)], lambda: [Plain(5.0)]),
    "objects that change": (
        lambda o: o.scale,
        lambda: [set_to(THING, "scale", 2.0)],
        lambda: [set_to(THING, "scale", 5.0)],
    ),
    "objects that are all equal": (lambda o: o.scale, lambda: [Loose(2.0)], lambda: [Loose(5.0)]),
    "namespaces": (
        lambda o: o.scale,
        lambda: [types.SimpleNamespace(scale=2.0)],
        lambda: [types.SimpleNamespace(scale=5.0)],
    ),
    "functions": (lambda f: f(), lambda: [lambda: 2.0], lambda: [lambda: 5.0]),
    "closures": (lambda f: f(), lambda: [returning(2.0)], lambda: [returning(5.0)]),
    "partial functions": (
        lambda f: f(),
        lambda: [functools.partial(operator.add, 1.0, 1.0)],
        lambda: [functools.partial(operator.add, 1.0, 4.0)],
    ),
    "methods": (lambda f: f(), lambda: [Counting(2.0).get], lambda: [Counting(5.0).get]),
    "methods of objects that stay": (lambda f: f(), lambda: [TWO.get], lambda: [FIVE.get]),
    "two methods of an object": (lambda f: f(), lambda: [TWO.get], lambda: [TWO.half]),
    "methods of tensors": (lambda f: f(), lambda: [T.sum], lambda: [(2 * T).sum]),
    "modules": (
        lambda m: float(m.scale),
        lambda: [made(torch.nn.Module, scale=2.0)],
        lambda: [made(torch.nn.Module, scale=5.0)],
    ),
    "iterators": (lambda i: 1.0 + next(i), lambda: [iter([1.0] * 3)], lambda: [iter([4.0] * 3)]),
    "generators": (
        lambda i: 1.0 + next(i),
        lambda: [(k for k in [1.0] * 3)],
        lambda: [(k for k in [4.0] * 3)],
    ),
    "iterators of deques": (
        lambda i: 1.0 + next(i),
        lambda: [iter(deque([1.0] * 3))],
        lambda: [iter(deque([4.0] * 3))],
    ),
    "buffers": (
        lambda b: float(b.getvalue()),
        lambda: [written(2)],
        lambda: [written(5)],
    ),
    "exceptions": (lambda e: e.args[0], lambda: [ValueError(2.0)], lambda: [ValueError(5.0)]),
    # containers of a registered class
    "contexts": (lambda n: n.kept, lambda: [Node(T, 2.0)], lambda: [Node(T, 5.0)]),
    "contexts that are equal": (
        lambda n: of_value(n.kept),
        lambda: [Node(T, 1)],
        lambda: [Node(T, True)],
    ),
    "zeros in a context": (
        lambda n: of_value(n.kept[0]),
        lambda: [Node(T, (0.0,))],
        lambda: [Node(T, (-0.0,))],
    ),
    "contexts of a class": (
        lambda n: n.kept.scale,
        lambda: [Node(T, Loose(2.0))],
        lambda: [Node(T, Loose(5.0))],
    ),
    "contexts that change": (
        lambda n: n.kept.scale,
        lambda: [Node(T, set_to(KEPT, "scale", 2.0))],
        lambda: [Node(T, set_to(KEPT, "scale", 5.0))],
    ),
    "lists in a context": (lambda n: n.kept[0], lambda: [Node(T, [2.0])], lambda: [Node(T, [5.0])]),
    "lists in a context that change": (
        lambda n: n.kept[0],
        lambda: [Node(T, put(CONTEXT, 0, 2.0))],
        lambda: [Node(T, put(CONTEXT, 0, 5.0))],
    ),
    "dicts in a context": (
        lambda n: n.kept["a"].scale,
        lambda: [Node(T, {"a": set_to(KEPT, "scale", 2.0)})],
        lambda: [Node(T, {"a": set_to(KEPT, "scale", 5.0)})],
    ),
    "functions in a context": (
        lambda n: n.kept(),
        lambda: [Node(T, returning(2.0))],
        lambda: [Node(T, returning(5.0))],
    ),
    "arrays in a context": (
        lambda n: float(n.kept[0]),
        lambda: [Node(T, put(ARRAY, 0, 2.0))],
        lambda: [Node(T, put(ARRAY, 0, 5.0))],
    ),
    "tensors in a context": (
        lambda n: n.kept,
        lambda: [Node(T, torch.tensor(2.0))],
        lambda: [Node(T, torch.tensor(5.0))],
    ),
    "contexts inside lists": (
        lambda n: n[0]["a"].kept.scale,
        lambda: [[{"a": Node(T, set_to(KEPT, "scale", 2.0))}]],
        lambda: [[{"a": Node(T, set_to(KEPT, "scale", 5.0))}]],
    ),
    "attributes beside the children": (
        lambda n: n.scale,
        lambda: [made(Silent, T)],
        lambda: [made(Silent, T, scale=5.0)],
    ),
    "objects beside the children": (
        lambda n: n.scale.scale,
        lambda: [made(Silent, T, scale=set_to(KEPT, "scale", 2.0))],
        lambda: [made(Silent, T, scale=set_to(KEPT, "scale", 5.0))],
    ),
    "slots beside the children": (
        lambda n: n.scale,
        lambda: [made(Slotted, T)],
        lambda: [made(Slotted, T, scale=5.0)],
    ),
    "attributes of the class": (
        lambda n: n.scale,
        lambda: [of_the_class(2.0)],
        lambda: [of_the_class(5.0)],
    ),
    "dataclasses": (lambda d: float(d.n), lambda: [Data(T)], lambda: [Data(T, 5.0)]),
    "numbers in a dataclass": (
        lambda d: of_value(d.n),
        lambda: [Data(T, 1)],
        lambda: [Data(T, True)],
    ),
    "attributes of a dataclass": (
        lambda d: d.more,
        lambda: [made(Data, T, more=2.0)],
        lambda: [made(Data, T, more=5.0)],
    ),
    "named tuples": (lambda d: of_value(d.n), lambda: [Named(T, 1)], lambda: [Named(T, 1.0)]),
    "named tuples of two classes": (
        lambda d: 2.0 if isinstance(d, Named) else 3.0,
        lambda: [Named(T, 1)],
        lambda: [NamedMore(T, 1)],
    ),
    "attributes of a named tuple": (
        lambda d: d.scale,
        lambda: [made(NamedMore, T, 1, scale=2.0)],
        lambda: [made(NamedMore, T, 1, scale=5.0)],
    ),
    "attributes of a named tuple's class": (
        lambda d: d.times(),
        lambda: [of_the_named_class(2.0)],
        lambda: [of_the_named_class(5.0)],
    ),
    # attributes of tensors
    "numbers on a tensor": (lambda t: t.tag, lambda: [tagged(2.0)], lambda: [tagged(5.0)]),
    "equal numbers on a tensor": (
        lambda t: of_value(t.tag),
        lambda: [tagged(1)],
        lambda: [tagged(True)],
    ),
    "texts on a tensor": (
        lambda t: t.tag.scale,
        lambda: [tagged(made(Mode, "a", scale=2.0))],
        lambda: [tagged(made(Mode, "a", scale=5.0))],
    ),
    "objects on a tensor": (
        lambda t: t.tag.scale,
        lambda: [tagged(set_to(KEPT, "scale", 2.0))],
        lambda: [tagged(set_to(KEPT, "scale", 5.0))],
    ),
    "lists on a tensor": (lambda t: t.tag[0], lambda: [tagged([2.0])], lambda: [tagged([5.0])]),
    "no attribute": (
        lambda t: 2.0 if hasattr(t, "tag") else 3.0,
        lambda: [tagged(1)],
        lambda: [T.clone()],
    ),
    # who is whom
    "two tensors": (by_identity, lambda: [T, T], lambda: [T, T.clone()]),
    "a tensor and its view": (by_identity, lambda: [T, T], lambda: [T, T.view(3)]),
    "a view and a tensor": (by_identity, lambda: [T, T.view(3)], lambda: [T, T]),
    "two lists": (by_identity, lambda: [ONCE, ONCE], lambda: [ONCE, [1.0]]),
    "two dicts": (by_identity, lambda: twice({"a": 1.0}), lambda: [{"a": 1.0}, {"a": 1.0}]),
    "two tuples": (by_identity, lambda: twice((T, 1)), lambda: [(T, 1), (T, 1)]),
    "two objects": (by_identity, lambda: twice(Plain(1)), lambda: [THING, Plain(1)]),
    "two sets": (by_identity, lambda: twice({1}), lambda: [{1}, {1}]),
    "two contexts": (
        lambda a, b: by_identity(a.kept, b.kept),
        lambda: [Node(T, ONCE), Node(T, ONCE)],
        lambda: [Node(T, ONCE), Node(T, [1.0])],
    ),
    "two nodes": (by_identity, lambda: twice(Node(T, 1)), lambda: [Node(T, 1), Node(T, 1)]),
    "lists inside a list": (lambda p: by_identity(*p), lambda: [twice([T])], lambda: [[[T], [T]]]),
    "a list and a captured one": (lambda a: by_identity(a, ONCE), lambda: [ONCE], lambda: [[1.0]]),
    "another list and a captured one": (
        lambda a: by_identity(a, ONCE),
        lambda: [[1.0]],
        lambda: [ONCE],
    ),
    "a tensor and a captured one": (lambda a: by_identity(a, T), lambda: [T], lambda: [T.clone()]),
    "a view and a captured one": (lambda a: by_identity(a, T), lambda: [T.view(3)], lambda: [T]),
    "another tensor and a captured one": (
        lambda a: by_identity(a, T),
        lambda: [T.clone()],
        lambda: [T],
    ),
    "an object and a captured one": (
        lambda a: by_identity(a, THING),
        lambda: [THING],
        lambda: [Plain(1)],
    ),
    "a nested list and a captured one": (
        lambda a: by_identity(a["a"][0], ONCE),
        lambda: [{"a": [[1.0]]}],
        lambda: [{"a": [ONCE]}],
    ),
    "a list and one of an object": (
        lambda o, a: by_identity(o.scale, a),
        lambda: [set_to(HOLDER, "scale", ONCE), ONCE],
        lambda: [HOLDER, [1.0]],
    ),
    "a default": (lambda a, b=ONCE: by_identity(a, b), lambda: [[1.0]], lambda: [ONCE]),
    "a named tuple and a captured one": (
        lambda a: by_identity(a, PAIR),
        lambda: [Named(T, 1)],
        lambda: [PAIR],
    ),
}
PAIR, HOLDER = Named(T, 1), Plain(ONCE)
BYTES, ARRAY_OF_PYTHON = bytearray(b"ab"), array.array("d", [1.0, 2.0])
MASKED = np.ma.array([2.0, 3.0], mask=[False, False])


class Counting:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def get(self) -> float:
        return self.scale

    def half(self) -> float:
        return self.scale / 2


TWO, FIVE = Counting(2.0), Counting(5.0)
GET = TWO.get


def written(n: int) -> io.StringIO:
    BUFFER.seek(0)
    BUFFER.write(str(n))
    return BUFFER


BUFFER = io.StringIO()


def first_key(things: Any) -> Any:
    return next(iter(things))


def returning(value: Any) -> Any:
    return lambda: value


def twice(x: Any) -> list:
    return [x, x]


def slope(f: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    x = X.clone().requires_grad_()
    return torch.autograd.grad(f(x, *args, **kwargs), x)[0]


# How a function is transformed, given how many arguments it has; and what that is to give.
WAYS: dict[str, tuple[Any, Any]] = {
    "grad": (lambda f, n: grad(f), lambda f, *a, **k: slope(f, *a, **k)),
    "jacrev": (lambda f, n: jacrev(f), lambda f, *a, **k: slope(f, *a, **k)),
    "vmap": (
        lambda f, n: vmap(f, in_dims=(0, *[None] * n)),
        lambda f, *a, **k: torch.stack([f(x, *a, **k) for x in X]),
    ),
    "jit": (lambda f, n: jit(f), lambda f, *a, **k: f(X, *a, **k)),
    "jit of grad": (lambda f, n: jit(grad(f)), lambda f, *a, **k: slope(f, *a, **k)),
}


def by_place(args: list) -> tuple[list, dict]:
    return args, {}


def by_name(args: list) -> tuple[list, dict]:
    return [], {f"p{i}": a for i, a in enumerate(args)}


def inside_a_list(args: list) -> tuple[list, dict]:
    return [[*args]], {}


def sampled(ways: list[tuple]) -> list[tuple]:
    """Each case in two of these ways, or in all where somebody asks for that."""
    if os.environ.get("FORALL_ALL_WAYS"):
        return [(case, *way) for case in CASES for way in ways]
    n = len(ways)
    return [(case, *ways[i % n]) for j, case in enumerate(CASES) for i in (2 * j, 2 * j + 1)]


@pytest.mark.filterwarnings("ignore:.*not recorded.*:forall.PerformanceWarning")
@pytest.mark.parametrize(
    ("case", "way", "given"),
    sampled([*((way, by_place) for way in WAYS), ("grad", by_name), ("jit", inside_a_list)]),
)
def test_arguments_that_a_function_tells_apart_are_two_kinds(case, way, given, at_once):
    read, early, late = CASES[case]
    transform, truth = WAYS[way]

    def f(x, *args, **kwargs):
        args = args[0] if given is inside_a_list else args
        return (x * read(*args, *kwargs.values())).sum()

    args, _ = given(early())
    g = transform(f, len(args))
    for make in [early] * 5 + [late] * 2 + [early, late]:
        args, kwargs = given(make())
        want = truth(f, *args, **kwargs)
        args, kwargs = given(make())  # an iterator can be asked once
        assert g(X, *args, **kwargs).equal(want)


METHODS = {
    "a method that is kept": (
        lambda f: 2.0 if f is GET else 3.0,
        lambda: [TWO.get],
        lambda: [GET],
    ),
    "a method twice": (
        lambda f, g: 2.0 if f is g else 3.0,
        lambda: [TWO.get, TWO.get],
        lambda: twice(TWO.get),
    ),
    "a method that is bound to a class": (
        lambda f: f().scale,
        lambda: [types.MethodType(Counting, 2.0)],
        lambda: [types.MethodType(Counting, 3.0)],
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", METHODS)
def test_methods_that_a_function_tells_apart_are_two_kinds(case, way, at_once):
    read, early, late = METHODS[case]
    transform, truth = WAYS[way]

    def f(x, *args):
        return (x * read(*args)).sum()

    g = transform(f, len(early()))
    for make in [early] * 5 + [late] * 3 + [early, late]:
        args = make()
        assert g(X, *args).equal(truth(f, *args))


def in_a_closure(read, args):
    return lambda x: (x * read(*args)).sum()


def in_cells(read, args):
    a, b = (*args, None)[:2]
    if len(args) == 1:
        return lambda x: (x * read(a)).sum()
    return lambda x: (x * read(a, b)).sum()


def in_defaults(read, args):
    def f(x, given=args):
        return (x * read(*given)).sum()

    return f


def in_a_partial(read, args):
    def f(*args):
        *args, x = args
        return (x * read(*args)).sum()

    return functools.partial(f, *args)


def in_an_object(read, args):
    class Model:
        def __init__(self):
            self.args = args

        def loss(self, x):
            return (x * read(*self.args)).sum()

    return Model().loss


def in_a_module(read, args):
    class Model(torch.nn.Module):
        args: Any

        def forward(self, x):
            return (x * read(*self.args)).sum()

    return made(Model, args=args)


OF_OBJECTS = (in_an_object, in_a_module)


@pytest.mark.parametrize(
    ("case", "hold"),
    sampled([(h,) for h in (in_a_closure, in_cells, in_defaults, in_a_partial, *OF_OBJECTS)]),
)
def test_what_functions_hold_that_are_made_anew_is_told_apart(case, hold, at_once):
    read, early, late = CASES[case]
    for make in [early] * 5 + [late] * 2 + [early, late]:
        want = slope(hold(read, make()))
        assert grad(hold(read, make()))(X).equal(want)


@pytest.mark.filterwarnings("ignore:.*not recorded.*:forall.PerformanceWarning")
@pytest.mark.parametrize("way", ["jit", "vmap"])
@pytest.mark.parametrize(
    "case",
    [
        "two lists",
        "two contexts",
        "a tensor and its view",
        "a view and a tensor",
        "attributes beside the children",
        "lists in a context",
        "a list and a captured one",
        "another tensor and a captured one",
    ],
)
def test_derivatives_of_a_replayed_call_tell_the_same_apart(case, way, at_once):
    read, early, late = CASES[case]

    def f(w, *args):
        return w**3 * read(*args)

    g = jit(f) if way == "jit" else vmap(f, in_dims=(0, *[None] * len(early())))
    for make in [early] * 9 + [late] * 9 + [early, late]:
        found = []
        for h in (f, g):
            args, w = make(), X.clone().requires_grad_()
            (first,) = torch.autograd.grad(h(w, *args).sum(), w, create_graph=True)
            if case == "lists in a context":
                args[0].kept[0] = 77.0  # theirs to change
            found.append((first, *torch.autograd.grad(first.sum(), w)))
        assert all(map(torch.allclose, *found))


def given_twice(needs: bool) -> list:
    x = X.clone().requires_grad_(needs)
    return [x, x]


GRADS = {
    "a leaf given twice": lambda: given_twice(True),
    "a tensor given twice": lambda: given_twice(False),
    "two leaves": lambda: [*given_twice(True)[:1], *given_twice(True)[:1]],
    "a leaf and its view": lambda: [x := X.clone().requires_grad_(), x.view(3)],
    "a leaf and what is made of it": lambda: [x := X.clone().requires_grad_(), x * 1],
    "a captured leaf": lambda: [LEAF, X],
    "what is made of a captured leaf": lambda: [LEAF * 1, X],
    "a captured leaf given twice": lambda: [LEAF, LEAF],
}
LEAF = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)


def by_who_is_who(w, p, q):
    return w**3 * p * q * (2.0 if p is q else 3.0) * (5.0 if p is LEAF else 7.0)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("one", "other", "way"),
    [(*pair, way) for way in ("jit", "vmap") for pair in itertools.permutations(GRADS, 2)][::2],
)
def test_derivatives_in_one_tensor_in_two_places(one, other, way, at_once):
    f = by_who_is_who
    g = jit(f) if way == "jit" else vmap(f, in_dims=(0, None, None))
    truth = f if way == "jit" else lambda w, *given: torch.stack([f(x, *given) for x in w])
    for make in [GRADS[one]] * 6 + [GRADS[other]] * 6 + [GRADS[one]]:
        given, w = make(), X.clone().requires_grad_()
        ends = [t for t in (w, *given) if t.requires_grad]
        how = {"allow_unused": True, "materialize_grads": True, "retain_graph": True}
        found = []
        for h in (truth, g):
            firsts = torch.autograd.grad(h(w, *given).sum(), ends, create_graph=True)
            seconds = torch.autograd.grad(firsts[0].sum(), ends, **how)
            found.append((*firsts, *seconds))
        assert all(map(torch.allclose, *found))


# What is made anew with each call, and is the same to a recorded one.
ALIKE: dict[str, Any] = {
    "numbers": lambda: [2, 2.0, True, 1j],
    "texts": lambda: [str(2.5), bytes([1, 2])],
    "torch's words": lambda: [torch.float32, torch.device("cpu"), torch.strided, torch.Size([2])],
    "numpy's numbers": lambda: [np.float64(2), np.float32(2), np.int64(2), np.bool_(True)],
    "lists": lambda: [[T.clone(), [1.0]], (2, (T.clone(),))],
    "dicts": lambda: [{"a": T.clone(), 1: {"b": 2.0}, (1, "c"): 3}],
    "ordered dicts": lambda: [OrderedDict(a=T.clone(), b=2.0)],
    "an ordered dict with an attribute": lambda: [made(OrderedDict, a=1, scale=[2.0])],
    "default dicts": lambda: [defaultdict(list, a=T.clone())],
    "deques": lambda: [deque([T.clone(), 1], maxlen=3)],
    "named tuples": lambda: [Named(T.clone(), 1), made(NamedMore, T.clone(), 1, scale=2.0)],
    "dataclasses": lambda: [Data(T.clone()), Data(T.clone(), 1, [2.0])],
    "nodes": lambda: [Node(T.clone(), None), Node(T.clone(), ("a", 1, [2.0], {"b": {3}}))],
    "attributes beside the children": lambda: [made(Silent, T.clone(), scale=(2.0, "a"))],
    "slots beside the children": lambda: [Slotted(T.clone())],
    "results of torch's": lambda: [torch.ones(2, 3).max(0)],
    "frozen sets": lambda: [frozenset([1])],
    "slices": lambda: [slice(1, None), range(3), ...],
    "words on a tensor": lambda: [tagged("a"), tagged((1, 2.0))],
    # told by their identity, and the same ones
    "an object": lambda: [THING],
    "an object in a context": lambda: [Node(T.clone(), KEPT)],
    "a member of an enum": lambda: [Mark.LOW, Flag.LOW, Text.LOW],
    "an array": lambda: [ARRAY],
    "a function": lambda: [by_identity],
    "a method": lambda: [TWO.get, FIVE.half],
    "nan": lambda: [NAN, [math.nan]],
    "who is whom": lambda: [T, T, *twice([1.0]), T.view(3)],
    "who is captured": lambda: [ONCE, T],
}


@pytest.mark.parametrize("way", ["grad", "vmap", "jit"])
@pytest.mark.parametrize("case", ALIKE)
def test_what_is_the_same_to_a_recorded_call_is_replayed(case, way, at_once, hits):
    make = ALIKE[case]
    transform, truth = WAYS[way]

    def f(x, *args):
        return (x * len(args) * (2.0 if args[0] is ONCE else T)).sum()

    g = transform(f, len(make()))
    for _ in range(8):
        args = make()
        assert g(X, *args).equal(truth(f, *args))
    assert len(hits) == 4 if way != "jit" else g.cache_info().hits == 7
