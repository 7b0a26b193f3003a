"""Functions that a transform calls run converted where examples diverge: nothing is run again."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import forall
from forall import (
    grad,
    hessian,
    hessian_diag,
    hvp,
    jacfwd,
    jacrev,
    jvp,
    laplacian,
    linearize,
    vjp,
    vmap,
)
from forall._api.execution import strategy
from forall._divergence.vmap_interface import interface
from oracle import difference, loop

D = torch.float64
XS = torch.linspace(-1.7, 1.9, 36, dtype=D).reshape(3, 12).T.contiguous()


def f(v):
    if v.sum() > 0:
        return (v * v).sin().sum()
    steps = 0
    while steps < 4 and v.abs().sum() < 3:
        v = v * 1.1
        steps += 1
    return (v**3).sum()


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.5, -1.0, 2.0], dtype=D))

    def forward(self, v):
        h = v * self.w
        h = h.sin() if h.sum() > 0 else h * 3
        return h.sum()


class Has:
    def method(self, v):
        return f(v) * 2


MODULE, GRADIENT = Branching(), grad(f)
FUNCTIONS = {
    "grad": GRADIENT,
    "grad of a lambda": grad(lambda v: f(v) * 2),
    "grad of a method": grad(Has().method),
    "grad of a module": grad(MODULE),
    "grad of a partial": grad(functools.partial(lambda a, v: f(v) * a, 2.0)),
    "a gradient made outside": lambda v: GRADIENT(v) * 2,
    "grad of grad": grad(lambda v: grad(f)(v).sum()),
    "jacrev": jacrev(lambda v: v * f(v)),
    "jvp": lambda v: jvp(f, (v,), (torch.ones_like(v),)),
    "vjp": lambda v: vjp(f, v)[1](torch.ones((), dtype=D)),
    "hvp": lambda v: hvp(f)(v, v.cos()),
    "laplacian": laplacian(f),
    "hessian_diag": hessian_diag(f),
}


def wave(v):
    return (v * v).sin().sum() * v[0]


# Transforms that run while some examples alone are in a loop.
IN_LOOPS = {
    "grad": grad(wave),
    "grad of a module": grad(lambda v: forall.functional_call(nn.Sequential(), {}, (v,)).prod()),
    "hvp": lambda v: hvp(wave)(v, v.cos()),
    "hessian": hessian(wave),
    "hessian_diag": hessian_diag(wave),
    "laplacian": laplacian(wave),
    "jacrev": jacrev(torch.sin),
    "jacfwd": jacfwd(torch.sin),
    "jvp": lambda v: jvp(wave, (v,), (v.cos(),))[1],
    "vjp of grad": lambda v: vjp(grad(wave), v)[1](v)[0],
    "linearize": lambda v: linearize(grad(wave), v)[1](v),
    "vmap": vmap(lambda a: a.sin() * a),
    "scan": lambda v: forall.scan(lambda c, a: (c + a, c * a), v.sum(), v)[1],
    "while_loop": lambda v: forall.while_loop(lambda a: a.sum() > 9, lambda a: a / 2, v),
}


@pytest.fixture
def again(monkeypatch):
    """How often anything was run in groups."""
    times = []
    in_groups, rerun = strategy.run_in_groups, interface.run_per_group

    def counted(call):
        times.append("call")
        return in_groups(call)

    def joined(call, join):
        return rerun(call, lambda parts: times.append("part") or join(parts))

    monkeypatch.setattr(strategy, "run_in_groups", counted)
    monkeypatch.setattr(interface, "run_per_group", joined)
    return times


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nothing_is_run_again(name, again):
    run = FUNCTIONS[name]
    told = difference(vmap(run)(XS), loop(run)(XS))
    assert told is None, told
    assert not again


@pytest.mark.parametrize("name", IN_LOOPS)
def test_nothing_is_run_again_in_a_loop_that_some_have_left(name, again):
    def halve(v):
        total = torch.zeros_like(v)
        while v.norm() > 0.5:
            total = total + IN_LOOPS[name](v).sum()
            v = v / 2
        return total

    told = difference(vmap(halve)(XS), loop(halve)(XS))
    assert told is None, told
    assert not again


@pytest.mark.parametrize(
    "run",
    [
        hessian(f),
        lambda v: forall.functional_call(MODULE, dict(MODULE.named_parameters()), (v,)),
        lambda v: forall.cond(v[0] > 0, f, MODULE, v),
        lambda v: forall.scan(lambda c, a: (c + a if a > 0 else c * a, c), v.sum(), v),
    ],
)
def test_the_same_as_the_loop(run):
    told = difference(vmap(run)(XS), loop(run)(XS))
    assert told is None, told
