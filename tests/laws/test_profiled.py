"""torch.profiler names the calls of transforms, and what they run lies within."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import forall

X = torch.linspace(-1, 1, 12).reshape(4, 3)


def energy(x):
    return x.sin().prod()


CALLS = {
    "vmap(energy)": lambda: forall.vmap(energy)(X),
    "grad(energy)": lambda: forall.grad(energy)(X),
    "jacrev(sin)": lambda: forall.jacrev(torch.sin)(X[0]),
    "jacfwd(sin)": lambda: forall.jacfwd(torch.sin)(X[0]),
    "hessian(energy)": lambda: forall.hessian(energy)(X[0]),
    "laplacian(energy)": lambda: forall.laplacian(energy)(X[0]),
    "jvp(energy)": lambda: forall.jvp(energy, (X,), (X,)),
    "vjp(energy)": lambda: forall.vjp(energy, X),
    "linearize(energy)": lambda: forall.linearize(energy, X),
}


def spans(call):
    with profile(activities=[ProfilerActivity.CPU]) as found:
        call()
    return {event.name: event for event in (found.events() or ())}


@pytest.mark.parametrize("name", CALLS)
def test_a_profile_names_the_call(name, monkeypatch):
    monkeypatch.setattr(forall.config, "replay", False)  # a program may take sin in place
    found = spans(CALLS[name])
    span = found[f"forall.{name}"].time_range
    inside = found["aten::sin"].time_range
    assert span.start <= inside.start <= inside.end <= span.end


def test_replayed_calls_are_named_too(monkeypatch):
    monkeypatch.setattr(forall.config, "patience", 0)
    f = forall.vmap(forall.grad(energy))
    for _ in range(4):
        f(X)
    assert "forall.vmap(energy)" in spans(lambda: f(X))


def test_nothing_is_named_without_a_profiler(monkeypatch):
    def fail(*_):
        raise AssertionError

    monkeypatch.setattr("forall._compat.profiler.make_span", fail)
    forall.vmap(energy)(X)
    forall.jvp(energy, (X,), (X,))
