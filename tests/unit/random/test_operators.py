"""The operators that random numbers are drawn by keep what torch asks of an operator."""

import pytest
import torch

import forall.random  # noqa: F401  the operators are registered with it


@pytest.mark.parametrize("entries", [1, 4, 40])
def test_threefry_results_have_memory_of_their_own(entries):
    key = torch.tensor(3, dtype=torch.int32)
    counter = torch.arange(entries, dtype=torch.int32)
    given = key, key, counter, counter
    torch.library.opcheck(torch.ops.forall.threefry2x32.default, given, test_utils="test_schema")
