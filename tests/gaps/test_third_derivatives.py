"""What goes wrong in third derivatives: an error, or torch takes what was saved for constant."""

import pytest
import torch
import torch.nn.functional as F

from forall import grad, hessian, jacrev, jvp, vmap

D = torch.float64


def by_hand(x):
    x = x - x.mean(-1, keepdim=True)
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()


def third(norm):
    def f(x):
        return norm(x).sin().sum()

    return grad(lambda x: grad(lambda x: grad(f)(x).sin().sum())(x).sin().sum())


@pytest.mark.xfail(strict=True, reason="torch's double backward has no backward of its mean")
@pytest.mark.parametrize("batch", [False, True])
def test_three_reverse_passes_through_a_norm(batch):
    x = torch.linspace(0, 1, 6, dtype=D).square().reshape(2, 3)

    def norm(x):
        if batch:
            return F.batch_norm(x.T, None, None, training=True).T
        return F.layer_norm(x, (3,))

    torch.testing.assert_close(third(norm)(x), third(by_hand)(x))


@pytest.mark.xfail(strict=True, reason="torch's double backward takes the saved norm for constant")
def test_two_reverse_passes_through_weight_norm():
    x = torch.linspace(0, 1, 6, dtype=D).square().reshape(2, 3) + 0.1

    def f(x):
        return torch._weight_norm(x, x[:, :1].detach(), 0).sin().sum()

    def by_hand(x):
        return (x[:, :1].detach() * x / x.norm(dim=1, keepdim=True)).sin().sum()

    def second(f):
        return grad(lambda x: grad(f)(x).sin().sum())(x)

    torch.testing.assert_close(second(f), second(by_hand))


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return a**3

    @staticmethod
    def backward(ctx, g):
        return 3 * ctx.saved_tensors[0] ** 2 * g


@pytest.mark.xfail(
    strict=True, reason="a Function's values get an axis of each map that they are taken through"
)
@pytest.mark.parametrize("second", [hessian, lambda f: jacrev(jacrev(f))])
def test_the_tangents_of_mapped_second_derivatives_of_a_function(second):
    xs = torch.linspace(-1, 2, 6, dtype=D).reshape(3, 2)
    expected = jvp(vmap(second(lambda x: x**3)), (xs,), (xs.cos(),))[1]
    torch.testing.assert_close(jvp(vmap(second(Cube.apply)), (xs,), (xs.cos(),))[1], expected)
