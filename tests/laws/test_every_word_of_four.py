"""Every nesting of vmap, grad and jvp up to four deep, and the second-order Jacobians.

A word such as ``vgj`` is read from the outside in: ``vmap`` of ``grad`` of ``jvp``. Each letter
takes a function of a number to a function of a number, so any word fits, and the same word of
``torch.autograd`` and a loop is the truth.
"""

import itertools

import pytest
import torch
from oracle import difference

from forall import grad, hessian, jacfwd, jacrev, jvp, vmap

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


def outcome(transformed, x, weight, captured, x_requires_grad):
    """The value, and its derivatives with respect to what requires grad outside."""
    x = x.clone().requires_grad_(x_requires_grad)
    weight = weight.clone().requires_grad_(captured != "plain")
    used = weight * 2 if captured == "non-leaf" else weight
    y = transformed(used)(x)
    sources = [t for t in (x, weight) if t.requires_grad]
    assert y.requires_grad == bool(sources)
    return [y, *(torch.autograd.grad(y.sum(), sources) if sources else [])]


@pytest.mark.parametrize("mapped", ["", "argument requires grad"])
@pytest.mark.parametrize("captured", CAPTURED)
@pytest.mark.parametrize("word", WORDS)
def test_a_word_equals_the_same_word_of_torch_autograd(word, captured, mapped):
    x, weight = torch.tensor(0.3, dtype=D), torch.tensor(0.7, dtype=D)

    def spelt(verbs):
        return lambda w: spell(word, lambda x: (x * w).sin() * x.exp() * w, verbs)

    mine = outcome(spelt(OURS), x, weight, captured, bool(mapped))
    truth = torch_outcome(spelt(TRUTH), x, weight, captured, bool(mapped))
    assert difference(mine, truth) is None


def torch_outcome(transformed, x, weight, captured, x_requires_grad):
    """`outcome`, for a truth that requires grad whether or not something outside does."""
    x = x.clone().requires_grad_(x_requires_grad)
    weight = weight.clone().requires_grad_(captured != "plain")
    y = transformed(weight * 2 if captured == "non-leaf" else weight)(x)
    sources = [t for t in (x, weight) if t.requires_grad]
    return [y, *(torch.autograd.grad(y.sum(), sources) if sources else [])]


# f(x) = sum_i sin(w_i x_i) exp(x_{i+1}), closed at the ends: its Hessian is not diagonal.


def ring(w):
    return lambda x: ((w * x).sin() * x.roll(-1).exp()).sum()


def ring_gradient(w, x):
    return w * (w * x).cos() * x.roll(-1).exp() + (w.roll(1) * x.roll(1)).sin() * x.exp()


def ring_hessian(w, x):
    own = -w * w * (w * x).sin() * x.roll(-1).exp() + (w * x).roll(1).sin() * x.exp()
    next_ = torch.diag(w * (w * x).cos() * x.roll(-1).exp()).roll(1, 1)
    return torch.diag(own) + next_ + next_.T


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
    mine = outcome(lambda w: SECOND_ORDER[verb](ring(w)), x, weight, captured, bool(mapped))
    truth = torch_outcome(
        lambda w: lambda x: ring_hessian(w, x), x, weight, captured, bool(mapped)
    )
    assert difference(mine, truth) is None


@pytest.mark.parametrize("mapped", ["", "argument requires grad"])
@pytest.mark.parametrize("captured", CAPTURED)
@pytest.mark.parametrize("verb", SECOND_ORDER)
def test_a_mapped_second_order_jacobian_is_the_closed_form_of_each(verb, captured, mapped):
    x = torch.tensor([[0.3, -0.4, 0.9], [0.1, 0.2, -0.8]], dtype=D)
    weight = torch.tensor([0.7, 1.1, -0.5], dtype=D)
    mine = outcome(lambda w: vmap(SECOND_ORDER[verb](ring(w))), x, weight, captured, bool(mapped))
    truth = torch_outcome(
        lambda w: looped(lambda x: ring_hessian(w, x)), x, weight, captured, bool(mapped)
    )
    assert difference(mine, truth) is None


@pytest.mark.parametrize("mapped", ["", "argument requires grad"])
@pytest.mark.parametrize("captured", CAPTURED)
@pytest.mark.parametrize("verb", ["jacrev", "jacfwd"])
def test_the_jacobian_of_a_gradient_under_two_maps_is_the_closed_form(verb, captured, mapped):
    x = torch.tensor([[[0.3, -0.4, 0.9], [0.1, 0.2, -0.8]]], dtype=D)
    weight = torch.tensor([0.7, 1.1, -0.5], dtype=D)
    jacobian = {"jacrev": jacrev, "jacfwd": jacfwd}[verb]
    mine = outcome(
        lambda w: vmap(vmap(jacobian(grad(ring(w))))), x, weight, captured, bool(mapped)
    )
    truth = torch_outcome(
        lambda w: looped(looped(lambda x: ring_hessian(w, x))), x, weight, captured, bool(mapped)
    )
    assert difference(mine, truth) is None


def test_the_closed_forms_are_those_of_torch_autograd():
    x = torch.tensor([0.3, -0.4, 0.9, 0.1], dtype=D)
    w = torch.tensor([0.7, 1.1, -0.5, 0.8], dtype=D)
    assert difference(ring_gradient(w, x), torch_grad(ring(w))(x)) is None
    assert (
        difference(ring_hessian(w, x), torch.autograd.functional.hessian(ring(w), x)) is None
    )
