"""Thousands of calls of nested transforms, a third of which raise, leave nothing behind.

Memory is counted as Python's live objects and as the process's resident set; the modes and the
switches of torch are compared one by one. FORALL_CALLS says how many: 3000, and 1000 in the sample.
"""

import gc
import os
import random
from pathlib import Path

import pytest
import torch

import forall
from forall import grad, jacfwd, jacrev, jvp, linearize, vjp, vmap
from laws.test_nothing_is_lost import state
from sampling import SAMPLED

D = torch.float64
FEW = "1000" if SAMPLED else "3000"
CALLS = int(os.environ.get("FORALL_CALLS") or FEW)
W = torch.tensor([0.3, -0.2], dtype=D, requires_grad=True)


class OnPurposeError(Exception):
    pass


class Old(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x.cos()


def local(x):
    room = torch.zeros(2, dtype=D)
    room.copy_(x * W)
    return room


def inner_step(x):
    p = torch.zeros(2, dtype=D, requires_grad=True)
    (p * x.detach()).sum().backward()
    return x * p.grad


BODIES = [
    lambda x: (x * W).sin(),
    local,
    Old.apply,
    inner_step,
    lambda x: x[(x[0] > 0).long()] * x,
    lambda x: torch.utils.checkpoint.checkpoint(torch.exp, x, use_reentrant=False),
    lambda x: x + forall.random.normal(forall.random.key(0), (2,)),
    lambda x: torch.linalg.solve(torch.diag(x + 4), x),
]

VERBS = [
    lambda f: lambda x: vmap(f)(torch.stack([x, x * 2])).sum(0),
    lambda f: lambda x: vmap(f, chunk_size=1)(torch.stack([x, x * 2])).sum(0),
    lambda f: grad(lambda x: f(x).sum()),
    lambda f: lambda x: jvp(f, (x,), (x,))[1],
    lambda f: lambda x: vjp(f, x)[1](x)[0],
    lambda f: lambda x: jacrev(f)(x).sum(0),
    lambda f: lambda x: jacfwd(f)(x).sum(0),
    lambda f: lambda x: linearize(f, x)[1](x),
]

FAILURES = [
    lambda x: x @ torch.ones(3, dtype=D),
    lambda x: x.expand(3),
    lambda x: W.add_(x),
    lambda x: torch.linalg.cholesky(torch.diag(-x.abs() - 1)),
    lambda x: vmap(lambda a, b: a + b)(x, torch.ones(3)),
    lambda x: grad(lambda y: y)(x),
]


def failing(x):
    raise OnPurposeError


def breaking(body, broken):
    return lambda x: body(x) + broken(x)


def resident():
    """Bytes of memory that the process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def run(calls, seed):
    draw = random.Random(seed)
    raised = 0
    x = torch.tensor([0.5, -0.7], dtype=D)
    for _ in range(calls):
        body = draw.choice(BODIES)
        fails = draw.random() < 1 / 3
        if fails:
            body = breaking(body, draw.choice([failing, *FAILURES]))
        for verb in draw.choices(VERBS, k=draw.choice((1, 2, 2))):
            body = verb(body)
        try:
            y = body(x)
            if draw.random() < 0.3 and y.requires_grad:
                torch.autograd.grad(y.sum(), W, allow_unused=True)
        except Exception:
            assert fails
            raised += 1
        else:
            assert not fails
    return raised


def growth():
    """How many calls raised, and the live objects and bytes that all calls left."""
    gc.collect()
    objects, memory = len(gc.get_objects()), resident()
    raised = run(CALLS, 2)
    gc.collect()
    return raised, len(gc.get_objects()) - objects, resident() - memory


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
def test_thousands_of_calls_leave_nothing_behind(monkeypatch):
    monkeypatch.setattr(forall.config, "patience", 0)  # what is replayed is recorded at once
    before = state()
    run(CALLS, 2)  # what these calls make once is made: caches of rules, of the allocator
    raised, objects, memory = growth()
    if objects >= 500 or memory >= 20e6:  # something that is made once, or each time?
        raised, objects, memory = growth()
    assert 0.3 < raised / CALLS < 0.37
    assert state() == before
    assert objects < 500
    assert memory < 20e6
    assert W.grad is None
    assert difference_of_a_plain_call() is None


def difference_of_a_plain_call():
    """Torch computes as ever."""
    x = torch.tensor([0.5, -0.7], dtype=D, requires_grad=True)
    (found,) = torch.autograd.grad((x * W).sin().sum(), x)
    expected = (x * W).cos() * W
    return None if torch.equal(found, expected) else (found, expected)
