"""Calls are replayed on the device as on the CPU, by what they were seen to run."""

import linecache
import sys
from types import ModuleType

import pytest
import torch

import forall
from device import fakedev
from forall import grad, vmap
from forall._auto_replay.replayed_calls import get_transform_calls

D = fakedev.NAME
# `print` has no part in what is seen to run, and cannot be watched where it has. The factor is read
# in the backward pass alone.
SOURCE = """
import torch
NEVER, FACTOR = False, [2.0]
class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sin()
    @staticmethod
    def backward(ctx, g):
        if NEVER: print()
        return g * FACTOR[0]
def f(x):
    if NEVER: print()
    return Scaled.apply(x * 3).sum()
"""


@pytest.fixture
def code():
    m = ModuleType(f"on_device_{len(linecache.cache)}")
    sys.modules[m.__name__] = m
    lines = SOURCE.splitlines(keepends=True)
    linecache.cache[m.__name__] = len(SOURCE), None, lines, m.__name__
    exec(compile(SOURCE, m.__name__, "exec"), vars(m))  # noqa: S102
    yield m
    del sys.modules[m.__name__]


@pytest.mark.parametrize("transform", [grad, lambda f: vmap(grad(f))])
@pytest.mark.parametrize("device", ["cpu", D])
def test_what_runs_in_the_backward_pass_is_seen(code, transform, device, monkeypatch):
    monkeypatch.setattr(forall.config, "replay", True)
    monkeypatch.setattr(forall.config, "patience", 0)
    g, x = transform(code.f), torch.ones(2, 3, device=device)
    for _ in range(10):
        assert (g(x) == 6).all()
    replays = get_transform_calls(g).replays
    assert replays is not None
    assert replays.hits
    code.FACTOR[0] = 5.0
    assert (g(x) == 15).all()
