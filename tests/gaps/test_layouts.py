"""Results that lie in memory otherwise than in the loop, so that a view of them is a copy here."""

import pytest
import torch
from torch.nn import functional as F

from forall import vmap


def doubled(y):
    y.reshape(-1).mul_(2)
    return y


@pytest.mark.xfail(strict=True, reason="a decomposition keeps the order of dims, the kernel not")
@pytest.mark.parametrize("f", [lambda x: F.logsigmoid(x.t()), lambda x: F.one_hot(x.t().long(), 2)])
def test_kernels_that_lay_their_result_out_in_a_row(f):
    xs = torch.ones(2, 3, 4)
    right = torch.stack([doubled(f(x)) for x in xs])
    torch.testing.assert_close(vmap(lambda x: doubled(f(x)))(xs), right)


@pytest.mark.xfail(strict=True, reason="copies with the gaps that an argument has")
@pytest.mark.parametrize(
    "f", [lambda x: x.select_scatter(x[0], 0, 1), lambda x: x.slice_scatter(x[:1], 0, 1, 2)]
)
def test_copies_with_gaps(f):
    xs = torch.ones(3, 2, 4)
    right = torch.stack([doubled(f(x)) for x in xs.unbind(1)])
    torch.testing.assert_close(vmap(lambda x: doubled(f(x)), 1)(xs), right)
