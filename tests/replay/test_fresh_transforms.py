"""Transforms that are made anew with each call: what they share is counted, and replayed."""

import copy
import functools
import gc
import weakref

import pytest
import torch

import forall
from forall import grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap
from forall._core.config import parse_replay

pytestmark = pytest.mark.usefixtures("at_once")
D = torch.float64
X = torch.linspace(0.1, 1, 12, dtype=D).reshape(4, 3)


def made():
    def f(x, y=2.0):
        return (x.sin() * y).prod() + x.sum() * y

    return f


WAYS = {
    "grad": lambda f, x: grad(f)(x[0]),
    "vmap of grad": lambda f, x: vmap(grad(f))(x),
    "vmap of vmap": lambda f, x: vmap(vmap(f))(x),
    "jacrev of grad": lambda f, x: jacrev(grad(f))(x[0]),
    "vmap of hessian": lambda f, x: vmap(hessian(f))(x),
    "jacfwd": lambda f, x: jacfwd(f, randomness="same")(x[1]),
    "jvp": lambda f, x: jvp(f, (x[0],), (x[1],)),
    "jvp of grad": lambda f, x: jvp(grad(f), (x[0],), (x[1],)),
    "vjp": lambda f, x: vjp(f, x[0])[1](x[0, 0]),
    "vjp of grad": lambda f, x: vjp(grad(f), x[0])[1](x[1]),
    "hvp": lambda f, x: forall.hvp(f)(x[0], x[1]),
    "laplacian": lambda f, x: forall.laplacian(f)(x[0]),
    "jacobian": lambda f, x: forall.jacobian(f)(x[0]),
}


@pytest.mark.parametrize("name", WAYS)
def test_calls_are_replayed(name, hits):
    way, f = WAYS[name], made()
    for i in range(6):
        found = way(f, X * i)
        forall.config.replay = False
        expected = way(f, X * i)
        forall.config.replay = True
        torch.testing.assert_close(found, expected)  # prod's pull-back has two formulas in torch
    assert hits


def test_each_has_its_own(hits):
    f = made()
    ways = [
        lambda x: vmap(f)(x),
        lambda x: vmap(f, in_dims=1)(x),
        lambda x: vmap(f, 1, chunk_size=2)(x),
        lambda x: vmap(f, (1,), -1)(x),
        lambda x: vmap(lambda x: f(x))(x),
        lambda x: vmap(grad(f), 1)(x),
        lambda x: vmap(grad(f), 1, 1)(x),
        lambda x: vmap(grad_and_value(f), 1, (1, 0))(x),
        lambda x: vmap(grad_and_value(f, (0,)), 1, ((1,), 0))(x),
        lambda x: vmap(grad(f, argnames="x"))(x),
        lambda x: vmap(vmap(f, 0), 0)(x),
        lambda x: jacrev(f)(x),
        lambda x: jacrev(f, return_value=True)(x),
        lambda x: jvp(f, (x,), (x,)),
        lambda x: jvp(lambda x: (f(x), x), (x,), (x,), has_aux=True),
    ]
    expected = [way(X) for way in ways]
    for _ in range(5):
        for way, known in zip(ways, expected, strict=True):
            torch.testing.assert_close(way(X), known)
    assert hits


def test_numbers_that_equal_each_other_are_told_apart():
    f = lambda x: x.sum()  # noqa: E731
    vmap(f, 1)(X)
    with pytest.raises(ValueError, match="in_dims must be"):
        vmap(f, 1.0)(X)
    for _ in range(4):
        assert grad(f, 0)(X).shape == X.shape
        assert grad(f, (0,))(X)[0].shape == X.shape


def test_what_differs_from_function_to_function(hits):
    for i in range(6):
        x = torch.tensor(float(i))
        f = lambda y, x=x: y * x  # noqa: E731
        assert grad(f)(torch.tensor(1.0)) == i
        assert jvp(lambda y, x=x: y * x, (x,), (x,))[1] == i * i
    assert hits


def test_attributes_that_are_copied_are_another_functions(hits):
    f = lambda x: x.sin()  # noqa: E731
    for _ in range(6):
        vmap(f)(X)

    @functools.wraps(f)
    def other(x):
        return x.cos()

    @functools.wraps(vmap(f))
    def third(x):
        return x.exp()

    for _ in range(6):
        torch.testing.assert_close(vmap(other)(X), X.cos(), rtol=0, atol=0)
        torch.testing.assert_close(vmap(third)(X), X.exp(), rtol=0, atol=0)
    assert hits
    assert copy.deepcopy(f) is f


@pytest.mark.parametrize("patience", [0.0, 100.0])
def test_a_function_that_is_dropped_goes(monkeypatch, patience):
    monkeypatch.setattr(forall.config, "patience", patience)

    class Batch: ...

    def step():
        batch = Batch()
        batch.x = torch.ones(3)
        f = lambda w: (w * batch.x).sum()  # noqa: E731
        for _ in range(4 if patience == 0 else 1):
            vmap(grad(f))(torch.ones(2, 3))
            jvp(f, (torch.ones(3),), (torch.ones(3),))
        return weakref.ref(batch)

    gc.disable()
    try:
        gone = step()
        assert patience == 0 or gone() is None
        gc.collect()
        assert gone() is None
    finally:
        gc.enable()


def test_no_more_than_so_many_transforms_are_kept():
    w = torch.ones(())

    def f(x):
        return x * w

    vars(f)["own"] = True  # it is not one of many that are made anew
    for n in range(1, 60):
        vmap(f, chunk_size=n)(X)
    assert len(vars(f)["__forall_further__"].calls) == 16


def test_nothing_is_kept_where_replay_is_off(monkeypatch):
    monkeypatch.setattr(forall.config, "replay", False)
    f = made()
    vmap(grad(f))(X)
    jvp(f, (X,), (X,))
    assert not vars(f)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomalies_are_errors_as_ever(hits):
    f = grad(lambda x: x.sqrt() * 0)
    for _ in range(6):
        f(torch.tensor(1.0))
    assert hits
    with (
        torch.autograd.detect_anomaly(check_nan=True),
        pytest.raises(RuntimeError, match="returned nan"),
    ):
        f(torch.tensor(0.0))


def test_what_changes_now_and_then_is_recorded_anew(hits):
    rate = {"lr": 1.0}
    step = grad(lambda x: (x * rate["lr"]).sum())
    for i in range(20):
        rate["lr"] = float(i)
        for _ in range(40):
            assert step(torch.ones(2))[0] == i
    assert len(hits) > 600


def test_a_word_for_replay_that_says_nothing():
    assert [parse_replay(word) for word in ("0", "1", "check")] == [False, True, "check"]
    assert parse_replay("") is True  # as `FORALL_REPLAY= python train.py` sets it
    with pytest.raises(ValueError, match=r"FORALL_REPLAY='off' .*\n.*0, 1 or check"):
        parse_replay("off")
