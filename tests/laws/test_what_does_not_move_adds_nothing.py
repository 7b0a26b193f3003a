"""An argument without a tangent adds nothing to one, also next to inf and nan."""

import math

import pytest
import torch
from torch.nn import functional as F

from forall import config, hessian, jacfwd, jacrev, jit, jvp, linearize, vmap

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


I = W.where(W != 0, math.inf)  # noqa: E741 - with an inf, of shape (3, 4)
OF_A_BIAS = {
    "addmm": (lambda b: torch.addmm(b, I, W.T, beta=2), (3, 3), 2),
    "addmm of a row": (lambda b: torch.addmm(b, I, W.T), (3,), 1),
    "addmv": (lambda b: torch.addmv(b, I, C), (3,), 1),
    "baddbmm": (lambda b: torch.baddbmm(b, I[None], W.T[None], beta=0.5), (1, 3, 3), 0.5),
    "linear": (lambda b: F.linear(W, I, b), (3,), 1),
}


@pytest.mark.parametrize("name", OF_A_BIAS)
def test_a_bias_alone_is_not_added_to_a_product_of_zeros(name):
    f, shape, beta = OF_A_BIAS[name]
    b, t = torch.ones(shape, dtype=torch.float64), torch.full(shape, 3.0, dtype=torch.float64)
    wanted = (t * beta).expand(f(b).shape)
    for found in (jvp(f, (b,), (t,))[1], linearize(f, b)[1](t), jit(jvp)(f, (b,), (t,))[1]):
        torch.testing.assert_close(found, wanted)
    several = vmap(lambda t: jvp(f, (b,), (t,))[1])(torch.stack([t, 2 * t]))
    torch.testing.assert_close(several, torch.stack([wanted, 2 * wanted]))
    second = jvp(lambda b: jvp(f, (b,), (t,))[1], (b,), (t,))[1]
    torch.testing.assert_close(second, torch.zeros_like(wanted))


OF_A_VECTOR = {
    "mv": lambda w, x: w @ x,
    "mv of a transpose": lambda w, x: w.t().contiguous().t() @ x,
    "from the left": lambda w, x: x @ w.t(),
    "from the left, rows": lambda w, x: x @ w.t().contiguous(),
    "linear": lambda w, x: F.linear(x, w),
    "linear with a bias": lambda w, x: F.linear(x, w, torch.ones_like(w[:, 0])),
    "linear of one row": lambda w, x: F.linear(x.unsqueeze(0), w).squeeze(0),
    "mm": lambda w, x: (w @ x.unsqueeze(1)).squeeze(1),
    "mm from the left": lambda w, x: (x.unsqueeze(0) @ w.t()).squeeze(0),
    "a part": lambda w, x: torch.cat([w, w], 1)[:, : w.shape[1]] @ x,
}
OF_ALL = {
    "alone": lambda j, f, x: j(f)(x),
    "jit": lambda j, f, x: jit(j(f))(x),
    "of examples": lambda j, f, x: vmap(j(f))(x.repeat(3, 1))[1],
    "jit of examples": lambda j, f, x: jit(vmap(j(f)))(x.repeat(3, 1))[1],
    "in chunks": lambda j, f, x: j(f, chunk_size=100)(x),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("way", OF_ALL)
@pytest.mark.parametrize("product", OF_A_VECTOR)
@pytest.mark.parametrize("jacobian", [jacfwd, jacrev])
def test_an_entry_of_a_matrix_is_not_multiplied_with_the_zeros_of_others(
    jacobian, product, way, dtype
):
    w = torch.tensor([[math.inf, 2.0], [3.0, math.nan], [-0.0, 1.0], [math.pi, -math.inf]]).to(
        dtype
    )
    x = torch.tensor([1.0, 2.0], dtype=dtype)
    found = OF_ALL[way](jacobian, lambda x: OF_A_VECTOR[product](w, x), x)
    torch.testing.assert_close(found, w, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("product", OF_A_VECTOR)
@pytest.mark.parametrize("jacobian", [jacfwd, jacrev])
def test_a_matrix_of_each_example(jacobian, product):
    w, x = torch.randn(5, 3, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    found = vmap(lambda w, x: jacobian(lambda x: OF_A_VECTOR[product](w, x))(x))(w, x)
    torch.testing.assert_close(found, w)
    f = lambda x: OF_A_VECTOR[product](w[0], x).sin()  # noqa: E731
    found = vmap(jacobian(f))(x)
    truth = [torch.autograd.functional.jacobian(f, row) for row in x]
    torch.testing.assert_close(found, torch.stack(truth))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("size", [1, 2, 5, 20])
@pytest.mark.parametrize("product", OF_A_VECTOR)
def test_second_derivatives_of_products_that_are_read(product, size):
    w, x = torch.randn(3, size, dtype=torch.float64), torch.randn(size, dtype=torch.float64)
    f = lambda x: OF_A_VECTOR[product](w, x).sin().prod()  # noqa: E731
    truth = torch.autograd.functional.hessian(f, x)
    ways = hessian(f), jacfwd(jacfwd(f)), jacrev(jacrev(f)), jacfwd(jacrev(f)), jit(hessian(f))
    for way in ways:
        torch.testing.assert_close(way(x), truth)


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


OF_WEIGHTS = {
    "mv": (lambda w, x: x @ w[0], (2, 3)),
    "mm": (lambda w, x: x @ w.T, (2, 3)),
    "linear": (lambda w, x: F.linear(x, w), (2, 3)),
    "einsum": (lambda w, x: torch.einsum("bi,oi->bo", x, w), (2, 3)),
    "bmm": (lambda w, x: torch.bmm(x[None], w.T[None]), (2, 3)),
}


@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize("name", OF_WEIGHTS)
def test_the_tangent_of_a_linear_function_has_a_derivative_of_zero(name, replay, monkeypatch):
    """As torch has it: who asks for it further out is not told that there is none."""
    monkeypatch.setattr(config, "replay", replay)
    monkeypatch.setattr(config, "patience", 0)
    f, shape = OF_WEIGHTS[name]
    x = torch.linspace(-1, 1, 12).reshape(4, 3)

    def of_x(w):
        return f(w, x)

    def tangents(w):
        yield jvp(of_x, (w,), (torch.ones(shape),))[1]
        yield linearize(of_x, w)[1](torch.ones(shape))
        yield vmap(lambda v: jvp(of_x, (w,), (v,))[1])(torch.ones(2, *shape))
        yield jacfwd(of_x)(w)

    for _ in range(4):
        w = torch.ones(shape, requires_grad=True)
        for tangent in tangents(w):
            (found,) = torch.autograd.grad(tangent.square().sum(), w)
            assert torch.equal(found, torch.zeros(shape))
    assert not any(tangent.requires_grad for tangent in tangents(torch.ones(shape)))
