"""Functions whose examples diverge give what the loop gives."""

from __future__ import annotations

import pytest

from divergence.functions import CASES
from divergence.truth import by_loop, by_vmap, copies
from oracle import difference

SIZES = (1, 2, 13, 40, 256)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_values_and_what_is_left_in_the_arguments(name, size):
    case = CASES[name]
    stacks = case.stacks(size, seed=size % 7)
    mine, theirs = copies(stacks), copies(stacks)
    truth = by_loop(case, theirs)
    told = difference(by_vmap(case, mine), truth)
    assert told is None, told
    left = difference(mine, theirs)
    assert left is None, f"arguments after the call: {left}"


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", CASES)
def test_in_chunks(name):
    case = CASES[name]
    mine, theirs = copies(case.stacks(11, seed=3)), copies(case.stacks(11, seed=3))
    truth = by_loop(case, theirs)
    told = difference(by_vmap(case, mine, chunk_size=4), truth)
    assert told is None, told
    assert difference(mine, theirs) is None
