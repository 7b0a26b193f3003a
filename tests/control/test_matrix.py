"""Every operator under every transform has the values of a plain Python loop."""

import pytest
import torch

import forall
from control.programs import PLAIN, PROGRAMS
from forall import grad, hessian, jacfwd, jacrev, jvp, vmap
from oracle import difference

D = torch.float64
X = torch.tensor([[0.3, -0.4, 0.9], [0.1, 1.2, -0.8], [-0.5, 0.7, 0.2], [0.6, 0.4, -0.1]], dtype=D)
T = torch.tensor([[1.0, -0.5, 0.25], [0.2, 0.3, -2.0], [0.9, -0.1, 0.4], [0.5, 1.5, -1.0]], dtype=D)
P = torch.tensor([3, 0, 5, 2])


def torch_grad(f):
    def gradient(x, *rest):
        x = x.view_as(x) if x.requires_grad else x.detach().requires_grad_()
        return torch.autograd.grad(f(x, *rest), x, create_graph=True)[0]

    return gradient


def looped(f, shared=False):
    return lambda xs, p: torch.stack([f(x, p if shared else p[i]) for i, x in enumerate(xs)])


def slope(f):
    return lambda x, p: jvp(lambda x: f(x, p), (x,), (T[0],))[1]


def torch_slope(f):
    return lambda x, p: torch_grad(f)(x, p) @ T[0]


def torch_hessian(f):
    return lambda x, p: torch.autograd.functional.hessian(lambda x: f(x, p), x)


def summed(f):
    return lambda x, p: f(x, p).sum()


# What is done with the program, and the truth.
ONE = {
    "eager": (lambda f: f, lambda f: f),
    "grad": (grad, torch_grad),
    "jvp": (slope, torch_slope),
    "hessian": (hessian, torch_hessian),
    "jacfwd of jacfwd": (lambda f: jacfwd(jacfwd(f)), torch_hessian),
    "jacrev of grad": (lambda f: jacrev(grad(f)), torch_hessian),
}


def mapped(shared):
    over = (0, None) if shared else 0
    each = lambda f: vmap(f, over)  # noqa: E731
    truth = lambda f: looped(f, shared)  # noqa: E731
    return {
        "vmap": (each, truth),
        "vmap of grad": (lambda f: each(grad(f)), lambda f: truth(torch_grad(f))),
        "vmap of jvp": (lambda f: each(slope(f)), lambda f: truth(torch_slope(f))),
        "vmap of hessian": (lambda f: each(hessian(f)), lambda f: truth(torch_hessian(f))),
        "grad of vmap": (lambda f: grad(summed(each(f))), lambda f: torch_grad(summed(truth(f)))),
        "jvp of vmap": (
            lambda f: lambda x, p: jvp(lambda x: each(f)(x, p), (x,), (T,))[1],
            lambda f: lambda x, p: (truth(torch_grad(f))(x, p) * T).sum(1),
        ),
        "grad of vmap of grad": (
            lambda f: grad(summed(each(grad(f)))),
            lambda f: torch_grad(summed(truth(torch_grad(f)))),
        ),
    }


def check(name, ways, x, p):
    ours, plain = ways
    program = PROGRAMS[name]
    result = ours(lambda x, p: program(forall, torch, x, p))(x, p)
    truth = plain(lambda x, p: program(PLAIN, torch, x, p))(x, p)
    found = difference(result, truth)
    assert found is None, found


@pytest.mark.sweep(4)
@pytest.mark.parametrize("p", [0, 1, 3, 5])
@pytest.mark.parametrize("way", ONE)
@pytest.mark.parametrize("name", PROGRAMS)
def test_one_example(name, way, p):
    check(name, ONE[way], X[0], p)
    check(name, ONE[way], X[0], torch.tensor(p))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("p", [0, 3])
@pytest.mark.parametrize("way", mapped(shared=True))
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_predicate_that_all_examples_share(name, way, p):
    check(name, mapped(shared=True)[way], X, torch.tensor(p))


@pytest.mark.parametrize("way", mapped(shared=False))
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_predicate_of_each_example(name, way):
    check(name, mapped(shared=False)[way], X, P)


@pytest.mark.parametrize("way", mapped(shared=False))
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_predicate_of_each_example_where_all_agree(name, way):
    check(name, mapped(shared=False)[way], X, torch.tensor([3, 3, 3, 3]))


@pytest.mark.parametrize("name", PROGRAMS)
def test_two_levels_of_vmap(name):
    def f(lax):
        return lambda x, p: PROGRAMS[name](lax, torch, x, p)

    both = torch.stack([X, X.flip(0) * 0.5])
    p = torch.tensor(3)
    result = vmap(vmap(f(forall), (0, None)), (0, None))(both, p)
    truth = looped(looped(f(PLAIN), shared=True), shared=True)(both, p)
    assert difference(result, truth) is None
