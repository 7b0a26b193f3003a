"""A function that seeds a generator with its example's number draws what it draws in the loop."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from by_groups import EXPECTED
from draws import HERE
from forall import explain, vmap

SEEDS = torch.tensor([3, 0, 7, 1])
pytestmark = EXPECTED


def seeded(s):
    torch.manual_seed(s.item())
    return torch.randn(2)


def seeded_by_a_tensor(s):
    torch.manual_seed(s)
    return torch.rand(3)


def seeded_module(s):
    torch.manual_seed(int(s))
    return nn.Linear(4, 2)(torch.ones(4))


def seeded_twice(s):
    torch.manual_seed(s.item())
    first = torch.randn(2)
    torch.manual_seed(s.item() + 1)
    return first + torch.randn(2)


def some_seeded(s):
    torch.manual_seed(5)
    if s > 1:
        torch.manual_seed(9)
    return torch.randn(2) + s


def generator(s):
    return torch.randn(2, generator=torch.Generator(HERE).manual_seed(s.item()))


def of_python(s):
    random.seed(s.item())
    return torch.tensor(random.random())


def generator_of_python(s):
    return torch.tensor(random.Random(s.item()).random())


def of_numpy(s):
    np.random.seed(s.item())  # noqa: NPY002 - the one that all share
    return torch.tensor(np.random.rand())  # noqa: NPY002


def generator_of_numpy(s):
    return torch.tensor(np.random.default_rng(s.item()).normal())


@pytest.mark.parametrize("randomness", ["different", "same"])
@pytest.mark.parametrize(
    "f",
    [
        seeded,
        seeded_by_a_tensor,
        seeded_module,
        seeded_twice,
        some_seeded,
        generator,
        of_python,
        generator_of_python,
        of_numpy,
        generator_of_numpy,
    ],
)
def test_each_draws_by_its_seed(f, randomness):
    if f is some_seeded and randomness == "different":
        pytest.skip("seeds of two examples are equal, and each is to draw its own")
    want = torch.stack([f(s) for s in SEEDS])
    for _ in range(2):
        assert torch.equal(vmap(f, randomness=randomness)(SEEDS), want)


def test_the_report_says_why_it_is_slow():
    report = str(explain(vmap(seeded, randomness="different"))(SEEDS))
    assert "manual_seed for some examples: all draw from one generator" in report
