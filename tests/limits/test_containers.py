"""Containers of the user's classes, whose methods nobody but the function calls."""

from collections import Counter, OrderedDict, defaultdict, deque
from types import SimpleNamespace

import pytest
import torch

import forall
from by_groups import EXPECTED
from forall import grad, jit, vmap
from oracle import same

IN_C = [dict, OrderedDict, Counter, defaultdict, list, tuple, deque, set, frozenset, bytearray]
METHODS = [
    "__len__",
    "__iter__",
    "__eq__",
    "values",
    "keys",
    "items",
    "copy",
    "clear",
    "extend",
    "get",
]


def heard(kind, asked):
    """A class of containers that notes each question."""

    def noting(name):
        def method(self, *args):
            asked.append(name)
            return getattr(kind, name)(self, *args)

        return method

    own = {name: noting(name) for name in METHODS if hasattr(kind, name)}
    return type("Own", (kind,), {**own, "__hash__": None})


@pytest.mark.parametrize("kind", IN_C, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize("transform", [vmap, grad, jit])
def test_only_the_function_asks_containers_of_its_own_class(kind, replay, transform, monkeypatch):
    monkeypatch.setattr(forall.config, "replay", replay)
    monkeypatch.setattr(forall.config, "patience", 0)
    asked = []
    held = SimpleNamespace(entries=heard(kind, asked)())
    held.inner = [held.entries]

    def f(x):
        return torch.where(x > 0, x, 2 * x) if held.entries is None else x * len(held.inner)

    made = transform(f)
    for _ in range(6):
        made(torch.tensor(2.0) if transform is grad else torch.ones(3))
    assert not asked


class Angry:
    """Who raises whatever is asked."""

    def _raise(self, *_):
        raise NotImplementedError

    __len__ = __iter__ = __bool__ = __eq__ = copy = clear = extend = update = _raise
    __hash__ = None  # pyright: ignore[reportAssignmentType]


class AngryList(Angry, list):
    """A list of a class that gives nothing."""


class AngryDict(Angry, OrderedDict):
    """A dict with an order of its own, of a class that gives nothing."""


@EXPECTED
def test_containers_that_give_nothing_are_as_they_were_when_examples_part():
    noted, order = AngryList(), AngryDict(a=1, b=2)

    def f(x):
        noted.append(1)
        order.move_to_end("a")
        if x > 0:
            return 2 * x
        noted.append(2)
        order.move_to_end("b")
        return 3 * x

    assert same(vmap(f)(torch.tensor([1.0, -1.0, 2.0])), torch.tensor([2.0, -3.0, 4.0]))
    assert list.__repr__(noted) == "[1, 1, 2]"  # once for those that went the same way
    assert [*order.items()] == [("a", 1), ("b", 2)]
