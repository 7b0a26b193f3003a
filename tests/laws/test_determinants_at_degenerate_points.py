"""Second derivatives of a determinant where singular values are equal or zero.

Torch's backward takes another way where a determinant is zero, and that way under any dispatch
mode: through singular vectors, which have no derivative where two values are equal.
"""

import pytest
import torch

from draws import make_generator
from forall import hessian, jacfwd, jacrev, jit, vmap

D = torch.float64


def polynomial(a):
    """By the first column."""
    n = a.shape[-1]
    if n == 1:
        return a[0, 0]
    rows = range(n)
    return sum((-1) ** r * a[r, 0] * polynomial(a[[k for k in rows if k != r], 1:]) for r in rows)


def points(n, dtype):
    g = make_generator(n)
    a, b = (torch.randn(n, n, dtype=dtype, generator=g) for _ in range(2))
    eye = torch.eye(n, dtype=dtype)
    yield "any", a
    yield "identity", eye
    yield "nearly the identity", eye + 1e-9 * a
    yield "orthogonal", torch.linalg.qr(a)[0]
    yield "zeros", torch.zeros_like(a)
    yield "of rank one", torch.ones_like(a)
    yield "of all ranks but one", torch.linalg.qr(a)[0] @ eye.index_fill(0, torch.tensor(0), 0) @ b
    yield "of all ranks but two", a[:, 2:] @ b[2:]
    yield "diagonal", torch.diag(torch.arange(n)).to(dtype)
    yield "small", a * 1e-30


def scalar(det, dtype):
    if dtype is D:
        return det
    return lambda x: (det(torch.view_as_complex(x)) * (1 + 2j)).real


NAMES = [name for name, _ in points(2, D)]
CASES = [(n, D, name) for n in (2, 3, 4) for name in NAMES]
CASES += [(1, D, "any"), (1, D, "zeros"), (5, D, "of rank one"), (5, D, "identity")]
CASES += [(n, torch.complex128, name) for n in (2, 4) for name in NAMES[1:8:2]]


@pytest.mark.sweep(4)
@pytest.mark.parametrize(("n", "dtype", "name"), CASES)
def test_second_derivatives_are_those_of_the_polynomial_in_each_call(n, dtype, name):
    x = dict(points(n, dtype))[name]
    x = x if dtype is D else torch.view_as_real(x)
    f = scalar(torch.linalg.det, dtype)
    truth = torch.autograd.functional.hessian(scalar(polynomial, dtype), x)
    tolerance = {"rtol": 1e-7, "atol": 1e-9 * max(x.abs().max().item(), 1e-300) ** max(n - 2, 0)}
    for second in (lambda f: jacrev(jacrev(f)), hessian, lambda f: jacfwd(jacfwd(f))):
        found = second(f)
        torch.testing.assert_close(found(x), truth, **tolerance)
        torch.testing.assert_close(jit(found)(x), truth, **tolerance)
        torch.testing.assert_close(vmap(found)(torch.stack([x, 2 * x]))[0], truth, **tolerance)


@pytest.mark.counted
@pytest.mark.parametrize("second", [hessian, lambda f: jacrev(jacrev(f))])
def test_a_call_of_many_is_answered_as_the_first(second):
    found, eye = second(torch.linalg.det), torch.eye(3, dtype=D)
    truth = torch.autograd.functional.hessian(torch.linalg.det, eye)
    for _ in range(60):
        torch.testing.assert_close(found(eye), truth)


def test_the_third_derivative_is_that_of_the_polynomial():
    a = torch.randn(4, 4, dtype=D, generator=make_generator(0))
    third = jacfwd(hessian(torch.linalg.det))
    for x in (a, torch.eye(4, dtype=D), a[:, 2:] @ a[2:]):
        torch.testing.assert_close(third(x), jacfwd(hessian(polynomial))(x))
    eye = torch.eye(3, dtype=D)
    torch.testing.assert_close(
        jacrev(jacrev(jacrev(torch.linalg.det)))(eye), jacfwd(hessian(polynomial))(eye)
    )
