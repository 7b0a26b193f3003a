"""Rows and columns of a Jacobian: only cotangents, or tangents, differ. Kernels must bear that."""

import pytest
import torch
import torch.nn.functional as F

from forall import config, grad, hessian, jacfwd, jacrev, jit, vjp, vmap
from oracle import same

ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "softplus": lambda x: F.softplus(x, beta=0.7, threshold=1.5),
    "elu": lambda x: F.elu(x, 1.3),
    "elu, in place": lambda x: F.elu(x * 1, 1.3, inplace=True),
    "celu": lambda x: F.celu(x, 0.8),
    "selu": F.selu,
    "log sigmoid": F.logsigmoid,
}
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def points(dtype, *shape):
    n = torch.Size(shape).numel()
    return torch.linspace(-3, 3, n, dtype=torch.float64).reshape(shape).to(dtype)


def weights(dtype, *shape):
    n = torch.Size(shape).numel()
    return torch.arange(n, dtype=torch.float64).mul(1.7).sin().reshape(shape).to(dtype)


def rows(f, x):
    """The Jacobian by torch's own autograd, a row at a time."""
    x = x.clone().requires_grad_()
    y = f(x)
    found = [torch.autograd.grad(e, x, retain_graph=True)[0] for e in y.reshape(-1)]
    return torch.stack(found).reshape(*y.shape, *x.shape)


def network(act, dtype):
    w = weights(dtype, 4, 6)
    return lambda x: w @ act(x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("verb", [jacrev, jacfwd])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_of_one_point(name, verb, dtype, monkeypatch):
    f, x = network(ACTIVATIONS[name], dtype), points(dtype, 6)
    expected = rows(f, x)
    assert same(verb(f)(x), expected)
    assert same(jit(verb(f))(x), expected)
    monkeypatch.setattr(config, "replay", False)
    assert same(verb(f)(x), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("verb", [jacrev, jacfwd])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_of_several_points(name, verb, dtype):
    f, xs = network(ACTIVATIONS[name], dtype), points(dtype, 5, 6)
    expected = torch.stack([rows(f, x) for x in xs])
    assert same(vmap(verb(f))(xs), expected)
    assert same(vmap(verb(f), 1)(xs.T), expected)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_second_derivatives_of_an_activation(name):
    f = network(ACTIVATIONS[name], torch.float64)
    x = points(torch.float64, 6)

    def first(x):
        return torch.stack([torch.autograd.grad(e, x, create_graph=True)[0] for e in f(x)])

    x.requires_grad_()
    flat = first(x).reshape(-1)
    second = [torch.autograd.grad(e, x, retain_graph=True)[0] for e in flat]
    expected = torch.stack(second).reshape(4, 6, 6)
    assert same(hessian(f)(x.detach()), expected)
    assert same(jacrev(jacrev(f))(x.detach()), expected)
    (outside,) = torch.autograd.grad(jacrev(f)(x).sin().sum(), x)
    (there,) = torch.autograd.grad(first(x).sin().sum(), x)
    assert same(outside, there)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_one_cotangent_for_several_points(name, dtype):
    act, xs = ACTIVATIONS[name], points(dtype, 5, 6)
    cotangent = weights(dtype, 6)

    def pulled(x):
        return vjp(act, x)[1](cotangent)[0]

    def there(x):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(act(x), x, cotangent)[0]

    assert same(vmap(pulled)(xs), torch.stack([there(x) for x in xs]))


def test_slopes_that_are_not_finite():
    x = torch.tensor([float("inf"), float("-inf"), float("nan"), 200.0, -200.0])
    for act in ACTIVATIONS.values():
        torch.testing.assert_close(jacrev(act)(x), rows(act, x), equal_nan=True)
        g = torch.tensor([float("inf"), 1.0, 2.0, float("inf"), 3.0])
        pulled = vmap(lambda c, act=act: vjp(act, x)[1](c)[0])(torch.stack([g, -g]))
        leaf = x.clone().requires_grad_()
        there = [torch.autograd.grad(act(leaf), leaf, c)[0] for c in (g, -g)]
        torch.testing.assert_close(pulled, torch.stack(there), equal_nan=True)


# --- kernels that read indices one after another, whatever their strides --------------------------

SAMPLES = {2: torch.full((1, 2, 2), 0.3), 3: torch.full((1, 2, 3), 0.3)}
POOLS = {
    "max 1d": (lambda x: F.max_pool1d(x, 2), (1, 2, 6)),
    "max 2d": (lambda x: F.max_pool2d(x, 2), (1, 2, 4, 6)),
    "max 3d": (lambda x: F.max_pool3d(x, 2), (1, 2, 4, 2, 4)),
    "adaptive max 1d": (lambda x: F.adaptive_max_pool1d(x, 2), (1, 2, 5)),
    "adaptive max 2d": (lambda x: F.adaptive_max_pool2d(x, 2), (1, 2, 5, 3)),
    "adaptive max 3d": (lambda x: F.adaptive_max_pool3d(x, 2), (1, 2, 3, 4, 3)),
    "fractional max 2d": (
        lambda x: F.fractional_max_pool2d(x, 2, 2, _random_samples=SAMPLES[2].to(x)),
        (1, 2, 5, 4),
    ),
    "fractional max 3d": (
        lambda x: F.fractional_max_pool3d(x, 2, 2, _random_samples=SAMPLES[3].to(x)),
        (1, 2, 4, 5, 4),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("alone", [False, True], ids=["an image with N", "an image alone"])
@pytest.mark.parametrize("name", POOLS)
def test_where_the_largest_were(name, alone, dtype):
    f, shape = POOLS[name]
    x = weights(dtype, *shape)
    x = x[0] if alone else x
    expected = rows(f, x)
    assert same(jacrev(f)(x), expected)
    assert same(jacfwd(f)(x), expected)
    both = torch.stack([x, x.flip(-1)], -1)
    apart = torch.stack([rows(f, e) for e in both.unbind(-1)])
    assert same(vmap(jacrev(f), -1)(both), apart)
    summed = torch.stack([rows(lambda e: f(e).sin().sum(), e) for e in both.unbind(-1)])
    assert same(vmap(grad(lambda e: f(e).sin().sum()), -1)(both), summed)
