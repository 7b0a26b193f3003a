"""Programs whose conversion fails by an error of its own."""

import pytest
import torch

import forall
from divergence.objects import attribute_written_in_a_branch
from divergence.test_random_programs import obstacles

D = torch.float64


@pytest.mark.xfail(strict=True, reason="an attribute of some examples is read for all of them")
def test_an_attribute_of_some_examples_alone():
    x = torch.linspace(-1.5, 1.5, 13, dtype=D)
    y = torch.linspace(1, -1.3, 13, dtype=D).roll(4)
    with obstacles() as met:
        forall.vmap(attribute_written_in_a_branch)(x, y)
    assert not any(why.is_internal for why in met)
