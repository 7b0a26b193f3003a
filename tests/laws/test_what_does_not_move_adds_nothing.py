"""An argument without a tangent adds nothing to one, also next to inf and nan."""

import math

import pytest
import torch

from forall import hessian, jacfwd, jvp, vmap

X = torch.tensor([1.0, math.inf, -math.inf, math.nan], dtype=torch.float64)
C = torch.tensor([2.0, 3.0, 4.0, 5.0], dtype=torch.float64)
M = torch.tensor([True, True, False, True])

FUNCTIONS = {
    "times": lambda x: x * C,
    "by": lambda x: x / C,
    "addcmul": lambda x: torch.addcmul(C, x, C),
    "dot": lambda x: torch.dot(x, C),
    "masked mean": lambda x: torch.masked.mean(x, 0, mask=M),
    "in place": lambda x: (x + 0).mul_(C),
}


def directions():
    return torch.eye(4, dtype=torch.float64)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_jacfwd_is_linear_functions_matrix(name):
    f = FUNCTIONS[name]
    truth = torch.stack([f(t) - f(0 * t) for t in directions()], -1)
    torch.testing.assert_close(jacfwd(f)(X), truth)


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
