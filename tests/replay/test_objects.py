"""Objects of the user's with functions in them: transformed anew with each call, and let go."""

import copy
import gc
import json
import pickle
import weakref
from contextlib import AbstractContextManager

import pytest
import torch
from torch import nn

import forall
from forall import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from forall._auto_replay import fresh_closures
from replay.test_fresh_functions import plainly

pytestmark = pytest.mark.usefixtures("at_once")
D = torch.float64
X = torch.linspace(0.1, 1, 6, dtype=D).reshape(2, 3)
C = torch.linspace(-1, 1, 6, dtype=D).reshape(2, 3)


class Physics:
    """Numbers and tensors; nothing that calls could be kept with."""

    rate = 2.0

    def __init__(self, scale=1.0):
        self.scale = scale
        self.shift = torch.full((3,), 0.5, dtype=D)

    def energy(self, x):
        return ((x * self.scale + self.shift).sin() * self.rate).sum()

    def vector(self, x):
        return (x * self.scale).sin() * self.shift

    def __call__(self, x):
        return self.energy(x)


class Trainer:
    def __init__(self):
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(D)
        self.weight = 0.1

    def u(self, x):
        return self.net(x).sum()

    def residual(self, x):
        return grad(self.u)(x).sum() * self.weight + self.u(x)

    def loss(self, x):
        return vmap(self.residual)(x).square().mean()


@pytest.fixture
def uncollected():
    """The garbage collector comes by where it is called alone."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def hits(either_way, hits):
    return hits


def agree(way, m):
    torch.testing.assert_close(way(m), plainly(way, m), rtol=1e-12, atol=1e-12)


def held(m, transform):
    """By a function that is made anew."""
    return transform(lambda v: m.energy(v) + m.rate)


def by_its_method(f):
    return grad(lambda v: f(v) * 2)(X)


def by_both(m, n):
    return grad(lambda x: m.loss(x) * n.scale)(X)


WAYS = {
    "grad": lambda m: grad(m.energy)(X),
    "vmap": lambda m: vmap(m.vector)(X),
    "vmap of grad": lambda m: vmap(grad(m.energy))(X),
    "hessian": lambda m: hessian(m.energy)(X[0]),
    "jacrev": lambda m: jacrev(m.vector)(X[0]),
    "jacfwd": lambda m: jacfwd(m.vector)(X[0]),
    "jvp": lambda m: jvp(m.energy, (X,), (C,)),
    "vjp": lambda m: vjp(m.vector, X)[1](C),
    "linearize": lambda m: linearize(m.vector, X)[1](C),
    "itself": lambda m: vmap(grad(m))(X),
    "in a closure": lambda m: held(m, grad)(X),
    "in a closure, mapped": lambda m: vmap(held(m, grad))(X),
    "a default": lambda m: grad(lambda v, m=m: m.energy(v))(X),
    "a method in a closure": lambda m: by_its_method(m.energy),
}


@pytest.mark.parametrize("name", WAYS)
def test_it_is_replayed(name, hits):
    m = Physics()
    for _ in range(6):
        agree(WAYS[name], m)
        m.shift.mul_(0.9)
    assert hits


@pytest.mark.parametrize("name", WAYS)
def test_what_it_is_now_is_what_counts(name, monkeypatch):
    m = Physics()
    for _ in range(4):
        agree(WAYS[name], m)
    m.scale = 3.0
    for _ in range(4):
        agree(WAYS[name], m)
    monkeypatch.setattr(Physics, "rate", 5.0)
    for _ in range(4):
        agree(WAYS[name], m)
    m.shift = torch.ones(3, dtype=D)
    for _ in range(4):
        agree(WAYS[name], m)
    m.rate = 7.0  # the object's own, before the class's
    for _ in range(4):
        agree(WAYS[name], m)
    monkeypatch.setattr(Physics, "energy", lambda self, x: (x * self.scale).exp().sum())
    agree(WAYS[name], m)
    m.energy = lambda x: x.square().sum()
    agree(WAYS[name], m)
    m.__class__ = Other
    agree(WAYS[name], m)
    m.__dict__ = {"scale": 0.5, "shift": torch.zeros(3, dtype=D)}
    agree(WAYS[name], m)


class Other(Physics):
    def vector(self, x):
        return x.cos() * self.scale


class OfALibrary(Physics, AbstractContextManager):
    """One whose attributes a library may read by any name."""

    def __exit__(self, *_):
        pass


@pytest.mark.parametrize("name", WAYS)
def test_its_attributes_may_all_be_replaced(name, hits):
    m = OfALibrary()
    for _ in range(6):
        agree(WAYS[name], m)
    assert hits
    m.__dict__ = {"scale": 5.0, "shift": torch.ones(3, dtype=D)}
    agree(WAYS[name], m)


@pytest.mark.parametrize("name", WAYS)
def test_another_one_is_another(name):
    ways = [Physics(scale) for scale in (1.0, 2.0, 3.0)]
    for i in range(18):
        agree(WAYS[name], ways[i % 3])
    for i in range(20):  # where the last one lay
        agree(WAYS[name], Physics(float(i)))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", WAYS)
def test_it_goes_with_the_last_who_has_it(name, hits, uncollected):
    m = Physics()
    for _ in range(6):
        WAYS[name](m)
    assert hits
    assert "__forall_further__" not in vars(m)
    inner = weakref.ref(m.shift)
    gone = weakref.ref(m)
    del m
    if forall.config.replay == "check":  # the comparison leaves rings
        gc.collect()
    assert gone() is None
    assert not fresh_closures.table
    gc.collect()
    assert inner() is None


STEPS = {
    "a method": lambda m: grad(m.loss)(X),
    "a closure": lambda m: grad(lambda x: m.loss(x) * 2)(X),
    "a closure over more": lambda m: by_both(m, m.other),
    "per example": lambda m: vmap(m.residual)(X).detach(),
}


@pytest.mark.parametrize("name", STEPS)
def test_one_with_a_module(name, hits):
    m = Trainer()
    m.other = Physics()
    for i in range(8):
        agree(STEPS[name], m)
        with torch.no_grad():
            for p in m.net.parameters():
                p.mul_(0.9)
        if i == 4:
            m.weight = 0.5
    assert hits
    gone = weakref.ref(m)
    del m
    gc.collect()
    assert gone() is None


def test_a_module_that_outlives_it(hits):
    net = Trainer().net
    for _ in range(3):
        m = Trainer()
        m.net = net
        for _ in range(5):
            agree(STEPS["a method"], m)
        gone = weakref.ref(m)
        del m
        gc.collect()
        assert gone() is None
    assert hits


def collect():
    """Have the collector come by twice: what holds itself is dropped where nobody has called it."""
    gc.collect()
    gc.collect()


class Kept(Physics):
    """One that is held by what it holds."""

    def __init__(self):
        super().__init__()
        self.slope = grad(self.energy)

    def norm(self, x):
        return self.slope(x).square().sum()


class KeptTrainer(Trainer):
    def __init__(self):
        super().__init__()
        self.mapped = vmap(self.residual)

    def loss(self, x):
        return self.mapped(x).square().mean()


@pytest.mark.parametrize("make", [Kept, KeptTrainer])
def test_one_that_holds_itself(make, hits):
    m = make()
    run = {
        Kept: lambda m: grad(m.norm)(X),
        KeptTrainer: lambda m: grad(lambda x: m.loss(x) * 2)(X),
    }[make]
    for _ in range(8):
        agree(run, m)
    assert hits
    gone = weakref.ref(m)
    del m
    collect()
    assert gone() is None
    assert not fresh_closures.table


def test_what_it_keeps_of_itself_is_replayed_as_ever(hits):
    m = Kept()
    m.norms = grad(m.norm)
    for _ in range(8):
        agree(lambda m: m.norms(X), m)
        agree(lambda m: m.slope(X), m)
    assert len(hits) >= 8
    gone = weakref.ref(m)
    del m
    collect()
    assert gone() is None
    assert not fresh_closures.table


class Child:
    def __init__(self, parent):
        self.parent = parent
        self.scale = 2.0

    def times(self, x):
        return x * self.scale


class Parent(Physics):
    def __init__(self):
        super().__init__()
        self.child = Child(self)

    def energy(self, x):
        return super().energy(self.child.times(x))


def test_one_that_is_held_by_what_a_part_of_it_holds(hits):
    m = Parent()
    for scale in (1.0, 2.0, 3.0):
        m.child.scale = scale
        for _ in range(4):
            agree(WAYS["grad"], m)
            agree(WAYS["in a closure"], m)
    assert hits
    gone = weakref.ref(m)
    del m
    collect()
    assert gone() is None
    assert not fresh_closures.table


def test_one_that_holds_itself_is_replayed_across_collections(hits, uncollected):
    m = Parent()
    for _ in range(6):
        WAYS["grad"](m)
    for _ in range(4):
        before = len(hits)
        gc.collect()
        agree(WAYS["grad"], m)
        assert len(hits) > before
    collect()
    assert not fresh_closures.table  # nobody called it in between
    agree(WAYS["grad"], m)


def test_many_that_hold_themselves_do_not_stay(hits, uncollected):
    gone = []
    for i in range(40):
        m = Parent()
        m.child.scale = float(i)
        for _ in range(4):
            agree(WAYS["grad"], m)
        gone.append(weakref.ref(m))
        gc.collect()
    assert sum(w() is not None for w in gone) <= 3


def test_one_that_holds_itself_only_later(hits):
    m = Physics()
    for _ in range(5):
        agree(WAYS["grad"], m)
    assert hits
    m.slope = grad(m.energy)
    agree(WAYS["grad"], m)
    gone = weakref.ref(m)
    del m
    gc.collect()
    assert gone() is None


class Counting(Physics):
    calls = 0

    def energy(self, x):
        self.calls += 1
        return super().energy(x) * self.calls


def test_one_that_counts_goes_on_counting():
    m = Counting()
    for i in range(8):
        grad(m.energy)(X)
        grad(lambda v: m.energy(v))(X)
        assert m.calls == 2 * i + 2


class Slotted:
    __slots__ = ("scale",)

    def energy(self, x):
        return (x * self.scale).sin().sum()


def test_one_that_cannot_be_held_weakly():
    m = Slotted()
    for scale in (1.0, 2.0, 3.0):
        m.scale = scale
        for _ in range(4):
            agree(lambda m: grad(m.energy)(X), m)


def test_those_who_look_at_its_attributes_see_their_own():
    m = Physics()
    m.shift = 1.0
    for _ in range(6):
        grad(m.energy)(X)
    assert json.dumps(vars(m)) == '{"scale": 1.0, "shift": 1.0}'
    again = pickle.loads(pickle.dumps(m))  # noqa: S301 - our own bytes
    assert vars(again) == vars(copy.deepcopy(m)) == vars(m)


def test_the_table_is_bounded(monkeypatch):
    monkeypatch.setattr(fresh_closures, "MOST", 8)
    ones = [Physics(float(i)) for i in range(20)]
    for m in ones * 2:
        agree(WAYS["grad"], m)
    assert len(fresh_closures.table) <= 8
