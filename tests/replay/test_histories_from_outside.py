"""Derivatives through the history of a captured tensor: no program serves another history."""

import pytest
import torch

import forall
from forall import grad, jacrev, jit, vmap
from replay.test_fresh_functions import plainly

pytestmark = pytest.mark.usefixtures("at_once")
D = torch.float64
X = torch.linspace(-1, 1, 3, dtype=D, requires_grad=True)
COTANGENTS = torch.arange(12, dtype=D).reshape(4, 3)
GLOBAL = X
# Graphs that save no tensor, so that nothing but the history tells them apart.
HISTORIES = [lambda x: -x, lambda x: 2 * x, lambda x: x + 1, lambda x: x.flip(0), lambda x: x * 1]


def pull(y, g):
    return torch.autograd.grad(y, X, g, retain_graph=True)[0]


def of_a_list(y, g):
    return torch.autograd.grad([y, y.sum()], [X], [g, g.sum()], retain_graph=True)[0]


def of_what_follows(y, v):
    def energy(u):
        z = (y * 1.0).sum()
        return u.sum() * torch.autograd.grad(z, X, retain_graph=True)[0].sum()

    return grad(energy)(v)


def of_both(y, v):
    def energy(u):
        z = (u * y).sum()
        return torch.autograd.grad(z, X, create_graph=True)[0].sum() + u.sum()

    return grad(energy)(v)


WAYS = {
    "mapped": lambda y: vmap(lambda g: pull(y, g))(COTANGENTS),
    "several": lambda y: vmap(lambda g: of_a_list(y, g))(COTANGENTS),
    "in a gradient": lambda y: of_what_follows(y, COTANGENTS[1]),
    "in a mapped gradient": lambda y: vmap(lambda v: of_what_follows(y, v))(COTANGENTS),
    "joined with an argument": lambda y: of_both(y, COTANGENTS[1]),
    "a Jacobian": lambda y: jacrev(lambda g: pull(y, g * g))(COTANGENTS[1]),
}


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("replay", [True, "check"])
def test_each_history_is_its_own(name, replay, monkeypatch):
    monkeypatch.setattr(forall.config, "replay", replay)
    way, ys = WAYS[name], [make(X) for make in HISTORIES]
    wanted = [plainly(way, y) for y in ys]
    for y, right in zip(ys, wanted, strict=True):
        for _ in range(6):
            torch.testing.assert_close(way(y), right, rtol=0, atol=0)
    for i in range(10):
        torch.testing.assert_close(way(ys[i % 5]), wanted[i % 5], rtol=0, atol=0)


def test_a_history_that_a_global_has(monkeypatch):
    for make in HISTORIES:
        monkeypatch.setitem(globals(), "GLOBAL", make(X))
        for _ in range(5):
            found = vmap(pull_global)(COTANGENTS)
            torch.testing.assert_close(found, plainly(vmap(pull_global), COTANGENTS))


def pull_global(g):
    return torch.autograd.grad(GLOBAL, X, g, retain_graph=True)[0]


def test_jit_records_none(monkeypatch):
    monkeypatch.setitem(globals(), "GLOBAL", -X)
    f = jit(vmap(pull_global))
    with pytest.warns(UserWarning, match="takes a derivative through the history of a tensor"):
        torch.testing.assert_close(f(COTANGENTS), -COTANGENTS)
    monkeypatch.setitem(globals(), "GLOBAL", 2 * X)
    torch.testing.assert_close(f(COTANGENTS), 2 * COTANGENTS)


def test_a_history_that_is_not_pulled_back_is_no_obstacle(hits):
    for make in HISTORIES:
        y = make(X)
        for _ in range(5):
            found = grad(lambda v, y=y: (v * y).sin().sum())(COTANGENTS[1])
            torch.testing.assert_close(found, y * (COTANGENTS[1] * y).cos())
    assert hits


def test_nothing_of_a_recording_stays_at_the_history():
    y = X * 1.0
    calls = []

    def make():
        return vmap(lambda g: pull(y, g))

    for _ in range(6):
        make()(COTANGENTS)
    assert "through the history" in str(forall.explain(make())(COTANGENTS))
    y.grad_fn.register_prehook(lambda _: calls.append(1))
    torch.autograd.grad(y.sum(), X, retain_graph=True)
    assert calls == [1]
