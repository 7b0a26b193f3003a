"""What numpy answers depends on the numbers: no call that asks it can be replayed."""

import numpy as np
import pytest
import torch

from forall import grad, jit, vmap

ROWS = torch.arange(1.0, 13.0, dtype=torch.float64).reshape(3, 4) / 7
pytestmark = [
    pytest.mark.filterwarnings("ignore:vmap. numpy runs"),
    pytest.mark.filterwarnings("ignore:jit"),
    pytest.mark.filterwarnings("ignore:__array_wrap__"),
]


def of_integers(x):
    return x * np.sqrt((x.detach() * 7).long() + 1)


def of_fractions(x):
    return x * np.spacing(x.detach()) * 1e15


def of_a_number(x):
    return x * torch.as_tensor(np.sqrt((x.detach() * 7).long()[0] + 1))


def of_two(x):
    return x * np.hypot((x.detach() * 7).long(), torch.arange(4))


FUNCTIONS = pytest.mark.parametrize("f", [of_integers, of_fractions, of_a_number, of_two])


@FUNCTIONS
def test_calls_that_may_be_replayed(f, at_once):
    values, slopes = vmap(f), vmap(grad(lambda x: f(x).sum()))
    for i in range(1, 7):
        xs = ROWS * i
        torch.testing.assert_close(values(xs), torch.stack([f(x) for x in xs]))
        leaf = xs.clone().requires_grad_()
        want = torch.autograd.grad(sum(f(x).sum() for x in leaf), leaf)[0]
        torch.testing.assert_close(slopes(xs), want)


@FUNCTIONS
def test_under_jit(f):
    values = jit(vmap(f))
    for i in range(1, 4):
        torch.testing.assert_close(values(ROWS * i), torch.stack([f(x) for x in ROWS * i]))
