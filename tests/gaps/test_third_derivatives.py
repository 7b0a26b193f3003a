"""What goes wrong in third derivatives."""

import pytest
import torch

from forall import hessian, jvp, vmap
from laws.nesting import Cube

D = torch.float64


@pytest.mark.xfail(
    strict=True, reason="a Function's values get an axis of each map that they are taken through"
)
def test_the_tangents_of_mapped_hessians_of_a_function():
    xs = torch.linspace(-1, 2, 6, dtype=D).reshape(3, 2)
    expected = jvp(vmap(hessian(lambda x: x**3)), (xs,), (xs.cos(),))[1]
    torch.testing.assert_close(jvp(vmap(hessian(Cube.apply)), (xs,), (xs.cos(),))[1], expected)
