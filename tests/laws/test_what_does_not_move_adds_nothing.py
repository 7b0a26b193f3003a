"""An argument without a tangent adds nothing to one, also next to inf and nan."""

import math

import pytest
import torch
from torch.nn import functional as F

from forall import hessian, jacfwd, jacrev, jvp, linearize, vmap

X = torch.tensor([1.0, math.inf, -math.inf, math.nan], dtype=torch.float64)
C = torch.tensor([2.0, 3.0, 4.0, 5.0], dtype=torch.float64)
M = torch.tensor([True, True, False, True])
W = torch.arange(12.0, dtype=torch.float64).view(3, 4) - 5

FUNCTIONS = {
    "times": lambda x: x * C,
    "by": lambda x: x / C,
    "addcmul": lambda x: torch.addcmul(C, x, C),
    "dot": lambda x: torch.dot(x, C),
    "masked mean": lambda x: torch.masked.mean(x, 0, mask=M),
    "in place": lambda x: (x + 0).mul_(C),
    "mv": lambda x: W @ x,
    "mv of the other": lambda x: x.expand(2, 4) @ C,
    "mm": lambda x: W @ x.unsqueeze(1),
    "mm from the right": lambda x: x.unsqueeze(0) @ W.T,
    "bmm": lambda x: torch.bmm(W.expand(2, 3, 4), x.view(4, 1).expand(2, 4, 1)),
    "addmv": lambda x: torch.addmv(C[:3], W, x, beta=2, alpha=3),
    "addmv of two": lambda x: torch.addmv(x[:3], W, x, beta=2, alpha=3),
    "addmm": lambda x: torch.addmm(C[:3], x.unsqueeze(0), W.T, alpha=0.5),
    "baddbmm": lambda x: torch.baddbmm(
        C[:3].view(3, 1), W.expand(2, 3, 4), x.view(4, 1).expand(2, 4, 1), alpha=2
    ),
    "linear": lambda x: F.linear(x, W, C[:3]),
    "a matrix and a sum": lambda x: (W @ x + C[:3]) - C[:3] + torch.zeros(3, dtype=torch.float64),
}


def directions():
    return torch.eye(4, dtype=torch.float64)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_jacfwd_is_linear_functions_matrix(name):
    f = FUNCTIONS[name]
    truth = torch.stack([f(t) - f(0 * t) for t in directions()], -1)
    torch.testing.assert_close(jacfwd(f)(X), truth)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_linearize_is_so_too(name):
    f = FUNCTIONS[name]
    _, push = linearize(f, X)
    for t in directions():
        torch.testing.assert_close(push(t), f(t) - f(0 * t))


@pytest.mark.parametrize("jacobian", [jacfwd, jacrev])
def test_an_entry_of_a_matrix_is_not_multiplied_with_the_zeros_of_others(jacobian):
    w = torch.tensor([[math.inf, 2.0], [3.0, math.nan], [-0.0, 1.0]])
    x = torch.tensor([1.0, 2.0])
    torch.testing.assert_close(jacobian(lambda x: w @ x)(x), w, equal_nan=True)
    found = vmap(jacobian(lambda x: w @ x))(x.expand(3, 2))
    torch.testing.assert_close(found, w.expand(3, 3, 2), equal_nan=True)


@pytest.mark.parametrize("jacobian", [jacfwd, jacrev])
def test_a_jacobian_is_no_name_of_the_matrix(jacobian):
    w = torch.ones(2, 2)
    found = jacobian(lambda x: w @ x)(torch.ones(2))
    found.add_(1)
    assert w.equal(torch.ones(2, 2))


@pytest.mark.parametrize("jacobian", [jacfwd, jacrev])
def test_a_direction_that_is_written_into_is_none_of_the_basis(jacobian):
    w = torch.arange(4.0).view(2, 2)

    def f(x):
        return w @ (x * 1).mul_(3)

    torch.testing.assert_close(jacobian(f)(torch.ones(2)), 3 * w)


@pytest.mark.parametrize("jacobian", [jacfwd, jacrev])
def test_what_is_read_has_a_derivative(jacobian):
    w = torch.randn(3, 2, dtype=torch.float64)
    x = torch.randn(2, dtype=torch.float64)

    def total(w):
        return jacobian(lambda x: (w @ x).sin())(x).square().sum()

    found = jacrev(total)(w)
    truth = jacrev(lambda w: ((w @ x).cos().unsqueeze(1) * w).square().sum())(w)
    torch.testing.assert_close(found, truth)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_tangent_of_each_example_at_a_point_of_each(name):
    f = FUNCTIONS[name]
    points = torch.stack([X, X.flip(0), C])
    tangents = torch.stack([C, C.flip(0), -C])
    found = vmap(lambda x, t: jvp(f, (x,), (t,))[1])(points, tangents)
    torch.testing.assert_close(found, torch.stack([f(t) - f(0 * t) for t in tangents]))


def test_two_directions():
    def twice(x):
        return jvp(lambda y: jvp(lambda z: (z * C) * z.detach(), (y,), (C,))[1], (x,), (C,))[1]

    torch.testing.assert_close(twice(C), torch.zeros_like(C))
    inner = jvp(lambda y: jvp(lambda z: z * C, (y,), (C,))[1] * X, (C,), (C,))[1]
    torch.testing.assert_close(inner, torch.zeros_like(C))


def test_what_was_written_into_is_no_zero():
    found = hessian(lambda x: (x * x * C).sum())(C)
    torch.testing.assert_close(found, torch.diag(2 * C))


@pytest.mark.parametrize(
    "product",
    [
        lambda x: W @ x,
        lambda x: (W @ x.unsqueeze(1)).squeeze(1),
        lambda x: torch.addmv(C[:3], W, x),
        lambda x: F.linear(x.unsqueeze(0), W, C[:3])[0],
        lambda x: torch.bmm(W.expand(2, 3, 4), x.view(4, 1).expand(2, 4, 1))[0, :, 0],
    ],
)
def test_a_matrix_adds_nothing_to_the_tangent_of_a_pull_back(product):
    weights = torch.tensor([math.inf, 2.0, 3.0], dtype=torch.float64)

    def f(x):
        return (weights * product(x) ** 2).sum()

    truth = 2 * (W.T * weights) @ W
    found = hessian(f)(C)
    torch.testing.assert_close(found, truth)
    torch.testing.assert_close(vmap(hessian(f))(C.expand(2, 4)), truth.expand(2, 4, 4))
    torch.testing.assert_close(jvp(jacrev(f), (C,), (C,))[1], truth @ C)
