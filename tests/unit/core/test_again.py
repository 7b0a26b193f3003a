"""What runs once more in a backward pass runs where it first ran."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from forall import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from forall.random import key, scope

X = torch.linspace(-1, 1, 15).reshape(5, 3)
W = torch.linspace(0.5, 2, 15).reshape(5, 3)


def sine(x, w):
    return (x * w).sin() * torch.zeros(3).add_(2)


def recomputed(block, **options):
    return lambda x, w: checkpoint(block, x, w, use_reentrant=False, **options) * w


@pytest.mark.parametrize("preserve", [True, False])
def test_a_jacobian_recomputes_outside_its_pull_back(preserve):
    f, plain = recomputed(sine, preserve_rng_state=preserve), recomputed_not(sine)
    x, w = X[0], W[0]
    torch.testing.assert_close(jacrev(f)(x, w), jacrev(plain)(x, w))
    torch.testing.assert_close(jacrev(jacrev(f))(x, w), jacrev(jacrev(plain))(x, w))
    torch.testing.assert_close(vmap(jacrev(f))(X, W), vmap(jacrev(plain))(X, W))
    torch.testing.assert_close(jacrev(vmap(f))(X, W), jacrev(vmap(plain))(X, W))
    torch.testing.assert_close(
        grad(lambda x: jacrev(f)(x, w).sin().sum())(x),
        grad(lambda x: jacrev(plain)(x, w).sin().sum())(x),
    )
    summed = lambda x: f(x, w).sum()  # noqa: E731
    torch.testing.assert_close(hessian(summed)(x), hessian(lambda x: plain(x, w).sum())(x))
    pull = vjp(lambda x: f(x, w), x)[1]
    rows = vmap(pull)(torch.eye(3))[0]
    torch.testing.assert_close(rows, jacrev(plain)(x, w))


def recomputed_not(block):
    return lambda x, w: block(x, w) * w


@pytest.mark.parametrize("randomness", ["different", "same"])
@pytest.mark.parametrize(
    "block",
    [
        lambda x, w: (x * w * torch.rand(3)).sin(),
        lambda x, w: F.dropout((x * w).sin(), 0.5),
        lambda x, w: (x * torch.randn_like(w)).sin() * torch.randperm(3),
    ],
)
@pytest.mark.parametrize(
    "verb",
    [
        lambda f, flag: vmap(grad(lambda x, w: f(x, w).sum()), randomness=flag)(X, W),
        lambda f, flag: vmap(jacrev(f), randomness=flag)(X, W),
        lambda f, flag: grad(lambda x: vmap(f, randomness=flag)(x, W).sum())(X),
        lambda f, flag: grad(
            lambda x: vmap(vmap(f, (0, None), randomness=flag), randomness=flag)(
                x.expand(5, 2, 3).contiguous() * 1.0, W
            ).sum()
        )(X.unsqueeze(1)),
    ],
    ids=["grad inside", "jacrev inside", "grad outside", "grad outside two"],
)
def test_draws_are_repeated_after_the_level_has_ended(verb, block, randomness):
    torch.manual_seed(0)
    again = verb(recomputed(block), randomness)
    torch.manual_seed(0)
    torch.testing.assert_close(again, verb(recomputed_not(block), randomness))


def test_forward_mode_goes_through_checkpoints():
    w = W[0]
    f, plain = (lambda x, g=g: g(x, w).sum() for g in (recomputed(sine), recomputed_not(sine)))
    for verb in (
        lambda f: jvp(grad(f), (X[0],), (w,))[1],
        lambda f: grad(lambda x: jvp(f, (x,), (w,))[1])(X[0]),
        lambda f: jacfwd(grad(f))(X[0]),
        lambda f: vmap(hessian(f))(X),
        lambda f: linearize(grad(f), X[0])[1](w),
    ):
        torch.testing.assert_close(verb(f), verb(plain))


class NoisySine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.noise = torch.rand(3)
        ctx.save_for_backward(x)
        return (x * ctx.noise).sin()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * (x * ctx.noise).cos() * ctx.noise


@pytest.mark.parametrize(
    "verb",
    [
        lambda f: jvp(grad(lambda y: f(y).sum()), (X[0],), (W[0],))[1],
        lambda f: grad(lambda x: jvp(f, (x,), (W[0],))[1].sum())(X[0]),
        lambda f: jvp(lambda y: jvp(f, (y,), (y,))[1], (X[0],), (W[0],))[1],
    ],
    ids=["jvp of grad", "grad of jvp", "jvp of jvp"],
)
@pytest.mark.parametrize("keyed", [True, False])
def test_a_custom_function_that_draws_has_the_derivative_of_one_draw(verb, keyed):
    def run(f):
        torch.manual_seed(0)
        with scope(key(0)) if keyed else nullcontext():
            return verb(f)

    torch.testing.assert_close(run(NoisySine.apply), run(lambda x: (x * torch.rand(3)).sin()))
