"""What forward mode takes as it is, an argument that does not move, keeps its history.

An operator that torch differentiates once is run in small steps there, some of them of that
argument alone. Its derivatives are taken in reverse around the forward mode.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from draws import make_generator
from forall import grad, jacfwd, jvp, linearize, vmap

D = torch.float64
generator = make_generator(2)
X = torch.randn(5, 4, dtype=D, generator=generator)
W = torch.randn(3, 4, dtype=D, generator=generator)
V = torch.randn(3, 4, dtype=D, generator=generator)
Q = torch.randn(1, 2, 5, 4, dtype=D, generator=generator)

close = torch.testing.assert_close


def by_hand_layer_norm(x: Tensor, w: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w[0] + w[1]


def by_hand_batch_norm(x: Tensor, w: Tensor) -> Tensor:
    centred = x - x.mean(0)
    return centred / (centred.square().mean(0) + 1e-5).sqrt() * w[0] + w[1]


def by_hand_weight_norm(x: Tensor, w: Tensor) -> Tensor:
    return x / x.norm(dim=1, keepdim=True) * w[0].exp().sum()


# What is captured, x, and what moves, w: an operator, and the same by hand.
CASES: dict[str, tuple[Callable, Callable, Tensor]] = {
    "layer_norm": (lambda x, w: F.layer_norm(x, (4,), w[0], w[1]), by_hand_layer_norm, X),
    "layer_norm, bias alone": (
        lambda x, w: F.layer_norm(x, (4,), None, w[1]),
        lambda x, w: by_hand_layer_norm(x, torch.stack([torch.ones_like(w[0]), w[1]])),
        X,
    ),
    "batch_norm": (
        lambda x, w: F.batch_norm(x, None, None, w[0], w[1], training=True),
        by_hand_batch_norm,
        X,
    ),
    "weight_norm": (
        lambda x, w: torch._weight_norm_interface(x, w[0].exp().sum().repeat(5, 1), 0)[0],
        by_hand_weight_norm,
        X,
    ),
    "attention": (
        lambda x, w: F.scaled_dot_product_attention(
            x, x.sin(), w.expand(1, 2, 3, 4).repeat(1, 1, 2, 1)[:, :, :5]
        ),
        lambda x, w: (
            (x @ x.sin().mT / 2).softmax(-1) @ w.expand(1, 2, 3, 4).repeat(1, 1, 2, 1)[:, :, :5]
        ),
        Q,
    ),
    "cdist": (
        lambda x, w: torch.cdist(x * 2, w),
        lambda x, w: (2 * x[:, None] - w).square().sum(-1).sqrt(),
        X,
    ),
}
cases = pytest.mark.parametrize("name", CASES)


def pushed(f: Callable, x: Tensor) -> Tensor:
    value, tangent = jvp(lambda w: f(x, w), (W,), (V,))
    return value.sin().sum() + tangent.cos().sum()


def by_columns(f: Callable, x: Tensor) -> Tensor:
    return jacfwd(lambda w: (x.sum() + f(x, w.square())).sin())(W).sin().sum()


def linearized(f: Callable, x: Tensor) -> Tensor:
    value, push = linearize(lambda w: f(x, w), W)
    return value.sin().sum() + push(V).cos().sum()


def twice(f: Callable, x: Tensor) -> Tensor:
    return jvp(
        lambda w: jvp(lambda w: f(x, w.square()).sin(), (w,), (V,))[1].sin().sum(), (W,), (V,)
    )[1]


@pytest.mark.sweep(3)
@cases
@pytest.mark.parametrize("run", [pushed, by_columns, linearized, twice], ids=lambda r: r.__name__)
def test_the_derivative_around_forward_mode(run, name):
    f, by_hand, x = CASES[name]
    want = torch.autograd.grad(run(by_hand, leaf := x.clone().requires_grad_()), leaf)[0]
    assert want.abs().max() > 1e-3
    close(grad(lambda x: run(f, x))(x), want)
    leaf = x.clone().requires_grad_()
    close(torch.autograd.grad(run(f, leaf), leaf)[0], want)
    xs = torch.stack([x, x.cos()])
    wants = torch.stack([grad(lambda x: run(by_hand, x))(x) for x in xs])
    close(vmap(grad(lambda x: run(f, x)))(xs), wants)
    close(grad(lambda xs: vmap(lambda x: run(f, x))(xs).sum())(xs), wants)


@cases
def test_a_tangent_further_out(name):
    f, by_hand, x = CASES[name]
    along = x.cos()
    close(
        jvp(lambda x: pushed(f, x), (x,), (along,)),
        jvp(lambda x: pushed(by_hand, x), (x,), (along,)),
    )
