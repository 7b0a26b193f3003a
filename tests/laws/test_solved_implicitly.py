"""A Function whose backward differentiates once more, in what its forward was given.

That is how the solution of an equation is differentiated: x such that residual(x, *phi) = y has the
derivative that one evaluation of the residual at x tells, in what that captures.
"""

import warnings

import numpy as np
import pytest
import torch
from torch.autograd.function import once_differentiable

from forall import (
    PerformanceWarning,
    grad,
    hvp,
    jacfwd,
    jacobian,
    jacrev,
    jvp,
    laplacian,
    linearize,
    vjp,
    vmap,
)


class Solved(torch.autograd.Function):
    """As if x = y / 2 were a solution: what matters here is the way back."""

    @staticmethod
    def forward(ctx, residual, y, *phi):
        ctx.residual = residual
        x = y / 2
        ctx.save_for_backward(x, *phi)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        x, *phi = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = ctx.residual(x)
        slope = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)[0]
        return None, g / slope, *torch.autograd.grad(y, phi, -g / slope, retain_graph=True)


WEIGHT = torch.tensor([0.5, 1.5], dtype=torch.float64, requires_grad=True)
NUMBERS = torch.tensor([[0.3, 0.7], [1.1, -0.4], [0.2, 0.9]], dtype=torch.float64)


def of_a_weight(x):
    return Solved.apply(lambda t: t * WEIGHT.exp(), x, WEIGHT)


def of_what_was_computed(x):
    p = (x * x).sum()
    return Solved.apply(lambda t: t * 3 + t * p, x, p)


def of_both(x):
    p = (x * x).sum()
    return Solved.apply(lambda t: t * WEIGHT.exp() + t * p, x, WEIGHT, p)


def of_a_weight_by_two_ways(x):
    p = WEIGHT * x
    return Solved.apply(lambda t: t * WEIGHT.exp() + p, x, WEIGHT, p)


def of_another_solution(x):
    p = Solved.apply(lambda t: t * WEIGHT.exp(), x * x, WEIGHT)
    return Solved.apply(lambda t: t * WEIGHT.exp() + p, x, WEIGHT, p)


FUNCTIONS = pytest.mark.parametrize(
    "f",
    [of_a_weight, of_what_was_computed, of_both, of_a_weight_by_two_ways, of_another_solution],
)
OF_WEIGHTS = pytest.mark.parametrize("f", [of_a_weight, of_a_weight_by_two_ways])


@FUNCTIONS
@pytest.mark.parametrize("mapped", [False, True])
def test_rows_of_its_jacobian(f, mapped):
    want = [torch.autograd.functional.jacobian(f, x) for x in NUMBERS]
    got = vmap(jacrev(f))(NUMBERS) if mapped else torch.stack([jacrev(f)(x) for x in NUMBERS])
    torch.testing.assert_close(got, torch.stack(want))


@OF_WEIGHTS
def test_a_pass_when_the_call_has_ended(f):
    want = torch.autograd.grad(sum(f(x).sin().sum() for x in NUMBERS), WEIGHT)
    got = torch.autograd.grad(vmap(f)(NUMBERS).sin().sum(), WEIGHT)
    torch.testing.assert_close(got, want)


@OF_WEIGHTS
def test_a_weight_that_was_written_to_since(f):
    moved = WEIGHT.clone()
    out = vmap(type(f)(f.__code__, {**f.__globals__, "WEIGHT": moved}))(NUMBERS).sum()
    with torch.no_grad():
        moved.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out, moved)


@FUNCTIONS
def test_the_gradient_of_each_example(f):
    total = lambda x: f(x).sin().sum()  # noqa: E731
    want = []
    for x in NUMBERS:
        x = x.clone().requires_grad_()
        want.append(torch.autograd.grad(total(x), x)[0])
    torch.testing.assert_close(vmap(grad(total))(NUMBERS), torch.stack(want))


MATRIX = torch.tensor([[3.0, 0.5, 0.2], [0.5, 2.0, 0.3], [0.2, 0.3, 1.5]], dtype=torch.float64)
PLACES = torch.tensor([[0.3, 0.7, 1.2], [1.1, -0.4, 0.5]], dtype=torch.float64)
TOWARDS = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)


def by_conjugate_gradients(matrix, b):
    x, r, p = torch.zeros_like(b), b, b
    while r.norm() > 1e-12:
        q = matrix @ p
        a = (r @ r) / (p @ q)
        x, rest = x + a * p, r - a * q
        p, r = rest + (rest @ rest) / (r @ r) * p, rest
    return x


def by_descent(matrix, b):
    x = torch.zeros_like(b)
    while (matrix @ x - b).abs().max() > 1e-13:
        x = x - 0.3 * (matrix @ x - b)
    return x


def unless_zero(matrix, b):
    return torch.linalg.solve(matrix, b) if b.any() else torch.zeros_like(b)


def make_linear_solve(solver):
    """Return the solution w of (MATRIX + diag(x^2)) w = x, whose pull-back asks ``solver``."""

    def matrix(x):
        return MATRIX + torch.diag(x * x)

    class Rule(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            w = torch.linalg.solve(matrix(x), x)
            ctx.save_for_backward(w, x)
            return w

        @staticmethod
        def backward(ctx, v):
            w, x = ctx.saved_tensors
            u = solver(matrix(x), v)
            return u - 2 * x * w * u

    return Rule.apply


def solve_with_torch(x):
    return torch.linalg.solve(MATRIX + torch.diag(x * x), x)


def norm_of(f):
    return lambda x: f(x).square().sum()


WORDS = {
    "jvp": lambda f: lambda x: jvp(f, (x,), (TOWARDS,))[1],
    "jacfwd": jacfwd,
    "jacrev": jacrev,
    "jacobian": jacobian,
    "linearize": lambda f: lambda x: linearize(f, x)[1](TOWARDS),
    "a second pull-back": lambda f: lambda x: vjp(vjp(f, x)[1], TOWARDS)[1]((TOWARDS,))[0],
    "hvp": lambda f: lambda x: hvp(norm_of(f))(x, TOWARDS),
    "jvp of grad": lambda f: lambda x: jvp(grad(norm_of(f)), (x,), (TOWARDS,))[1],
    "laplacian": lambda f: laplacian(norm_of(f)),
    "grad of jvp": lambda f: grad(lambda x: jvp(norm_of(f), (x,), (TOWARDS,))[1]),
}


@pytest.mark.parametrize("solver", [by_conjugate_gradients, by_descent, unless_zero])
@pytest.mark.parametrize("word", WORDS)
def test_a_backward_that_looks_at_the_gradient_that_arrives(word, solver):
    """Forward mode is that of a backward whose branches and loops ask about its argument."""
    transform = WORDS[word]
    warnings.simplefilter("ignore", PerformanceWarning)
    want = torch.stack([transform(solve_with_torch)(x) for x in PLACES])
    alone = transform(make_linear_solve(solver))
    torch.testing.assert_close(torch.stack([alone(x) for x in PLACES]), want)
    torch.testing.assert_close(vmap(alone)(PLACES), want)


class InNumpy(torch.autograd.Function):
    """x^2, whose backward looks at the numbers of the gradient that arrives."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        seen = np.flatnonzero(np.asarray(g.detach()))
        return torch.zeros_like(x).index_copy(0, torch.as_tensor(seen), (2 * g * x)[seen])


@pytest.mark.filterwarnings("ignore::forall.PerformanceWarning")
def test_rows_of_a_backward_in_numpy():
    alone = [jacrev(InNumpy.apply)(x) for x in PLACES]
    torch.testing.assert_close(torch.stack(alone), torch.diag_embed(2 * PLACES))
    torch.testing.assert_close(vmap(jacrev(InNumpy.apply))(PLACES), torch.diag_embed(2 * PLACES))


def test_rows_of_a_hook_that_asks():
    def grow(g):
        return g if g.sum() > 1.5 else 3 * g

    def hooked(x):
        y = x * x.sum()
        y.register_hook(grow)
        return y * torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)

    want = torch.autograd.functional.jacobian(hooked, PLACES[0])
    _, pull = vjp(hooked, PLACES[0])
    with pytest.warns(PerformanceWarning, match="one after another(.|\n)*sum\\(\\) > 1.5"):
        found = jacrev(hooked)(PLACES[0]), vmap(pull)(torch.eye(3, dtype=torch.float64))[0]
    torch.testing.assert_close(found, (want, want))


@pytest.mark.filterwarnings("ignore:vjp. cotangents were pulled back one after another")
def test_rows_of_a_jacobian_whose_backward_reads_its_cotangent():
    class Halved(torch.autograd.Function):
        @staticmethod
        def forward(_ctx, x):
            return x * 2

        @staticmethod
        def backward(_ctx, g):
            steps = 0
            while g.abs().sum().item() > 1:
                g, steps = g / 2, steps + 1
            return g * 2 * 2**steps

    x = torch.tensor([1.0, 2.0], dtype=torch.float64)
    found = jacrev(lambda x: Halved.apply(x * x) * x)(x)
    torch.testing.assert_close(found, torch.diag(6 * x * x))
