"""Transforms made anew with each call, of a module and of its methods: parameters are read anew."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

import forall
from forall import grad, hessian, jacrev, jvp, linearize, vjp, vmap

pytestmark = pytest.mark.usefixtures("at_once")
D = torch.float64


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4, dtype=D)
        self.second = nn.Linear(4, 3, dtype=D)
        self.scale = 1.0

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))) * self.scale

    def energy(self, x):
        return self(x).square().sum()


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Network()


@pytest.fixture
def hits(either_way, hits):
    return hits


X = torch.linspace(0.1, 1, 6, dtype=D).reshape(2, 3)
C = torch.linspace(-1, 1, 6, dtype=D).reshape(2, 3)


def pushed(m):
    y, push = linearize(m, X)
    return y, push(C), push(X)


WAYS = {
    "vjp": lambda m: vjp(m, X)[1](C),
    "vjp of a method": lambda m: vjp(m.energy, X)[1](torch.ones((), dtype=D)),
    "linearize": pushed,
    "linearize of a method": lambda m: linearize(m.energy, X)[1](C),
    "jvp": lambda m: jvp(m, (X,), (C,)),
    "grad": lambda m: grad(m.energy)(X),
    "vmap": lambda m: vmap(m)(X),
    "hessian of a method": lambda m: hessian(m.energy)(X),
    "jacrev": lambda m: vmap(jacrev(m))(X),
}


def alike(way, m):
    found = way(m)
    on, forall.config.replay = forall.config.replay, False
    wanted = way(m)
    forall.config.replay = on
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("trained", [True, False])
def test_each_call_is_the_functions(name, trained, model, hits):
    model.requires_grad_(trained)
    for i in range(9):
        alike(WAYS[name], model)
        with torch.no_grad():
            model.first.weight.add_(0.1 * i)
    assert hits


@pytest.mark.parametrize("name", ["vjp", "linearize", "linearize of a method"])
def test_parameters_that_an_optimizer_steps(name, model, hits):
    other = copy.deepcopy(model)
    losses = []
    for m, on in ((model, forall.config.replay), (other, False)):
        forall.config.replay = on
        optimizer = torch.optim.Adam(m.parameters(), lr=0.01)
        losses.append([])
        for _ in range(9):
            found = forall._compat.pytree.get_leaves(WAYS[name](m))
            loss = sum(y.square().sum() for y in found)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.detach())
    torch.testing.assert_close(*losses, rtol=1e-9, atol=1e-9)
    assert hits


def test_what_is_set_on_a_module_is_seen(model, hits):
    for i in range(4):
        for _ in range(6):
            alike(WAYS["vjp"], model)
            alike(WAYS["linearize of a method"], model)
        if i == 0:
            model.scale = 3.0
        elif i == 1:
            model.first = nn.Linear(3, 4, dtype=D)
        else:
            model.second.register_forward_hook(lambda m, args, y: y * 2)
    assert hits


def test_the_module_is_let_go(hits):
    m = Network().requires_grad_(False)
    for _ in range(6):
        vjp(m, X)[1](C)
        linearize(m.energy, X)[1](C)
    assert hits
    gone = weakref.ref(m)
    del m
    gc.collect()
    assert gone() is None


def test_methods_are_told_apart(model):
    model.requires_grad_(False)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.first.weight.mul_(2)
    for _ in range(6):
        for m in (model, other, copy.copy(model)):
            alike(WAYS["linearize"], m)
            alike(WAYS["linearize of a method"], m)


def test_copies_and_files_know_nothing_of_it(model):
    model.requires_grad_(False)
    for _ in range(6):
        vjp(model, X)[1](C)
    written = pickle.dumps(model)
    assert b"forall" not in written.replace(b"__forall_further__", b"")
    read = pickle.loads(written)  # noqa: S301 - just written
    for m in (read, copy.deepcopy(model)):
        for _ in range(6):
            alike(WAYS["vjp"], m)


class Law:
    """An object of the user's that is no module: its attributes are what they are."""

    def __init__(self):
        self.rate = torch.ones(3, dtype=D)

    def value(self, x):
        return (x * self.rate).sin()

    def total(self):
        return sum(v.sum() for v in vars(self).values())


def test_other_objects_are_left_alone():
    law = Law()
    for i in range(6):
        law.rate.fill_(i)
        alike(lambda law: linearize(law.value, X)[1](C), law)
        alike(lambda law: vjp(law.value, X)[1](C), law)
    assert law.total() == 15
