"""Where examples diverge a function runs more than once; Python's state counts as in the loop.

Of two examples that diverge each is a group, so that what two calls leave is what the loop leaves.
"""

from __future__ import annotations

import functools
from collections import Counter, OrderedDict, deque
from typing import Any

import pytest
import torch

from by_groups import only_groups
from divergence.cases import D
from forall import vmap


@pytest.fixture
def floor(monkeypatch):
    """Groups alone, as for a function whose source cannot be had."""
    only_groups(monkeypatch)


class Counts:
    of_all = 0

    def __init__(self):
        self.calls, self.log = 0, []

    def one(self, x):
        self.calls += 1
        self.log.append("one")
        Counts.of_all += 1
        if x > 0:
            self.log.append("above")
            return x
        return x * 2

    def __call__(self, x):
        return self.one(x) + 1


calls_of_all = 0
log_of_all: list[Any] = []
counts_of_all = Counts()


def named_by_the_function():
    global calls_of_all  # noqa: PLW0603 - what is tested
    calls_of_all += 1
    log_of_all.append(calls_of_all)
    counts_of_all.calls += 1


def made_containers():
    return {
        "list": [0],
        "dict": {"n": 0},
        "set": {0},
        "deque": deque([0], maxlen=3),
        "bytearray": bytearray(b"a"),
        "counter": Counter(a=1),
        "ordered": OrderedDict(n=[0]),
        "nested": {"inner": [[0]]},
    }


def fill(c):
    c["list"].append(len(c["list"]))
    c["dict"]["n"] += 1
    c["set"].add(len(c["set"]))
    c["deque"].appendleft(len(c["deque"]))
    c["bytearray"].extend(b"b")
    c["counter"]["a"] += 1
    c["ordered"]["n"].append(1)
    c["nested"]["inner"][0].append(2)


def two_calls(run):
    """State after a loop over two examples, or a vmap of two groups of one example."""
    return run(torch.tensor([1.0, -1.0], dtype=D))


@pytest.mark.usefixtures("floor")
@pytest.mark.parametrize("where", ["argument", "closure", "partial", "in a tuple"])
def test_containers(where):
    def states(mapped):
        c = made_containers()

        def of(c, x):
            fill(c)
            return x if x > 0 else x * 2

        if where == "argument":
            run = mapped(of, (None, 0)), (c,)
        elif where == "closure":
            run = mapped(lambda x: of(c, x), 0), ()
        elif where == "partial":
            run = mapped(functools.partial(of, c), 0), ()
        else:
            run = mapped(lambda t, x: of(t[0], x), (None, 0)), ((c, 1),)
        two_calls(lambda xs: run[0](*run[1], xs))
        return c

    def loop(f, _in_dims):
        return lambda *args: [f(*args[:-1], x) for x in args[-1]]

    assert states(vmap) == states(loop)


@pytest.mark.usefixtures("floor")
def test_nonlocal_names():
    def run(mapped):
        calls, late = 0, []

        def f(x):
            nonlocal calls, late
            calls += 1
            late = [*late, "call"]
            return x if x > 0 else x * 2

        two_calls(mapped(f))
        return calls, late

    assert run(vmap) == run(lambda f: lambda xs: [f(x) for x in xs]) == (2, ["call", "call"])


@pytest.mark.usefixtures("floor")
@pytest.mark.parametrize("what", ["method", "object"])
def test_attributes_of_the_object_that_is_called(what):
    Counts.of_all = 0
    counts = Counts()
    two_calls(vmap(counts.one if what == "method" else counts))
    assert (counts.calls, Counts.of_all) == (2, 2)
    assert sorted(counts.log) == ["above", "one", "one"]


@pytest.mark.usefixtures("floor")
def test_attributes_of_an_argument_and_of_the_function():
    counts = Counts()

    def f(counts, x):
        counts.calls += 1
        vars(f)["calls"] += 1
        return x if x > 0 else x * 2

    vars(f)["calls"] = 0
    two_calls(functools.partial(vmap(f, in_dims=(None, 0)), counts))
    assert counts.calls == vars(f)["calls"] == 2


@pytest.mark.usefixtures("floor")
def test_globals_of_a_function_that_is_called_by_name():
    global calls_of_all
    calls_of_all, counts_of_all.calls = 0, 0
    log_of_all.clear()

    def f(x):
        named_by_the_function()
        return x if x > 0 else x * 2

    two_calls(vmap(f))
    assert (calls_of_all, log_of_all, counts_of_all.calls) == (2, [1, 2], 2)


@pytest.mark.parametrize("what", ["method", "object"])
def test_converted_source_runs_no_line_more_often_than_the_loop(what):
    Counts.of_all = 0
    counts = Counts()
    two_calls(vmap(counts.one if what == "method" else counts))
    assert 1 <= counts.calls == Counts.of_all <= 2
