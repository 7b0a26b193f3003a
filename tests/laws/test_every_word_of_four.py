"""Every nesting of vmap, grad and jvp up to four deep, and the second-order Jacobians.

A word such as ``vgj`` is read from the outside in: ``vmap`` of ``grad`` of ``jvp``. Each letter
takes a function of a number to a function of a number, so any word fits, and the same word of
``torch.autograd`` and a loop is the truth.
"""

import itertools

import pytest
import torch

from forall import grad, hessian, jacfwd, jacrev, jvp, vmap
from oracle import difference

D = torch.float64
SCALES = (1.0, 0.5, -2.0)
OURS = {"vmap": vmap, "grad": grad, "slope": lambda f: lambda x: jvp(f, (x,), (x * 0 + 1,))[1]}


def looped(f):
    return lambda xs: torch.stack([f(x) for x in xs.unbind()])


def torch_grad(f):
    def gradient(x):
        x = x.view_as(x) if x.requires_grad else x.detach().requires_grad_()
        return torch.autograd.grad(f(x), x, create_graph=True)[0]

    return gradient


TRUTH = {"vmap": looped, "grad": torch_grad, "slope": torch_grad}

WORDS = ["".join(word) for n in range(1, 5) for word in itertools.product("gjv", repeat=n)]

CAPTURED = ("plain", "leaf", "non-leaf")


def spell(word, f, verbs):
    """The word's transforms around ``f``, the last letter innermost."""
    for letter in reversed(word):
        if letter == "g":
            f = verbs["grad"](f)
        elif letter == "j":
            f = verbs["slope"](f)
        else:
            f = summed(verbs["vmap"](f))
    return f


def summed(f):
    return lambda x: f(torch.stack([x * s for s in SCALES])).sum()


def check(mine, truth, x, weight, captured, mapped):
    """Values agree, and derivatives with respect to what requires grad outside, if anything."""
    results = []
    for transformed in (mine, truth):
        point = x.clone().requires_grad_(bool(mapped))
        leaf = weight.clone().requires_grad_(captured != "plain")
        y = transformed(leaf * 2 if captured == "non-leaf" else leaf)(point)
        sources = [t for t in (point, leaf) if t.requires_grad]
        if transformed is mine:
            assert y.requires_grad == bool(sources)
        results.append([y, *(torch.autograd.grad(y.sum(), sources) if sources else [])])
    found = difference(*results)
    assert found is None, found


@pytest.mark.sweep(8)
@pytest.mark.parametrize("mapped", ["", "argument requires grad"])
@pytest.mark.parametrize("captured", CAPTURED)
@pytest.mark.parametrize("word", WORDS)
def test_a_word_equals_the_same_word_of_torch_autograd(word, captured, mapped):
    x, weight = torch.tensor(0.3, dtype=D), torch.tensor(0.7, dtype=D)

    def spelt(verbs):
        return lambda w: spell(word, lambda x: (x * w).sin() * x.exp() * w, verbs)

    check(spelt(OURS), spelt(TRUTH), x, weight, captured, mapped)


# f(x) = sum(sin(w x)) sum(exp(x)): every entry of its Hessian is another number.


def product(w):
    return lambda x: (w * x).sin().sum() * x.exp().sum()


def product_hessian(w):
    def closed_form(x):
        sines, exps, slope = (w * x).sin(), x.exp(), w * (w * x).cos()
        across = slope[:, None] * exps[None, :]
        return torch.diag(sines.sum() * exps - w * w * sines * exps.sum()) + across + across.T

    return closed_form


SECOND_ORDER = {
    "hessian": hessian,
    "jacfwd of jacrev": lambda f: jacfwd(jacrev(f)),
    "jacrev of jacfwd": lambda f: jacrev(jacfwd(f)),
    "jacrev of jacrev": lambda f: jacrev(jacrev(f)),
    "jacfwd of jacfwd": lambda f: jacfwd(jacfwd(f)),
    "jacrev of grad": lambda f: jacrev(grad(f)),
    "jacfwd of grad": lambda f: jacfwd(grad(f)),
}


@pytest.mark.parametrize("mapped", ["", "argument requires grad"])
@pytest.mark.parametrize("captured", CAPTURED)
@pytest.mark.parametrize("verb", SECOND_ORDER)
def test_a_second_order_jacobian_is_the_closed_form(verb, captured, mapped):
    x = torch.tensor([0.3, -0.4, 0.9, 0.1], dtype=D)
    weight = torch.tensor([0.7, 1.1, -0.5, 0.8], dtype=D)
    check(
        lambda w: SECOND_ORDER[verb](product(w)),
        product_hessian,
        x,
        weight,
        captured,
        mapped,
    )


@pytest.mark.parametrize("mapped", ["", "argument requires grad"])
@pytest.mark.parametrize("captured", CAPTURED)
@pytest.mark.parametrize("verb", SECOND_ORDER)
def test_a_mapped_second_order_jacobian_is_the_closed_form_of_each(verb, captured, mapped):
    x = torch.tensor([[0.3, -0.4, 0.9], [0.1, 0.2, -0.8]], dtype=D)
    weight = torch.tensor([0.7, 1.1, -0.5], dtype=D)
    check(
        lambda w: vmap(SECOND_ORDER[verb](product(w))),
        lambda w: looped(product_hessian(w)),
        x,
        weight,
        captured,
        mapped,
    )


@pytest.mark.parametrize("mapped", ["", "argument requires grad"])
@pytest.mark.parametrize("captured", CAPTURED)
@pytest.mark.parametrize("verb", ["jacrev", "jacfwd"])
def test_the_jacobian_of_a_gradient_under_two_maps_is_the_closed_form(verb, captured, mapped):
    x = torch.tensor([[[0.3, -0.4, 0.9], [0.1, 0.2, -0.8]]], dtype=D)
    weight = torch.tensor([0.7, 1.1, -0.5], dtype=D)
    jacobian = {"jacrev": jacrev, "jacfwd": jacfwd}[verb]
    check(
        lambda w: vmap(vmap(jacobian(grad(product(w))))),
        lambda w: looped(looped(product_hessian(w))),
        x,
        weight,
        captured,
        mapped,
    )


def test_the_closed_form_is_that_of_torch_autograd():
    x = torch.tensor([0.3, -0.4, 0.9, 0.1], dtype=D)
    w = torch.tensor([0.7, 1.1, -0.5, 0.8], dtype=D)
    truth = torch.autograd.functional.hessian(product(w), x)
    assert difference(product_hessian(w)(x), truth) is None
