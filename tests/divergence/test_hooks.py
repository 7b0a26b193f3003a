"""Hooks on tensors of examples that have diverged: run for those whose loop runs them."""

import numpy as np
import pytest
import torch

from draws import make_generator
from forall import grad, vmap

D = torch.float64


def registered_by_some(x):
    y = x * 2
    if x.sum() > 0:
        y.register_hook(lambda g: g + torch.ones(3, dtype=D, device=g.device))
        return (y * x).sum()
    return (y * 3).sum()


def used_by_some(x):
    y = x * 2
    y.register_hook(lambda g: g + torch.ones(3, dtype=D, device=g.device))
    if x.sum() > 0:
        return (y * x).sum()
    return (x * 3).sum()


class AddsOne(torch.autograd.Function):
    @staticmethod
    def forward(_ctx, x):
        return x * 2

    @staticmethod
    def backward(_ctx, g):
        return 2 * g + torch.ones(3, dtype=D, device=g.device)


def function_of_some(x):
    y = x * 2
    return AddsOne.apply(y).sum() if x.sum() > 0 else y.sum()


def function_used_by_some(x):
    y = AddsOne.apply(x)
    return (y * x).sum() if x.sum() > 0 else x.sum()


def constant(_g):
    return torch.full((3,), 2.0, dtype=D)


def seen_by_no_mode(_g):
    return torch.from_numpy(np.full(3, 2.0))


def constant_of_some(x):
    y = x * x if x.sum() > 0 else x * 3
    y.register_hook(constant)
    return y.sin().sum()


def array_of_some(x):
    y = x * x
    if x.sum() > 0:
        y = y * 1
        y.register_hook(seen_by_no_mode)
    return y.sin().sum()


def of_the_argument(x):
    if x.sum() > 0:
        x.register_hook(seen_by_no_mode)
    return (x * x).sum()


def constant_used_by_some(x):
    y = x * 2
    y.register_hook(constant)
    return (y * x).sum() if x.sum() > 0 else (x * 3).sum()


class Array(AddsOne):
    @staticmethod
    def backward(_ctx, g):
        return seen_by_no_mode(g)


def array_of_a_function_used_by_some(x):
    y = Array.apply(x)
    return (y * x).sum() if x.sum() > 0 else x.sum()


FUNCTIONS = [
    registered_by_some,
    used_by_some,
    function_of_some,
    function_used_by_some,
    constant_of_some,
    array_of_some,
    of_the_argument,
    constant_used_by_some,
    array_of_a_function_used_by_some,
]


def of_one(f, x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(f(x), x)[0]


@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_gradient_inside_and_outside(f):
    xs = torch.randn(7, 3, dtype=D, generator=make_generator(0))
    truth = torch.stack([of_one(f, x) for x in xs])
    for _ in range(2):  # as it is, then converted at once
        torch.testing.assert_close(vmap(grad(f))(xs), truth)
    stack = xs.clone().requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(vmap(f)(stack).sum(), stack)[0], truth)
