"""Whatever a function reaches is changed between two calls: the next one does as the plain one.

Each block is tried where all that the function names is read, and where a branch that is never
taken has its calls looked at as they run; by replay and by `jit`.
"""

from __future__ import annotations

import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

import forall
from forall import grad, jit, vmap
from forall._api.execution.transform_decorator import describe_replay
from forall._compat import native_guards
from forall._jit.guards import codegen
from oracle import same
from replay import reached_state
from replay.test_watched_calls import NEVER, module, outcome

pytestmark = pytest.mark.usefixtures("at_once")

TEXTS = [text for name, text in vars(reached_state).items() if name.isupper()]
CASES = {
    name[2:]: lines.split("\n")
    for name, lines in (b.split("\n", 1) for t in TEXTS for b in t.strip().split("\n\n"))
}
X = torch.tensor([1.0, 2.0, 3.0])
XS = torch.stack([X, X * 2])
# By which forall is told to call a function, and how the function is given.
PRELUDE = """
import array, collections, contextvars, copyreg, ctypes, dataclasses, io, itertools, operator
import pickle, random, struct, types, unittest.mock as mock
import torch.distributions as dist, torch.utils._pytree as pytree
from torch.nn.utils import parametrizations, parametrize
torch.manual_seed(0)
"""
WAYS = {
    "vmap": lambda f: vmap(lambda x: f(x) * 1.0),
    "grad": lambda f: grad(lambda x: (f(x) * x).sum()),
    "jit": lambda f: jit(lambda x: f(x) * 1.0),
}


def made(name, *, seen):
    """The module of a case, what changes it, and what is asked in the end."""
    lines = CASES[name]
    source = "\n" + "\n".join(x for x in lines if x[:2] not in ("> ", "? "))
    body = NEVER if seen else "def f(x):\n"
    source = source.replace("def f(x):\n", body).replace("\nf: ", f"\n{body} return ")
    later, last = ("\n".join(x[2:] for x in lines if x[:2] == mark) for mark in ("> ", "? "))
    return module(PRELUDE + source), later, last


def history(name, way, *, seen, replay, monkeypatch):
    monkeypatch.setattr(forall.config, "replay", replay)
    m, later, last = made(name, seen=seen)
    g = WAYS[way](m.f) if replay or way != "jit" else m.f
    found, x = [], XS if way == "vmap" else X
    try:
        found += [outcome(g, x) for _ in range(9)]
        told = _was_replayed(g, way) if replay else False
        exec(later, vars(m))  # noqa: S102
        found += [outcome(g, x) for _ in range(3)]
    finally:
        exec(last, vars(m))  # noqa: S102
        del sys.modules[m.__name__]
    return found, told


def _was_replayed(g, way):
    if way == "jit":
        return g.cache_info().hits > 0
    return "calls so far" in describe_replay(g)


@pytest.mark.parametrize("seen", [False, True], ids=["read", "seen"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_a_change_of_what_is_reached_is_as_in_the_plain_call(name, way, seen, monkeypatch):
    if way == "jit" and name.startswith("~"):
        pytest.skip("jit is told that there is nothing of the kind")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted, _ = history(name, way, seen=seen, replay=False, monkeypatch=monkeypatch)
        found, replayed = history(name, way, seen=seen, replay=True, monkeypatch=monkeypatch)
    assert not any(isinstance(w, str) for w in wanted), wanted
    assert same(found, wanted), (found, wanted)
    if way != "jit":  # which is told that nothing is hidden from it
        assert not (replayed and name.startswith(("-", "~")))
    if seen and way == "vmap":  # where it is read alone, more is in doubt
        assert replayed == (not name.startswith(("-", "~")))


def test_a_write_to_an_attribute_is_seen_where_python_does_not_tell_of_it(monkeypatch):
    """As in Python 3.13, where what an object's `__dict__` holds may lie in the object."""
    count = native_guards.get_dict_version
    monkeypatch.setattr(native_guards, "COUNTS_ATTRIBUTES", False)
    monkeypatch.setattr(codegen, "get_dict_version", lambda d: count(d) if "__name__" in d else 0)
    thing = SimpleNamespace(weight=2.0, table={"bias": 1.0})
    g = jit(lambda x: x * thing.weight + thing.table["bias"] + getattr(thing, "more", 0.0))
    for attribute, value in (("weight", 3.0), ("table", {"bias": 2.0}), ("more", 1.0)):
        for _ in range(3):
            g(X)
        hits = g.cache_info().hits
        assert hits
        setattr(thing, attribute, value)
        assert same(g(X), X * thing.weight + thing.table["bias"] + getattr(thing, "more", 0.0))
        assert g.cache_info().hits == hits
    g(X)
    thing.table["bias"] = 5.0
    assert same(g(X), X * 3.0 + 5.0 + 1.0)
