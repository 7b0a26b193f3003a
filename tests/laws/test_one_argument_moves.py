"""Derivatives of derivatives where one argument of a loss moves, and the others have no tangent."""

import pytest
import torch
import torch.nn.functional as F

import forall
from draws import make_generator
from forall import grad, hessian, jvp, linearize, vmap

D = torch.float64
X, Y, W, T = (torch.rand(6, dtype=D, generator=make_generator(i)) for i in range(4))

# What takes torch's place: the loss in small steps, for the mean.
LOSSES = {
    "mse": (F.mse_loss, lambda x, y, _: (x - y).square()),
    "cross entropy": (
        F.binary_cross_entropy,
        lambda x, y, _: -(y * x.log() + (1 - y) * (1 - x).log()),
    ),
    "weighted cross entropy": (
        F.binary_cross_entropy,
        lambda x, y, w: -w * (y * x.log() + (1 - y) * (1 - x).log()),
    ),
}
FUNCTIONS = {
    "the input": lambda loss, z, **kw: loss(z, Y, **kw),
    "the target": lambda loss, z, **kw: loss(X, z, **kw),
    "both": lambda loss, z, **kw: loss(z, z.sin() ** 2, **kw),
    "a copy that does not move": lambda loss, z, **kw: loss(z, z.detach(), **kw),
}
WAYS = {
    "jvp": lambda f: jvp(f, (X,), (T,)),
    "forward over reverse": lambda f: jvp(grad(f), (X,), (T,)),
    "reverse over forward": lambda f: grad(lambda z: jvp(f, (z,), (T,))[1])(X),
    "forward twice": lambda f: jvp(lambda z: jvp(f, (z,), (T,))[1], (X,), (Y,)),
    "reverse twice": lambda f: grad(lambda z: (grad(f)(z) * T).sum())(X),
    "Hessian": lambda f: hessian(f)(X),
    "three times": lambda f: jvp(lambda z: jvp(grad(f), (z,), (T,))[1], (X,), (Y,)),
    "linear map of a gradient": lambda f: linearize(grad(f), X)[1](T),
    "each direction": lambda f: vmap(lambda t: jvp(grad(f), (X,), (t,))[1])(torch.stack([T, Y])),
    "each point": lambda f: vmap(lambda x: jvp(grad(f), (x,), (T,))[1])(torch.stack([X, Y])),
    "Hessian-vector product": lambda f: forall.hvp(f)(T, X),
}


def agree(way, f, g):
    # Torch keeps x (1 - x), by which it divides, from being smaller than 1e-12.
    torch.testing.assert_close(way(f), way(g), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("moves", FUNCTIONS)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss(name, moves, way, reduction):
    loss, entries = LOSSES[name]
    kw = {"weight": W} if name.startswith("weighted") else {}

    def f(z):
        return FUNCTIONS[moves](loss, z, reduction=reduction, **kw)

    def g(z):
        found = FUNCTIONS[moves](lambda x, y: entries(x, y, W), z)
        return found.mean() if reduction == "mean" else found.sum()

    agree(WAYS[way], f, g)


def test_a_weight_that_does_not_move():
    def f(z):
        return F.binary_cross_entropy(z, Y, weight=z.detach())

    def g(z):
        return -(z.detach() * (Y * z.log() + (1 - Y) * (1 - z).log())).mean()

    for way in WAYS.values():
        agree(way, f, g)


@pytest.mark.parametrize("loss", [F.mse_loss, F.binary_cross_entropy])
def test_a_target_that_is_expanded(loss):
    row = Y.flatten()[:1].expand(Y.shape)
    for way in WAYS.values():
        agree(way, lambda z: loss(z, row), lambda z: loss(z, row.clone()))
