"""Sums over examples of outer products become one product of matrices, where nobody can tell."""

import pytest
import torch
from torch import nn

import forall
from forall import grad, jit, vmap
from forall._programs import sums
from forall._programs.recording import record
from forall._torch import trees

D = torch.float64


@pytest.fixture(autouse=True)
def worth(monkeypatch):
    monkeypatch.setattr(sums, "WORTH", 1)


def names(f, *args):
    made = record(f, *trees.flatten((args, {})))
    assert made.recorded is not None, made.why
    return [node.op.overloadpacket.__name__ for node in made.recorded.program.nodes]


def given(*shape, dtype=D):
    return torch.randn(*shape, dtype=D).to(dtype)


A, B, C, E = given(7, 3), given(7, 4), given(7, 3), given(7, 4)


def outer(a, b):
    return a[:, :, None] * b[:, None, :]


TAKEN = {
    "one": lambda a, b, c, e: outer(a, b).sum(0),
    "the other way round": lambda a, b, c, e: (b[:, None, :] * a[:, :, None]).sum(0),
    "its transpose": lambda a, b, c, e: outer(a, b).mT.sum(0),
    "twice turned": lambda a, b, c, e: outer(a, b).mT.mT.sum(0),
    "two": lambda a, b, c, e: (outer(a, b) + outer(c, e)).sum(0),
    "one of them turned": lambda a, b, c, e: (outer(a, b) + outer(e, c).mT).sum(0),
    "three": lambda a, b, c, e: (outer(a, b) + (outer(c, e) + outer(c, b)).mT.mT).sum(0),
    "of what was computed": lambda a, b, c, e: outer(a.sin(), (b * e)).sum(0) * 2,
    "float32": lambda a, b, c, e: outer(a.float(), b.float()).sum(0),
    "by vmap": lambda a, b, c, e: vmap(torch.outer)(a, b).sum(0),
}
LEFT = {
    "another axis": lambda a, b, c, e: outer(a, b).sum(1),
    "all of it": lambda a, b, c, e: outer(a, b).sum(),
    "kept axes": lambda a, b, c, e: outer(a, b).sum(0, keepdim=True),
    "read twice": lambda a, b, c, e: (p := outer(a, b)).sum(0) * p[0],
    "returned": lambda a, b, c, e: ((p := outer(a, b)), p.sum(0)),
    "whole numbers": lambda a, b, c, e: outer(a.long(), b.long()).sum(0),
    "to another dtype": lambda a, b, c, e: outer(a.float(), b.float()).sum(0, dtype=D),
    "two dtypes": lambda a, b, c, e: outer(a.float(), b).sum(0),
    "scaled": lambda a, b, c, e: torch.add(outer(a, b), outer(c, e), alpha=2).sum(0),
    "with a matrix": lambda a, b, c, e: (outer(a, b) + a[0][:, None]).sum(0),
    "written into": lambda a, b, c, e: written(a.clone(), b),
    "entries": lambda a, b, c, e: (a[:, :, None] * c[:, :, None]).sum(0),
}


def written(a, b):
    p = outer(a, b)
    a.zero_()
    return p.sum(0), a


@pytest.mark.parametrize("name", TAKEN)
def test_it_is_one_product(name):
    f = TAKEN[name]
    found = names(f, A, B, C, E)
    assert {"mm", "addmm"} & {*found}
    assert "sum" not in found
    check(f)


@pytest.mark.parametrize("name", LEFT)
def test_it_stays(name):
    assert not {"mm", "addmm"} & {*names(LEFT[name], A, B, C, E)}
    check(LEFT[name])


def check(f):
    g = jit(f)
    for i in range(3):
        args = [t * (i + 1) for t in (A, B, C, E)]
        for found, wanted in zip(trees.leaves(g(*args)), trees.leaves(f(*args)), strict=True):
            assert found.stride() == wanted.stride()
            torch.testing.assert_close(found, wanted)


def test_small_sums_stay_as_they_are(monkeypatch):
    monkeypatch.undo()
    assert "mm" not in names(TAKEN["one"], A, B, C, E)


@pytest.mark.parametrize("penalty", [lambda s: (s.norm(dim=1) - 1).square().mean(), torch.sum])
def test_a_gradient_penalty(penalty, monkeypatch):
    monkeypatch.setattr(forall.config, "patience", 0)
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(2, 5), nn.LeakyReLU(0.2), nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1)
    ).to(D)
    for _ in range(5):
        x = given(8, 2)
        loss = penalty(vmap(grad(lambda v: net(v).sum()))(x))
        found = torch.autograd.grad(loss, [*net.parameters()][:-1], allow_unused=True)
        leaf = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(net(leaf).sum(), leaf, create_graph=True)
        wanted = torch.autograd.grad(
            penalty(slope), [*net.parameters()][:-1], allow_unused=True, materialize_grads=True
        )
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(torch.zeros_like(b) if a is None else a, b)
