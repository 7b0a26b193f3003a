"""What a replayed call gives besides tensors: as new, or the same, as the call would give it."""

from __future__ import annotations

import enum
from collections import OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from forall import grad, jit, vmap

X = torch.arange(1.0, 4.0)


class Node:
    """A registered container with a context."""

    def __init__(self, t: Any, kept: Any) -> None:
        self.t, self.kept = t, kept


class Plain:
    def __init__(self, scale: Any) -> None:
        self.scale = scale


class Level(int):
    pass


class Mark(enum.Enum):
    LOW = 1


class Number(enum.IntEnum):
    LOW = 1


pytree.register_pytree_node(Node, lambda n: ([n.t], n.kept), lambda c, kept: Node(*c, kept))
KEPT, LIST, PAIRS = Plain(2.0), [2.0], {"a": [1.0]}


def more(node: Node) -> Node:
    node.more = 5
    return node


def tagged(t: torch.Tensor) -> torch.Tensor:
    t.tag = 5
    return t


def twice(things: Any) -> tuple:
    return things, things


def kept(node: Node) -> Any:
    return node.kept


def itself(things: Any) -> Any:
    return things


def second(things: Any) -> Any:
    return things[1]


# name: what is made of a tensor; what is looked at in a result.
CASES: dict[str, tuple[Any, Any]] = {
    "a list in a context": (lambda t: Node(t, [1.0]), kept),
    "a list inside a tuple in a context": (lambda t: Node(t, ([1.0], 2)), lambda n: n.kept[0]),
    "a dict in a context": (lambda t: Node(t, {"a": [1.0]}), lambda n: n.kept["a"]),
    "a set in a context": (lambda t: Node(t, {1.0}), kept),
    "a list of before in a context": (lambda t: Node(t, LIST), kept),
    "a list of before inside a context": (lambda t: Node(t, (1, PAIRS["a"])), lambda n: n.kept[1]),
    "an object in a context": (lambda t: Node(t, Plain(1.0)), kept),
    "an object of before in a context": (lambda t: Node(t, KEPT), kept),
    "a function in a context": (lambda t: Node(t, lambda: 2.0), kept),
    "a function of before in a context": (lambda t: Node(t, twice), kept),
    "a word in a context": (lambda t: Node(t, "word"), kept),
    "a node in a node": (lambda t: Node(Node(t, [1.0]), [2.0]), lambda n: n.t.kept),
    "a node": (lambda t: Node(t, 1), itself),
    "a node with another attribute": (lambda t: more(Node(t, 1)), itself),
    "a function that makes what is missing": (
        lambda t: defaultdict(lambda: 2.0, a=t),
        lambda d: d.default_factory,
    ),
    "a class that makes what is missing": (
        lambda t: defaultdict(list, a=t),
        lambda d: d.default_factory,
    ),
    "a list": (lambda t: [t], itself),
    "a dict": (lambda t: {"a": t}, itself),
    "an ordered dict": (lambda t: OrderedDict(a=t), itself),
    "a deque": (lambda t: deque([t], maxlen=3), itself),
    "a dict of before": (lambda t: PAIRS, lambda d: d["a"]),
    "a key": (lambda t: {Plain(1): t}, lambda d: next(iter(d))),
    "a key of before": (lambda t: {KEPT: t}, lambda d: next(iter(d))),
    "a number of a class": (lambda t: (t, Level(3)), second),
    "numpy's number": (lambda t: (t, np.float64(3)), lambda p: type(p[1])),
    "a member of an enum": (lambda t: (t, Mark.LOW), second),
    "a member of an enum of numbers": (lambda t: (t, Number.LOW), second),
    "a set": (lambda t: (t, {1.0}), second),
    "a tensor with an attribute": (lambda t: tagged(t.clone()), itself),
    "a parameter": (lambda t: torch.nn.Parameter(t.detach().clone()), type),
}
# Of these no program is made, for all of them are replayed otherwise.
NOT_REPLAYED = {
    "a list of before in a context",
    "a list of before inside a context",
    "an object in a context",
    "a function in a context",
    "a function that makes what is missing",
    "a key",
    "a number of a class",
    "a set",
    "a tensor with an attribute",
}
WAYS = {
    "grad": (lambda f: grad(lambda x: (x.sum(), f(x.sin())), has_aux=True), second),
    "vmap": (lambda f: vmap(lambda x: f(x.sin())), itself),
    "function": (lambda f: vmap(lambda x: (f(x.sin()), x)), lambda r: r[0]),
}


def told(results: list, look: Any) -> tuple:
    """Which of them hold the same, and what they have besides."""
    found = [look(r) for r in results]
    places = [*map(id, found)]
    state = [sorted(getattr(r, "__dict__", {})) for r in results]
    return [places.index(p) for p in places], state, [type(x) for x in found]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_results_are_as_new_or_the_same_as_those_of_the_call(case, way, at_once, hits, monkeypatch):
    (make, look), (transform, of) = CASES[case], WAYS[way]
    with monkeypatch.context() as patch:
        patch.setattr("forall.config.replay", False)
        g = transform(make)
        try:
            want = told([of(g(X)) for _ in range(6)], look)
        except (ValueError, TypeError, RuntimeError) as error:
            pytest.skip(f"no result of this transform: {error}")
    g = transform(make)
    results = [of(g(X)) for _ in range(6)]
    assert told(results, look) == want
    if way == "grad" and case not in NOT_REPLAYED | {"a parameter", "a dict of before"}:
        assert hits


@pytest.mark.filterwarnings("ignore:.*not recorded.*:forall.PerformanceWarning")
@pytest.mark.parametrize("way", ["grad", "jit"])
def test_what_is_done_to_a_result_is_not_seen_in_the_next(way, at_once):
    def f(x):
        return x.sum(), Node(x.sin(), ([1.0], {"a": {2.0}}))

    g = grad(f, has_aux=True) if way == "grad" else jit(f)
    for _ in range(8):
        _, node = g(X)
        assert node.kept == ([1.0], {"a": {2.0}})
        node.kept[0].append(5.0)
        node.kept[1]["a"].add(7.0)
        node.kept[1]["b"] = 3


@pytest.mark.parametrize("look", [kept, lambda n: n.kept[0]])
def test_a_result_with_the_context_of_an_argument_has_that_of_its_call(look, at_once):
    g = grad(lambda n: n.t.sum())
    for kept_now in [Plain(1.0), [1.0], (KEPT, 2)] * 6:
        if isinstance(kept_now, Plain) and look is not kept:
            continue
        n = Node(X, kept_now)
        assert look(g(n)) is look(n)


@pytest.mark.parametrize("derivative", [False, True])
@pytest.mark.filterwarnings("ignore:.*not recorded.*:forall.PerformanceWarning")
def test_what_changes_an_argument_is_not_replayed(derivative, at_once):
    x = X.clone().requires_grad_(derivative)

    def tag(x, t):
        t.tag = getattr(t, "tag", 0) + 1
        return (x * t.tag).sum()

    def context(x, n):
        n.kept.append(1.0)
        return (x * len(n.kept)).sum()

    def attribute(x, n):
        n.more = getattr(n, "more", 0) + 1
        return (x * n.more).sum()

    for f, make in [
        (tag, X.clone),
        (context, lambda: Node(X, [])),
        (attribute, lambda: Node(X, 1)),
    ]:
        for transform in (grad, jit):
            given, other = make(), make()
            g = transform(f)
            for i in range(8):
                want = f(x, other)
                got = g(x, given)
                assert got.sum() == (want if transform is jit else 3.0 * (i + 1))
