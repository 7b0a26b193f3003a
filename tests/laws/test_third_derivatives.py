"""Third derivatives, with forward mode at least once, are those of differences of second ones.

Torch's formulas of norms write into what they have computed, so where a derivative further out
needs it they raise; the pull-backs of its normalisations take what the kernel saved for constant.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from draws import make_generator
from forall import config, grad, jvp, vjp, vmap

D = torch.float64
X = torch.randn(4, 6, dtype=D, generator=make_generator(0))
T, C = X.roll(1, 0).sin(), X.roll(2, 1).cos()
W, B = X[0].exp(), X[1]

FUNCTIONS = {
    "vector_norm": lambda x: torch.linalg.vector_norm(x, 2, dim=1).sin().sum(),
    "norm of order 3": lambda x: torch.linalg.vector_norm(x, 3, dim=1).sin().sum(),
    "norm": lambda x: x.norm().sin(),
    "normalize": lambda x: F.normalize(x).sin().sum(),
    "std": lambda x: x.std(1).sin().sum(),
    "var": lambda x: x.var(0).sin().sum(),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x.sin() * 2).sin().sum(),
    "dist": lambda x: torch.dist(x, x.sin()),
    "renorm": lambda x: torch.renorm(x, 2, 0, 1.0).sin().sum(),
    "triplet_margin_loss": lambda x: F.triplet_margin_loss(x, x.sin(), x.cos()),
    "layer_norm": lambda x: F.layer_norm(x, (6,), W, B).sin().sum(),
    "batch_norm": lambda x: F.batch_norm(x, None, None, W, B, True).sin().sum(),
    "group_norm": lambda x: F.group_norm(x, 2, W, B).sin().sum(),
    "rms_norm": lambda x: F.rms_norm(x, (6,), W).sin().sum(),
    "softmax": lambda x: (F.softmax(x, -1) * x).sin().sum(),
    "an energy of distances": lambda x: (x[:, None] - x + 1).norm(dim=-1).reciprocal().sum(),
}


def _outside_vmap(f) -> Tensor:
    z = X.clone().requires_grad_()
    pushed = vmap(lambda t: jvp(grad(f), (z,), (t,))[1])(torch.stack([T, 2 * T]))
    return torch.autograd.grad((pushed * C).sum() / 3, z)[0]


WAYS = {
    "reverse, forward, reverse": lambda f: grad(lambda z: (jvp(grad(f), (z,), (T,))[1] * C).sum())(
        X
    ),
    "reverse, reverse, forward": lambda f: grad(
        lambda z: (grad(lambda y: jvp(f, (y,), (T,))[1])(z) * C).sum()
    )(X),
    "forward, forward, reverse": lambda f: jvp(lambda z: jvp(grad(f), (z,), (T,))[1], (X,), (C,))[
        1
    ],
    "forward, reverse, forward": lambda f: jvp(
        lambda z: grad(lambda y: jvp(f, (y,), (T,))[1])(z), (X,), (C,)
    )[1],
    "forward, vjp, forward": lambda f: jvp(
        lambda z: vjp(lambda y: jvp(f, (y,), (T,))[1], z)[1](torch.ones((), dtype=D))[0],
        (X,),
        (C,),
    )[1],
    "autograd outside": lambda f: torch.autograd.grad(
        (jvp(grad(f), (z := X.clone().requires_grad_(),), (T,))[1] * C).sum(), z
    )[0],
    "autograd outside vmap": _outside_vmap,
}


def second(f, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(f(x), x, create_graph=True)
    return torch.autograd.grad((g * T).sum(), x)[0]


def differences(f) -> Tensor:
    step, found = 1e-4, torch.zeros_like(X)
    for i in range(X.numel()):
        d = torch.zeros_like(X)
        d.view(-1)[i] = step
        found.view(-1)[i] = ((second(f, X + d) - second(f, X - d)) * C).sum() / (2 * step)
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_third_derivative(name, way, monkeypatch):
    monkeypatch.setattr(config, "replay", False)
    f = FUNCTIONS[name]
    torch.testing.assert_close(WAYS[way](f), differences(f), rtol=1e-5, atol=1e-6)


def kernels(x):
    return torch._weight_norm(x, x[:, :1].sin() + 2, 0).sin().sum()


def by_hand(x):
    return ((x[:, :1].sin() + 2) * x / x.square().sum(1, keepdim=True).sqrt()).sin().sum()


@pytest.mark.parametrize("way", WAYS)
def test_weight_norm(way, monkeypatch):
    """Of which torch's own second derivative lacks that of the norm."""
    monkeypatch.setattr(config, "replay", False)
    torch.testing.assert_close(WAYS[way](kernels), WAYS[way](by_hand))
    torch.testing.assert_close(
        jvp(grad(kernels), (X,), (T,))[1], second(by_hand, X), rtol=1e-10, atol=1e-10
    )


def test_what_a_backward_of_the_users_writes_into_is_seen_under_its_other_name(monkeypatch):
    monkeypatch.setattr(config, "replay", False)
    hidden = X > 0.5

    class Masked(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return (x * 2).masked_fill(hidden, 0)

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(_ctx, g):
            twice = g * 2
            other = twice.view(-1)
            twice.masked_fill_(hidden, 0)
            return other.view_as(g)

        @staticmethod
        def jvp(_ctx, t):
            return (t * 2).masked_fill(hidden, 0)

    def f(x):
        return Masked.apply(x.sin()).cos().sum()

    pushed = jvp(grad(f), (X.clone().requires_grad_(),), (T,))[1]
    torch.testing.assert_close(pushed, second(f, X))
