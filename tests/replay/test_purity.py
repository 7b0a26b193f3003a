"""What is not certain is not replayed: its calls are the function's, each of them."""

from __future__ import annotations

import contextlib
import enum
import functools
import io
import itertools
import logging
import math
import operator
import random
import time
import warnings
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import forall
from draws import make_generator
from forall import grad, hessian, jacfwd, jacrev, vmap
from forall._api.execution.transform_decorator import replay_transform
from forall._auto_replay.purity import find_impurity
from forall._auto_replay.replayed_calls import get_transform_calls
from forall._jit.guards.build import Guards
from golden import refused
from jit.cases import Cubed

STARTED = time.time()
TABLE = {"scale": 2.0, "layers": [1.0, 2.0]}
W = torch.ones(3)


class Named(NamedTuple):
    scale: float

    def of(self, x):
        return x * self.scale


class Late(NamedTuple):
    scale: float

    def of(self, x):
        return x * time.time()


Pair = namedtuple("Pair", "a b")  # noqa: PYI024 - the other one


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclass
class Settings:
    scale: float = 2.0
    deep: tuple = (1, 2)

    @property
    def double(self):
        return 2 * self.scale


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 1))
        self.act = F.tanh

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.act(x).sum()

    def fit(self):
        print("fitting")  # which nobody calls


class Noisy(Network):
    def forward(self, x):
        print("forward")
        return super().forward(x)


def helper(x, n=2):
    return sum(x**i for i in range(n)) if n else math.pi * x


def by_import(x):
    import random as r

    return x * r.random()


def closing_over(module):
    def f(x):
        return x * module.tanh(x)

    return f


def twice_named(module):
    def f(x):
        def inner(module):
            return lambda: module.random()

        return x * inner(random)() + module.tanh(x)

    return f


def shadowing(module):
    def f(x):
        def inner():
            module = random
            return sum(module.random() for _ in range(1)) + helper(lambda: module)

        return x * inner() + module.tanh(x)

    return f


network, noisy, settings = Network(), Noisy(), Settings()
named, late, pair = Named(2.0), Late(2.0), Pair(1.0, 2.0)
counts = itertools.count()
gen = make_generator()
log = logging.getLogger("x")
out = io.StringIO()


class Logged:
    def __init__(self):
        self.log = log

    def scaled(self, x):
        return 2 * x

    def printed(self, x):
        print("printed")
        return x

    def twice(self, x):
        return self.scaled(self.printed(x))

    alias = printed


lstm, ARRAY = nn.LSTM(3, 2), np.arange(3.0)
logged, printed, METHODS = Logged(), Logged.printed, [Logged.printed]


@contextlib.contextmanager
def quietly():
    yield


@functools.lru_cache
def cached(n):
    return n * 2.0


KEYS = TABLE.keys()


class Hooked:
    def __init__(self):
        self.handle = network.register_forward_hook(lambda *_: None)
        self.handle.remove()

    def scaled(self, x):
        return x * 2 if self.handle is not None else x


hooked = Hooked()


def within_nothing(x):
    with contextlib.nullcontext():
        return x.sin()


CERTAIN = {
    "contexts in a stack": lambda x: contextlib.ExitStack() and x,
    "a chain": lambda x: (x.sin() + 1).tanh().sum(),
    "a cache": lambda x: x * cached(2),
    "a helper": lambda x: helper(x, 3) + helper(x),
    "functions of torch": lambda x: torch.stack([F.softmax(x, 0), torch.linalg.inv(x.diag())[0]]),
    "a module": lambda x: network(x),
    "a module with other parameters": lambda x: forall.functional_call(
        network, {k: 2 * v for k, v in network.state_dict().items()}, (x,)
    ),
    "a table": lambda x: x * TABLE["scale"] + sum(TABLE["layers"]),
    "objects": lambda x: x * settings.double + settings.deep[0] + pair.a,
    "a method of a named tuple": lambda x: named.of(x),
    "an enum": lambda x: x if Colour.RED is not Colour.BLUE else -x,
    "containers made inside": lambda x: (
        OrderedDict(a=x)["a"] + defaultdict(list, b=[x])["b"][0] + next(map(torch.neg, [x]))
    ),
    "random numbers of torch": lambda x: x + torch.randn(3) + F.dropout(x) + torch.rand_like(x),
    "transforms": lambda x: grad(lambda y: vmap(torch.sin)(y).sum())(x) + jacrev(torch.cos)(x)[0],
    "an operator": lambda x: functools.reduce(operator.mul, [x, x, x]),
    "a function with a backward of its own": lambda x: Cubed.apply(x),
    "a module in a closure": closing_over(torch),
    "modes": lambda x: torch.no_grad()(torch.sin)(x),
    "an operator by its full name": lambda x: torch.ops.aten.sin.default(x),
    "a distribution": lambda x: torch.distributions.Normal(x, 1.0).log_prob(W),
    "a recurrent layer": lambda x: lstm(x[None])[0].sum(),
    "a small array": lambda x: x * len(ARRAY) + float(ARRAY[0]),
    "an object whose log is not asked for": lambda x: logged.scaled(x),
    "a class whose other methods print": lambda x: logged.scaled(x),
    "a context that does nothing": within_nothing,
    "names of a dict": lambda x: torch.stack([x * len(k) for k in KEYS]),
    "trees": lambda x: torch.utils._pytree.tree_map(torch.sin, {"a": x})["a"],
    "threads between operators": lambda x: x * torch.get_num_interop_threads(),
    "an object with a handle": lambda x: hooked.scaled(x),
    "errors": lambda x: x if x.dim() else (_ for _ in ()).throw(ValueError("no")),
}

UNCERTAIN = {
    "time.time": lambda x: x * time.time(),
    "the clock by another name": lambda x: x * clock(),
    "random.random": lambda x: x * random.random(),
    "numpy's random numbers": lambda x: x * np.random.rand(),  # noqa: NPY002
    "print": lambda x: print("x") or x,
    "log": lambda x: log.info("x") or x,
    "write": lambda x: out.write("x") and x,
    "warn": lambda x: warnings.warn("x", stacklevel=2) or x,
    "open": lambda x: open("/dev/null") and x,  # noqa: PTH123, SIM115
    "by_import": by_import,
    "an iterator": lambda x: x * next(counts),
    "a version": lambda x: x * W._version,
    "a version by a way": lambda x: x * x.T._version,
    "a gradient": lambda x: x if W.grad is None else -x,
    "an address": lambda x: x * (W.data_ptr() % 7),
    "a name asked for": lambda x: x * getattr(W, "_version"),  # noqa: B009
    "id": lambda x: x * (id(x) % 3),
    "a seed": lambda x: x * torch.initial_seed(),
    "the number of threads": lambda x: x * torch.get_num_threads(),
    "a module that prints": lambda x: noisy(x),
    "a method of a named tuple": lambda x: late.of(x),
    "a method in a table": lambda x: METHODS[0](logged, x),
    "a method by another name": lambda x: printed(logged, x),
    "a method under another name": lambda x: logged.alias(x),
    "a method that a method calls": lambda x: logged.twice(x),
    "a context that redirects": lambda x: contextlib.redirect_stdout(None) and x,
    "a generator of its own seed": lambda x: x * gen.initial_seed(),
    "attrgetter": lambda x: x * operator.attrgetter("_version")(W),
    "a module as a value": lambda x: getter(torch, "initial_seed")() * x,
    "saved": lambda x: torch.save(x, "/dev/null") or x,
    "a name twice": twice_named(torch),
    "a name that hides another": shadowing(torch),
    "eval": lambda x: eval("x"),  # noqa: S307
    "globals": lambda x: x * globals()["STARTED"],
    "torch.func": lambda x: torch.func.grad(lambda y: y.sin().sum())(x),
    "memory": lambda x: x * torch.cuda.memory_allocated(),
    "a profiler": lambda x: torch.autograd.profiler.record_function("x") and x,
}
clock, getter = time.perf_counter, getattr


@pytest.mark.parametrize("name", CERTAIN)
def test_is_certain(name):
    assert find_impurity(Guards(CERTAIN[name])) is None


@pytest.mark.parametrize("name", UNCERTAIN)
def test_is_in_doubt(name):
    assert find_impurity(Guards(UNCERTAIN[name])) is not None


@pytest.mark.parametrize("transform", [vmap, grad, jacrev, jacfwd, hessian])
def test_the_doubt_goes_through_transforms(transform):
    assert find_impurity(Guards(transform(CERTAIN["a chain"]))) is None
    assert "time" in (find_impurity(Guards(transform(UNCERTAIN["time.time"]))) or "")


def test_what_is_patched_is_seen(monkeypatch):
    monkeypatch.setattr(forall.config, "replay", True)
    monkeypatch.setattr(forall.config, "patience", 0)
    f = vmap(lambda x: F.relu(x))
    x = torch.randn(4)
    for _ in range(6):
        torch.testing.assert_close(f(x), x.clamp(min=0))
    monkeypatch.setattr(F, "relu", torch.sin)
    torch.testing.assert_close(f(x), x.sin())


def test_a_hook_of_all_modules_runs(monkeypatch):
    monkeypatch.setattr(forall.config, "replay", True)
    monkeypatch.setattr(forall.config, "patience", 0)
    calls = []
    f = vmap(nn.ReLU())
    for _ in range(6):
        f(torch.randn(4))
    hook = nn.modules.module.register_module_forward_hook(lambda *_: calls.append(1))
    try:
        f(torch.randn(4))
    finally:
        hook.remove()
    assert calls


def test_an_error_is_the_functions_own(monkeypatch):
    monkeypatch.setattr(forall.config, "replay", True)
    monkeypatch.setattr(forall.config, "patience", 0)
    f = vmap(torch.linalg.cholesky)
    good = torch.eye(3).repeat(4, 1, 1)
    for _ in range(6):
        f(good)
    assert replays(f).hits
    bad = good.clone()
    bad[2] = -bad[2]
    with pytest.raises(RuntimeError, match="not positive-definite") as error:
        f(bad)
    assert "example 2 of 4" in "\n".join(error.value.__notes__)


def replays(f):
    return get_transform_calls(f).replays


def test_a_function_that_is_called_seldom_is_not_recorded(monkeypatch):
    monkeypatch.setattr(forall.config, "replay", True)
    monkeypatch.setattr(forall.config, "patience", 60.0)  # seconds, also of a busy machine

    def sine(x):  # of its own: calls of torch.sin are counted over all tests
        return x.sin()

    f = vmap(sine)
    for _ in range(5):
        f(torch.randn(3))
    assert replays(f) is None


def test_what_never_stays_the_same_is_given_up(monkeypatch):
    monkeypatch.setattr(forall.config, "replay", True)
    monkeypatch.setattr(forall.config, "patience", 0)
    state = {"n": 0}

    def times(x):
        return x * state["n"]

    vars(times)["own"] = True  # it is not one of many that are made anew
    f = replay_transform(times)(operator.call)

    for i in range(60):
        state["n"] = i
        assert f(torch.ones(2)).tolist() == [i, i]
    assert replays(f).why is not None
    assert not replays(f).known


def test_a_difference_is_told_when_asked(monkeypatch):
    monkeypatch.setattr(forall.config, "replay", "check")
    f = vmap(lambda x: x * W[0])
    f(torch.ones(3))
    (recorded,) = replays(f).known.values()
    monkeypatch.setattr(recorded, "run", lambda *_: (torch.zeros(3),))
    with refused(
        RuntimeError,
        f"""
        forall: a replayed call gave
        {torch.zeros(3)}
        and not
        {torch.ones(3)}
        """,
    ):
        f(torch.ones(3))


def test_names_of_a_dict_that_gets_more(monkeypatch):
    monkeypatch.setattr(forall.config, "replay", True)
    monkeypatch.setattr(forall.config, "patience", 0)
    table = {"a": 1.0}
    keys = table.keys()
    f = vmap(lambda x: x * len(keys))
    for n in range(1, 6):
        for _ in range(3):
            assert torch.equal(f(W), W * n)
        table[str(n)] = 1.0
