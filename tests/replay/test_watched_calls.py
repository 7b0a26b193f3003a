"""Calls replayed by what they were seen to run do what the plain calls do, whatever is changed."""

from __future__ import annotations

import copyreg
import linecache
import os
import re
import sys
import threading
from types import ModuleType, UnionType

import pytest
import torch

import forall
from forall import vmap
from forall._api.execution.transform_decorator import describe_replay
from forall._auto_replay.replayed_calls import get_transform_calls
from forall._core.python_state import instructions_of
from forall._jit.guards.attribute_names import find_text_lookups
from oracle import same
from replay import seen_code, seen_state

pytestmark = pytest.mark.usefixtures("at_once")

PRELUDE = """
import abc, builtins, contextlib, contextvars, enum, functools, logging, math, re, string, sys
import threading
import types, typing, weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
import numpy as np, torch
import torch.nn.functional as F
from torch import nn
NEVER = False
"""
NEVER = "def f(x):\n if NEVER: print()\n"
CASES = dict(
    block.split("\n", 1)
    for block in f"{seen_state.TEXT}\n{seen_code.TEXT.strip()}".strip().split("\n\n")
)
# What no guard can compare: these are to be called, each time.
NOT_REPLAYED = {
    "closure by locals",
    "copy of an object",
    "copy of a tensor",
    "hash by another function of that name",
    "pickle of a tensor",
    "lru cache_info hits",
    "lru gives a dict with side effect",
    "library class's C member",
    "logger counter",
    "idle function's counter",
    "numpy subclass attr",
    "exception args",
    "del with a side effect",
    "hash",
    "history list",
    "logger isEnabledFor",
    "object that has no class",
    "context manager that counts",
    "held library by a text",
    "held library by any name",
    "held library by its dict",
    "cached property that counts",
    "function in TorchScript that prints",
    "module's function writes",
    "vars by another name",
    "vars of a library's module",
}


def module(source):
    """A module of its own, under a name by which it is found."""
    m = ModuleType(f"seen_{len(linecache.cache)}")
    sys.modules[m.__name__] = m
    linecache.cache[m.__name__] = len(source), None, source.splitlines(keepends=True), m.__name__
    for text in (PRELUDE, source):
        exec(compile(text, m.__name__, "exec", dont_inherit=True), vars(m))  # noqa: S102
    return m


def made(name):
    """The module of a case, what changes it, and what is asked last."""
    lines = CASES[f"# {name}"].split("\n")
    source = "\n".join(x for x in lines if x[:2] not in ("> ", "? "))
    short = source.replace("f: ", NEVER + " return ") if "\nf: " in "\n" + source else source
    later, last = ("\n".join(x[2:] for x in lines if x[:2] == mark) for mark in ("> ", "? "))
    return module(short if NEVER in short else short.replace("def f(x):\n", NEVER)), later, last


def calls(name, monkeypatch, *, replay):
    """What later calls give, what is left, and whether calls were replayed."""
    monkeypatch.setattr(forall.config, "replay", replay)
    for kind in copyreg.dispatch_table.keys() - {complex, UnionType, re.Pattern}:
        monkeypatch.delitem(copyreg.dispatch_table, kind)  # what other tests' libraries registered
    m, later, last = made(name)
    f, x = vmap(m.f), torch.arange(1.0, 4.0)
    for _ in range(8):
        f(x)
    told = describe_replay(f) if replay else ""
    exec(later, vars(m))  # noqa: S102
    try:
        given = [outcome(f, x) for _ in range(2)]
    finally:
        left = eval(last, vars(m)) if last else None  # noqa: S307
    return given, left, told


def outcome(f, x):
    try:
        return f(x)
    except Exception as error:
        return type(error).__name__


@pytest.mark.filterwarnings("ignore:.*draw numbers once for all:UserWarning")
@pytest.mark.parametrize("name", [name[2:] for name in CASES])
def test_what_is_changed_is_seen(name, monkeypatch):
    found, left, told = calls(name, monkeypatch, replay=True)
    wanted, as_left, _ = calls(name, monkeypatch, replay=False)
    assert same(found, wanted)
    assert repr(left) == repr(as_left)
    assert ("calls so far" in told) == (name not in NOT_REPLAYED), told


@pytest.mark.parametrize("when", range(1, 6))
def test_a_function_of_a_librarys_that_comes_between_the_sight_and_the_recording(when, monkeypatch):
    monkeypatch.setenv("SEEN", "2.0")
    m = module(f"import os\nP = [len]\n{NEVER} return x * float(P[0]('SEEN'))")
    f, x = vmap(m.f), torch.ones(2)
    for i in range(9):
        if i == when:
            m.P[0] = os.getenv  # which no instruction of the function tells from the other
        f(x)
    monkeypatch.setenv("SEEN", "3.0")
    assert same(f(x), 3 * x)


def test_a_free_variable_that_no_instruction_asks_for_may_change_with_each_call():
    m = module(f"""
def make():
    log, k = [], [2.0]
    def g(x):
        if NEVER: log.append(x)
        return x * k[0]
    return g, log, k
g, log, k = make()
{NEVER} return g(x)
""")
    f, x = vmap(m.f), torch.ones(2)
    for _ in range(12):
        m.log.append(f(x))
    assert get_transform_calls(f).hits >= 6
    m.k[0] = 3.0
    assert same(f(x), 3 * x)


def test_many_threads():
    m = module(f"class C: k = 2.0\nc = C()\n{NEVER} return x * c.k")
    f, wrong = vmap(m.f), []

    def work():
        for i in range(40):
            x = torch.full((2 + i % 3,), float(i))
            wrong.extend([i] if not same(f(x), 2 * x) else [])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    m.c.k = 3.0
    assert not wrong
    assert same(f(torch.ones(2)), 3 * torch.ones(2))


def test_a_threads_own_attributes_are_those_of_the_thread_that_calls():
    m = module(f"L = threading.local()\nL.k = 2.0\n{NEVER} return x * L.k")
    f, x, found = vmap(m.f), torch.ones(2), []
    for _ in range(8):
        f(x)
    assert get_transform_calls(f).hits

    def work():
        m.L.k = 3.0
        found.extend(f(x) for _ in range(8))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert same(found, [3 * x] * 8)
    assert same([f(x) for _ in range(8)], [2 * x] * 8)


def test_who_traces_sees_the_calls():
    m = module(f"{NEVER} return x * 2")
    f, seen, before = vmap(m.f), [], sys.gettrace()
    for _ in range(8):
        f(torch.ones(2))

    def tracer(frame, event, arg):
        seen.append(frame.f_code is m.f.__code__)

    sys.settrace(tracer)
    try:
        f(torch.ones(2))
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(before)
    assert any(seen)


def test_jumps_and_names_behind_extended_arguments():
    lines = [f" if G{i}: y = y + {i}.5 * c.a{i}\n" for i in range(300)]
    names = [f"G{i} = {i == 299}\nc.a{i} = {i}.0\n" for i in range(300)]
    m = module(f"class C: pass\nc = C()\n{''.join(names)}{NEVER} y = x\n{''.join(lines)} return y")
    f, x = vmap(m.f), torch.ones(2)
    for _ in range(8):
        f(x)
    assert "calls so far" in describe_replay(f)
    m.c.a299 = 2.0
    assert same(f(x), x + 2 * 299.5)
    m.G298 = True
    assert same(f(x), x + 2 * 299.5 + 298 * 298.5)


ASKING = {
    "getattr(x, 'a')": ({"a"}, False),
    "getattr(x.y.z, 'a', None)": ({"a"}, False),
    "hasattr(glob, 'a') and getattr(glob, 'b', y)": ({"a", "b"}, False),
    "setattr(x, 'a', y)": ({"a"}, False),
    "x.getattr('a')": (set(), False),
    "getattr(x, y)": (set(), True),
    "getattr(x, 1)": (set(), True),
    "getattr(x, y, 'a')": (set(), True),
    "getattr(f('a'), y)": (set(), True),
    "getattr(f(x, 'a'), y)": (set(), True),
    "getattr(f('a', 'b'), y)": (set(), True),
    "getattr(x.f('a', 'b'), y)": (set(), True),
    "getattr(x.f(y, 'a'), y)": (set(), True),
    "getattr(x['a'], y)": (set(), True),
    "getattr(*x, 'a')": (set(), True),
    "map(getattr, x, y)": (set(), True),
    "getattr(x, 'a') + getattr(x, y)": ({"a"}, True),
}


@pytest.mark.parametrize("text", ASKING)
def test_names_that_are_asked_for_in_a_text(text):
    code = eval(f"lambda x, y, f: {text}").__code__  # noqa: S307
    assert find_text_lookups(instructions_of(code)) == ASKING[text]
