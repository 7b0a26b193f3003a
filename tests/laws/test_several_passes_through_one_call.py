"""A call of vmap is pulled back more than once, and all of that is differentiated together."""

import pytest
import torch

from forall import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from oracle import difference

D = torch.float64
X = torch.tensor([0.3, 0.5, 0.7, -0.4], dtype=D)


def one(x):
    return x * x.sin()


def itself(f):
    return f


def in_chunks(size):
    return lambda f, x: jacrev(f, chunk_size=size)(x).sum()


def with_the_value(f, x):
    jacobian, y = jacrev(f, return_value=True)(x)
    return (jacobian * y).sum() + y.sum()


def at_once_and_alone(f, x):
    y, pull = vjp(f, x)
    return vmap(pull)(torch.eye(4, dtype=D))[0].square().sum() + (pull(y)[0] * y).sum()


def halves(f, x):
    _, pull = vjp(f, x)
    rows = torch.eye(4, dtype=D)
    return vmap(pull)(rows[:1])[0].sum() + (vmap(pull)(rows[1:])[0] * x).sum()


def twice(f, x):
    def slope(x):
        return (jacrev(f, chunk_size=3)(x).sum(0) * x).sum()

    return jacrev(grad(slope), chunk_size=3)(x).sum() + slope(x)


def by_autograd(f, x):
    y = f(x)

    def row(c):
        return torch.autograd.grad(y, x, c, create_graph=True)[0]

    rows = torch.eye(4, dtype=D)
    return sum(row(r).sum() for r in rows) + y.sum()


WAYS = {
    "chunks of 1": in_chunks(1),
    "chunks of 2": in_chunks(2),
    "chunks of 3": in_chunks(3),
    "with the value": with_the_value,
    "at once and alone": at_once_and_alone,
    "halves": halves,
    "twice": twice,
    "by autograd": by_autograd,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_derivative_of_several_passes(way):
    def found(call):
        w = torch.tensor(0.7, dtype=D, requires_grad=True)
        x = X.clone().requires_grad_()
        value = WAYS[way](call(lambda x: w * one(w * x)), x)
        return [value.detach(), *torch.autograd.grad(value, [w, x])]

    assert difference(found(vmap), found(itself)) is None


@pytest.mark.parametrize("way", [way for way in WAYS if way != "by autograd"])
@pytest.mark.parametrize("word", [hessian, lambda f: jacrev(grad(f)), lambda f: jacfwd(grad(f))])
def test_second_derivatives_of_several_passes(way, word):
    def found(call):
        return word(lambda x: WAYS[way](call(one), x))(X)

    assert difference(found(vmap), found(itself)) is None


@pytest.mark.parametrize("way", [way for way in WAYS if way != "by autograd"])
def test_inside_vmap(way):
    xs = torch.stack([X, X + 1, 2 * X])

    def found(call):
        return vmap(grad(lambda x: WAYS[way](call(one), x)))(xs)

    assert difference(found(vmap), found(itself)) is None


def test_a_jvp_inside_that_is_pulled_back_in_chunks():
    def pushed(call):
        def h(x):
            f = call(one)
            tangent = lambda x: jvp(f, (x,), (x.cos(),))[1]  # noqa: E731
            return jacrev(tangent, chunk_size=3)(x).square().sum()

        return grad(h)(X)

    assert difference(pushed(vmap), pushed(itself)) is None


def test_a_shared_weight_of_a_matrix_product():
    weight = torch.linspace(-1, 1, 12, dtype=D).reshape(4, 3).requires_grad_()
    xs = torch.linspace(0, 1, 12, dtype=D).reshape(3, 4)

    def found(f):
        jacobian, y = jacrev(f, chunk_size=4, return_value=True)(xs)
        return torch.autograd.grad(jacobian.square().sum() + y.sum(), weight)[0]

    mapped = found(vmap(lambda x: (x @ weight).tanh()))
    assert difference(mapped, found(lambda x: (x @ weight).tanh())) is None
