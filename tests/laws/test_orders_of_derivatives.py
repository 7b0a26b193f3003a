"""Derivatives in each order of forward and reverse mode are those of elementary operators.

Torch tests its formulas for one reverse pass through another. What is differentiated a third time,
or in forward mode after that, may have been taken for constant, or written over.
"""

from itertools import product

import pytest
import torch
import torch.nn.functional as F

from draws import make_generator
from forall import config, grad, jvp, vmap

D = torch.float64
X, V, W = (torch.randn(4, 3, dtype=D, generator=make_generator(i)) for i in range(3))
T = torch.tensor(0.3, dtype=D)


def length(x, p=2.0, dim=None):
    return (x.abs() ** p).sum(dim) ** (1 / p)


def normalised(x, dim, eps=1e-5):
    x = x - x.mean(dim, keepdim=True)
    return x / (x.square().mean(dim, keepdim=True) + eps).sqrt()


def deviation(x, dim, correction=1):
    return ((x - x.mean(dim, keepdim=True)).square().sum(dim) / (x.shape[dim] - correction)).sqrt()


def triple(x):
    return (
        x[0] * torch.stack([x[1].roll(-1) * x[2].roll(-2) - x[1].roll(-2) * x[2].roll(-1)])
    ).sum()


def eigenvalues(a):
    mean, half = (a[0, 0] + a[1, 1]) / 2, (a[0, 0] - a[1, 1]) / 2
    spread = (half.square() + a[0, 1].square()).sqrt()
    return torch.stack([mean - spread, mean + spread])


def partial_products(x):
    return torch.stack([x[0], x[0] * x[1], x[0] * x[1] * x[2], x[0] * x[1] * x[2] * x[3]])


# Torch's operator, and the same in elementary ones.
FUNCTIONS = {
    "norm": (lambda x: x.norm(), length),
    "norm of order 3": (lambda x: x.norm(3, dim=1), lambda x: length(x, 3, 1)),
    "norm of order 1.5": (lambda x: x.norm(1.5, dim=-1), lambda x: length(x, 1.5, 1)),
    "norm of order 0.5": (lambda x: x.norm(0.5, dim=1), lambda x: length(x, 0.5, 1)),
    "norm of all of its dims": (lambda x: x.norm(dim=(0, -1)), length),
    "aten.norm.Scalar": (lambda x: torch.ops.aten.norm.Scalar(x, 3), lambda x: length(x, 3)),
    "aten.norm.ScalarOpt_dim": (
        lambda x: torch.ops.aten.norm.ScalarOpt_dim(x, None, [-1], True),
        lambda x: length(x, 2, 1)[:, None],
    ),
    "normalize": (F.normalize, lambda x: x / length(x, 2, 1)[:, None]),
    "std": (lambda x: x.std(0), lambda x: deviation(x, 0)),
    "std without correction": (
        lambda x: x.std(-1, correction=0),
        lambda x: deviation(x, 1, 0),
    ),
    "std_mean": (
        lambda x: torch.stack(torch.std_mean(x, 1)),
        lambda x: torch.stack([deviation(x, 1), x.mean(1)]),
    ),
    "cosine_similarity": (
        lambda x: F.cosine_similarity(x, x.sin()),
        lambda x: (x * x.sin()).sum(1) / (length(x, 2, 1) * length(x.sin(), 2, 1)),
    ),
    "dist": (lambda x: torch.dist(x, x.exp()), lambda x: length(x - x.exp())),
    "copysign": (lambda x: torch.copysign(x, W), lambda x: x.abs() * W.sign()),
    "renorm": (
        lambda x: torch.renorm(x, 2, 0, 0.1),
        lambda x: x * (0.1 / (length(x, 2, 1) + 1e-7))[:, None],
    ),
    "glu": (lambda x: F.glu(x, 0), lambda x: x[:2] / (1 + (-x[2:]).exp())),
    "mse_loss": (lambda x: F.mse_loss(x, W), lambda x: (x - W).square().mean()),
    "mse_loss of what moves": (
        lambda x: F.mse_loss(x.sin(), x, reduction="none"),
        lambda x: (x.sin() - x).square(),
    ),
    "huber_loss": (
        lambda x: F.huber_loss(x, W, reduction="sum", delta=0.7),
        lambda x: torch.where(
            (x - W).abs() < 0.7, (x - W).square() / 2, 0.7 * ((x - W).abs() - 0.35)
        ).sum(),
    ),
    "soft_margin_loss": (
        lambda x: F.soft_margin_loss(x, W.sign()),
        lambda x: (1 + (-x * W.sign()).exp()).log().mean(),
    ),
    "polar": (
        lambda x: torch.polar(x.exp(), x).real + torch.polar(W.exp(), x).imag,
        lambda x: x.exp() * x.cos() + W.exp() * x.sin(),
    ),
    "layer_norm": (
        lambda x: F.layer_norm(x, (3,), W[0], W[1], eps=0.25),
        lambda x: normalised(x, 1, 0.25) * W[0] + W[1],
    ),
    "layer_norm of two dims": (
        lambda x: F.layer_norm(x, (4, 3)),
        lambda x: normalised(x.flatten(), 0).view(4, 3),
    ),
    "layer_norm whose weight moves": (
        lambda x: F.layer_norm(x, (3,), x[0], x[1]),
        lambda x: normalised(x, 1) * x[0] + x[1],
    ),
    "batch_norm": (
        lambda x: F.batch_norm(x, None, None, W[0], W[1], True),
        lambda x: normalised(x, 0) * W[0] + W[1],
    ),
    "batch_norm with running statistics": (
        lambda x: F.batch_norm(x, W[0].clone(), W[1].square(), x[0], None, True),
        lambda x: normalised(x, 0) * x[0],
    ),
    "batch_norm in evaluation": (
        lambda x: F.batch_norm(x, W[0], W[1].square(), x[0], x[1]),
        lambda x: (x - W[0]) / (W[1].square() + 1e-5).sqrt() * x[0] + x[1],
    ),
    "aten._batch_norm_with_update": (
        lambda x: torch.ops.aten._batch_norm_with_update(
            x, x[0], W[1], W[0].clone(), W[1].square(), 0.1, 1e-5
        )[0],
        lambda x: normalised(x, 0) * x[0] + W[1],
    ),
    "instance_norm": (lambda x: F.instance_norm(x[None])[0], lambda x: normalised(x, 1)),
    "group_norm": (
        lambda x: F.group_norm(x.T, 1, eps=0.25).T,
        lambda x: normalised(x, 0, 0.25),
    ),
    "rms_norm": (
        lambda x: F.rms_norm(x, (3,), eps=0.1),
        lambda x: x / (x.square().mean(1, keepdim=True) + 0.1).sqrt(),
    ),
    "weight_norm": (
        lambda x: torch._weight_norm(x, x[:, :1].sin() + 2, 0),
        lambda x: x * (x[:, :1].sin() + 2) / length(x, 2, 1)[:, None],
    ),
    "weight_norm along the last dim": (
        lambda x: torch._weight_norm(x, x[:1].sin() + 2, 1),
        lambda x: x * (x[:1].sin() + 2) / length(x, 2, 0),
    ),
    "eigh": (
        lambda x: torch.linalg.eigh(x[:2, :2] + x[:2, :2].T)[0],
        lambda x: eigenvalues(x[:2, :2] + x[:2, :2].T),
    ),
    "det": (lambda x: torch.linalg.det(x[:3]), triple),
    "slogdet": (lambda x: torch.linalg.slogdet(x[:3])[1], lambda x: triple(x).abs().log()),
    "logcumsumexp": (lambda x: x.logcumsumexp(-2), lambda x: x.exp().cumsum(0).log()),
    "cumprod": (lambda x: x.cumprod(0), partial_products),
    "prod": (lambda x: x.prod(0), lambda x: partial_products(x)[-1]),
}

MODES = {"g": grad, "j": lambda f: lambda t: jvp(f, (t,), (torch.ones_like(t),))[1]}
ORDERS = ["".join(o) for n in (1, 2, 3) for o in product(MODES, repeat=n)]
ORDERS += ["gggg", "gjgj", "jgjg", "gjjg", "jggj"]


def derivative(f, order):
    """Of a curve through a point, in an order whose first mode is the outermost."""

    def nested(t):
        return f(X + t * V).sin().sum()

    for mode in reversed(order):
        nested = MODES[mode](nested)
    return nested


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_order_of_derivatives_is_that_of_elementary_operators(name, monkeypatch):
    monkeypatch.setattr(config, "replay", False)
    given, elementary = FUNCTIONS[name]
    truth = {n: derivative(elementary, "g" * n)(T) for n in (1, 2, 3, 4)}
    for order in ORDERS:
        found = derivative(given, order)(T)
        torch.testing.assert_close(found, truth[len(order)], rtol=1e-8, atol=1e-8, msg=order)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_of_each_example_it_is_the_loops(name, monkeypatch):
    monkeypatch.setattr(config, "replay", False)
    given, elementary = FUNCTIONS[name]
    ts = torch.stack([T, -T])
    for order in ("jg", "ggg", "jgg", "gjj"):
        truth = torch.stack([derivative(elementary, "g" * len(order))(t) for t in ts])
        found = vmap(derivative(given, order))(ts)
        torch.testing.assert_close(found, truth, rtol=1e-8, atol=1e-8, msg=order)
        total = derivative(lambda x: vmap(given)(torch.stack([x, x])), order)(T)
        torch.testing.assert_close(total, 2 * truth[0], rtol=1e-8, atol=1e-8, msg=order)
