"""Examples that part while a generator runs: what it has given is not to be had again."""

from __future__ import annotations

import pytest
import torch

from forall import vmap
from oracle import difference, stack_trees

XS = 2.0 ** torch.arange(6)


def halves(x):
    while x > 1:
        x = x / 2
        yield x


def summed(x):
    return sum(list(halves(x)), x)


def in_a_branch(x):
    if x > 2:
        for y in halves(x):
            x = x + y
    return x


def next_one(x):
    it = halves(x)
    return x + next(it, 0)


def next_in_a_loop(x):
    if x > 2:
        it, n = iter(halves(x)), 0
        while next(it, None) is not None:
            n = n + 1
        return x * n
    return x


def mapped(x):
    return sum((2 * y for y in halves(x)), x)


def by_map(x):
    return sum(map(torch.neg, halves(x)), x)


def in_pairs(x):
    return sum((a for a, _ in zip(halves(x), halves(x / 2), strict=False)), x)


@pytest.mark.parametrize(
    "f", [summed, in_a_branch, next_one, next_in_a_loop, mapped, by_map, in_pairs]
)
def test_each_example_gets_all_that_its_generator_gives(f):
    truth = stack_trees([f(x) for x in XS])
    for _ in range(2):  # as it is first; at once in its converted form then
        assert (found := difference(vmap(f)(XS), truth)) is None, found
