"""A tangent that all examples share is written by those in a branch for themselves alone."""

from __future__ import annotations

import pytest
import torch

from forall import hessian, jacfwd, jvp, linearize, vmap
from oracle import difference, loop

D = torch.float64
XS = torch.tensor([[1.0, 2.0], [-1.0, -2.0], [0.5, 0.25]], dtype=D)
WS = torch.tensor([0.5, -1.0, 2.0, 3.0], dtype=D)
ONES = torch.ones(2, dtype=D)


def doubled(x):
    x += x


def one_entry(x):
    x[0] = x[1]


def one_more(x):
    x[0] += x[1]


def a_sum(x):
    x += x.sum()


def a_view(x):
    x[:1].mul_(3)


def twice(x):
    x *= 3
    if x[0] > 2:
        x[1] -= x[0]


def in_steps(x):
    while x[0] < 3:
        x *= 2


def only_some(write):
    def f(x):
        x = x.clone()
        if x.sum() > 0:
            write(x)
        else:
            x[1] *= 2
        return x * x

    return f


def halved(x):
    while x[0] > 0.6:
        x = x / 2
    return x * x


def of_two_branches(x):
    y = x * 3 if x.sum() > 0 else x * x[0]
    return y * x


def left_early(x):
    for n in range(3):
        if x[n % 2] > 1:
            return x * n
        x = x * x + n
    return x


READS = [halved, of_two_branches, left_early]
WRITES = [only_some(w) for w in (doubled, one_entry, one_more, a_sum, a_view, twice, in_steps)]
TAKEN = {
    "jvp": lambda f: lambda x: jvp(f, (x,), (ONES,)),
    "jacfwd": jacfwd,
    "linearize": lambda f: lambda x: linearize(f, x)[1](ONES),
    "hessian": lambda f: hessian(lambda x: f(x).sum()),
    "jvp of jvp": lambda f: lambda x: jvp(lambda y: jvp(f, (y,), (ONES,))[1], (x,), (ONES,)),
    "vmap of jvp": lambda f: lambda x: vmap(lambda w: jvp(lambda y: f(y * w), (x,), (ONES,)))(WS),
    "jvp of vmap": lambda f: lambda x: jvp(vmap(lambda w: f(x * w)), (WS,), (torch.ones_like(WS),)),
}


@pytest.mark.parametrize("taken", TAKEN)
@pytest.mark.parametrize("f", WRITES)
def test_what_some_write_is_theirs(f, taken):
    derived = TAKEN[taken](f)
    told = difference(vmap(derived)(XS), loop(derived)(XS))
    assert told is None, told


@pytest.mark.parametrize("taken", TAKEN)
@pytest.mark.parametrize("f", READS)
def test_each_example_goes_its_way_with_it(f, taken):
    derived = TAKEN[taken](f)
    told = difference(vmap(derived)(XS), loop(derived)(XS))
    assert told is None, told


@pytest.mark.parametrize("f", WRITES)
def test_the_tangent_from_outside_is_as_it_was(f):
    t = torch.ones(2, dtype=D)
    vmap(lambda x: jvp(f, (x,), (t,)))(XS)
    torch.testing.assert_close(t, ONES)
