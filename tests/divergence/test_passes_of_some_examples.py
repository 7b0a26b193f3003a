"""Backward passes of a function's own, where its examples have diverged: against the loop."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import forall
from forall import vmap
from oracle import difference

D = torch.float64
X = torch.tensor([[0.1, 0.1, -1.4], [1.1, 1.4, 0.2], [-0.1, -2.2, -1.0]], dtype=D)

FUNCTIONS: list[Callable] = []


def listed(f: Callable) -> Callable:
    FUNCTIONS.append(f)
    return f


def variable(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


@listed
def one_pass_on_each_side(x):
    z = variable(x)
    if x[0] > 0:
        z.square().sum().backward(inputs=[z])
    else:
        z.sin().sum().backward(inputs=[z])
    return z.grad


@listed
def one_tensor_in_the_place_of_a_list(x):
    z = variable(x)
    if x[0] > 0:
        z.square().sum().backward(inputs=z)
    else:
        z.sin().sum().backward(None, None, False, (z,))
    return z.grad


@listed
def a_pass_on_one_side(x):
    z = variable(x)
    out = z.square().sum()
    z.sin().sum().backward(inputs=[z])
    if x[0] > 0:
        out.backward(inputs=[z])
    return z.grad


@listed
def a_pass_on_each_side_of_one_graph(x):
    z = variable(x)
    out = z.square().sin().sum()
    if x[0] > 0:
        out.backward(inputs=[z])
    else:
        out.backward(torch.full_like(out, 3.0))
    return z.grad


@listed
def a_gradient_on_each_side_of_one_graph(x):
    z = variable(x)
    out = z.square().sin()
    if x[0] > 0:
        (g,) = torch.autograd.grad(outputs=out.sum(), inputs=[z])
    else:
        (g,) = torch.autograd.grad(out, z, grad_outputs=x * 2)
    return g


@listed
def passes_in_a_loop(x):
    z = variable(x)
    z.sum().backward(inputs=[z])
    n = 0
    while n < 2 and x[0] > n * 1.0:
        (z.square() * (n + 1)).sum().backward(inputs=[z])
        n += 1
    return z.grad


@listed
def a_pass_of_one_of_two_leaves(x):
    z, w = variable(x), variable(x * 2)
    if x[0] > 0:
        (z * w).sum().backward(inputs=[z])
    else:
        (z + w.sin()).sum().backward(inputs=[w], retain_graph=True)
        w.sum().backward()
        z.sum().backward()
    return z.grad


@listed
def a_pass_to_what_was_computed(x):
    z = variable(x)
    w = z * 2
    w.retain_grad()
    if x[0] > 0:
        (z * w).sum().backward(inputs=[z, w])
    else:
        (z + w.sin()).sum().backward(inputs=[z, w])
    return z.grad, w.grad


@listed
def a_pass_to_what_was_joined(x):
    v = x * 2 if x[0] > 0 else x * 3
    z = variable(v)
    (x[0] + z.square().sum()).backward(inputs=[z])
    return z.grad


@listed
def a_pass_through_what_was_joined(x):
    z = variable(x)
    v = z if x[0] > 0 else z * 3
    v.square().sum().backward(inputs=[z])
    return z.grad


@listed
def a_pass_with_a_hook(x):
    z = variable(x)
    z.register_hook(lambda g: g * 2)
    if x[0] > 0:
        z.square().sum().backward(inputs=[z])
    else:
        z.sin().sum().backward(inputs=[z])
    return z.grad


@listed
def a_pass_beside_a_list_of_some_examples(x):
    v = x * 1
    if x[0] > 0:
        kept = []
        for u in (v * x * 1.5, v):
            kept.append(u * 1)  # noqa: PERF401 - the loop is what is tested
    z = variable(x)
    (x[0] + z.square().sum() * 0.1).backward(inputs=[z])
    return z.grad


@listed
def a_gradient_beside_a_list_of_some_examples(x):
    v = x * 1
    if x[0] > 0:
        kept = [v * x, v]
        kept.append(v)
    z = variable(x)
    return torch.autograd.grad((x[0] + z.square().sum()).sin(), z)[0]


@listed
def a_pass_by_a_function_of_torchs(x):
    z, w = variable(x), variable(x)
    if x[0] > 0:
        torch.autograd.backward([(z * w).sum()], inputs=[z])
    else:
        torch.autograd.backward((z + w.sin()).sum(), inputs=(z,))
    return z.grad if w.grad is None else x


@pytest.mark.parametrize("requires", [False, True], ids=["", "of what requires grad"])
@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_gradients_are_those_of_the_loop(f, requires):
    forall.config.replay = False
    xs = X.clone().requires_grad_(requires)
    rows = [f(x) for x in xs.unbind()]
    true = tuple(map(torch.stack, zip(*rows, strict=True))) if type(rows[0]) is tuple else None
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of an example's way alone
        found = vmap(f)(xs)
    assert difference(found, torch.stack(rows) if true is None else true) is None
