"""``torch.tensor([x, ..])`` of numbers of a transform's: a constant, as it is of plain tensors."""

import pytest
import torch
from torch.autograd import forward_ad

from forall import grad, jit, jvp, linearize, vmap

XS = torch.tensor([[1.0, 2.0], [2.0, 3.0], [3.0, 1.0]])
MADE = {
    "one number": lambda x: torch.tensor([x.sum(), 1.0]) * x,
    "of rows": lambda x: torch.tensor([[x[0], 1.0], [2, x[1]]]) @ x,
    "in a dtype": lambda x: torch.tensor([x[0], x[1]], dtype=torch.float64) * x,
    "whole": lambda x: torch.tensor([x.long().sum(), 1]) * x,
    "yes or no": lambda x: torch.tensor([x.sum() > 3, False]) * x,
    "complex": lambda x: (torch.tensor([x.sum() * 1j, 2.0]) * x).abs(),
    "as_tensor": lambda x: torch.as_tensor([x.sum(), 1.0]) * x,
    "new_tensor": lambda x: x.new_tensor([x.sum(), 1.0]) * x,
    "that no example has": lambda x: torch.tensor([torch.ones(2).sum(), 1.0]) * x,
    "no list": lambda x: torch.tensor(x.sum()) * x,
    "under a gradient": lambda x: grad(lambda y: (torch.tensor([y.sum(), 1.0]) * y * y).sum())(x),
}
pytestmark = [
    pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad:UserWarning"),
    pytest.mark.filterwarnings("ignore::forall.PerformanceWarning"),
]


def by_torch(f, x, t):
    with forward_ad.dual_level():
        return tuple(forward_ad.unpack_dual(f(forward_ad.make_dual(x, t))))


def along(linear, t):
    y, push = linear
    return y, push(t)


@pytest.mark.parametrize("name", MADE)
def test_they_are_constants_to_forward_mode(name):
    f = MADE[name]
    if name == "under a gradient":  # which by hand has a factor of two
        truth = [by_torch(lambda x: 2 * MADE["one number"](x), x, x.cos()) for x in XS]
    else:
        truth = [by_torch(f, x, x.cos()) for x in XS]
    ys, ts = (torch.stack(column) for column in zip(*truth, strict=True))
    for found in (
        [jvp(f, (x,), (x.cos(),)) for x in XS],
        [along(linearize(f, x), x.cos()) for x in XS],
        [jvp(lambda x: jvp(f, (x,), (x,))[0], (x,), (x.cos(),)) for x in XS],
    ):
        torch.testing.assert_close(
            tuple(torch.stack(c) for c in zip(*found, strict=True)), (ys, ts)
        )
    torch.testing.assert_close(jvp(vmap(f), (XS,), (XS.cos(),)), (ys, ts))
    torch.testing.assert_close(vmap(lambda x: jvp(f, (x,), (x.cos(),)))(XS), (ys, ts))


@pytest.mark.parametrize("name", MADE)
def test_a_program_does_not_keep_them(name):
    pushed = jit(lambda x: jvp(MADE[name], (x,), (x.cos(),)))
    for x in (*XS, *XS):
        torch.testing.assert_close(pushed(x), jvp(MADE[name], (x,), (x.cos(),)))
