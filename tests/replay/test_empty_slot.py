"""Without automatic replay all transforms run eagerly, and `jit` works."""

import pytest
import torch

import forall
from forall import grad, hessian, jacrev, jit, jvp, linearize, vjp, vmap
from forall._api.execution import transform_decorator

X = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(3, 2)


def loss(x):
    return (x.sin() * x).sum()


TRANSFORMS = {
    "vmap": lambda: vmap(loss)(X),
    "grad": lambda: grad(loss)(X),
    "per_example_grad": lambda: vmap(grad(loss))(X),
    "vmap_of_a_fresh_closure": lambda: vmap(lambda x: x * X[0])(X),
    "branches": lambda: vmap(lambda x: x if x.sum() > 0 else -x)(X),
    "jacrev": lambda: jacrev(torch.sin)(X[0]),
    "hessian": lambda: vmap(hessian(loss))(X),
    "vjp": lambda: vjp(loss, X)[1](torch.tensor(1.0, dtype=torch.float64))[0],
    "jvp": lambda: jvp(loss, (X,), (X,))[1],
    "linearize": lambda: linearize(loss, X)[1](X),
}


@pytest.fixture
def empty_slot(monkeypatch):
    monkeypatch.setattr(transform_decorator.slot, "make_finder", None)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transform_with_empty_slot_equals_the_replayed_one(name, monkeypatch):
    wanted = TRANSFORMS[name]()
    with monkeypatch.context() as patch:
        patch.setattr(transform_decorator.slot, "make_finder", None)
        found = [TRANSFORMS[name]() for _ in range(4)]
    assert all(torch.equal(x, wanted) for x in found)


def test_jit_with_empty_slot_records_and_replays(empty_slot):
    f = jit(vmap(grad(loss)))
    wanted = vmap(grad(loss))(X)
    assert all(torch.equal(f(X), wanted) for _ in range(3))
    assert f.cache_info()[:2] == (2, 1)


def test_no_call_is_recorded_with_empty_slot(empty_slot, monkeypatch):
    monkeypatch.setattr(forall.config, "replay", "check")
    ran = []

    def noting(x):
        ran.append(x)
        return x.sin()

    f = vmap(noting)
    for _ in range(5):
        f(X)
    assert len(ran) == 5
    assert vars(f)["__forall_transform__"].calls() is None


def test_explain_with_empty_slot_says_nothing_of_replay(empty_slot):
    assert forall.explain(vmap(loss))(X).replay == ""
