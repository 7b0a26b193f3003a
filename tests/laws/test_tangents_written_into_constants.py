"""An operator in place that writes what moves into a tensor that does not is the loop's."""

import pytest
import torch

from forall import hessian, jacfwd, jacrev, jvp, linearize, vmap

D = torch.float64
X = torch.tensor([1.0, 2.0, 0.5], dtype=D)
T = X.cos()
AT, MASK = torch.tensor([0, 2]), torch.tensor([True, False, True])


def constant(*shape):
    return torch.full(shape or (3,), 0.3, dtype=D)


def stored(index, value, *shape):
    def f(x):
        y = constant(*shape)
        y[index] = value(x)
        return y

    return f


WRITES = {
    "copy_": lambda x: constant().copy_(x),
    "copy_ of a number": lambda x: constant().copy_(x.sum()),
    "fill_": lambda x: constant().fill_(x.sum()),
    "fill_ of a view": lambda x: constant(3, 3)[1:].fill_(x.prod()),
    "fill_ of a diagonal": lambda x: (y := constant(3, 3), y.diagonal().fill_(x.prod()))[0],
    "fill_ of a number": lambda x: constant(1).squeeze().fill_(x.prod()),
    "y[:] =": stored(slice(None), torch.sum),
    "y[0] =": stored(0, torch.prod),
    "y[.., 1] =": stored((..., 1), torch.prod, 3, 3),
    "y[mask] =": stored(MASK, torch.prod),
    "y[1:] =": stored(slice(1, None), lambda x: x[1:] ** 2),
    "masked_fill_": lambda x: constant().masked_fill_(MASK, x.prod()),
    "index_fill_": lambda x: constant().index_fill_(0, AT, x.prod()),
    "index_put_": lambda x: constant().index_put_((AT,), x[:2] ** 2),
    "index_put_, added": lambda x: constant().index_put_((AT,), x[:2] ** 2, accumulate=True),
    "index_add_": lambda x: constant().index_add_(0, AT, x[:2] ** 2),
    "index_copy_": lambda x: constant().index_copy_(0, AT, x[:2] ** 2),
    "scatter_": lambda x: constant().scatter_(0, AT, x[:2] ** 2),
    "scatter_add_": lambda x: constant().scatter_add_(0, AT, x[:2] ** 2),
    "masked_scatter_": lambda x: constant().masked_scatter_(MASK, x**2),
    "put_": lambda x: constant().put_(AT, x[:2] ** 2),
    "add_": lambda x: constant().add_(x**2),
    "mul_": lambda x: constant().mul_(x**2),
    "div_": lambda x: constant().div_(x),
    "pow_": lambda x: constant().pow_(x),
    "atan2_": lambda x: constant().atan2_(x),
    "clamp_": lambda x: constant().clamp_(x * 0.2),
    "lerp_": lambda x: constant().lerp_(x**2, 0.2),
    "lerp_ by": lambda x: constant().lerp_(X, x**2),
    "addcmul_": lambda x: constant().addcmul_(x, x),
    "addcdiv_": lambda x: constant().addcdiv_(x, x.exp()),
    "addmm_": lambda x: constant(3, 3).addmm_(x[:, None], x[None]),
    "addmv_": lambda x: constant().addmv_(x[:, None] * x, x),
    "addr_": lambda x: constant(3, 3).addr_(x, x),
    "baddbmm_": lambda x: constant(1, 3, 3).baddbmm_(x[None, :, None], x[None, None]),
    "hypot_": lambda x: constant().hypot_(x),
    "xlogy_": lambda x: constant().xlogy_(x),
    "_foreach_mul_": lambda x: (y := [constant()], torch._foreach_mul_(y, [x**2]))[0][0],
}


def second(f):
    """(*O, 3, 3), by torch.autograd alone."""
    return torch.autograd.functional.jacobian(
        lambda x: torch.autograd.functional.jacobian(f, x, create_graph=True), X
    )


def along(derivatives, t=T):
    return derivatives @ t


@pytest.mark.parametrize("name", WRITES)
def test_forward_words(name):
    def f(x):
        return WRITES[name](x) * x.sum()

    first = torch.autograd.functional.jacobian(f, X)
    torch.testing.assert_close(jvp(f, (X,), (T,))[1], along(first))
    torch.testing.assert_close(linearize(f, X)[1](T), along(first))
    torch.testing.assert_close(jacfwd(f, chunk_size=2)(X), first)
    torch.testing.assert_close(vmap(lambda x: linearize(f, x)[1](T))(X[None])[0], along(first))
    torch.testing.assert_close(linearize(vmap(f), X[None])[1](T[None])[0], along(first))
    torch.testing.assert_close(
        vmap(linearize(f, X)[1])(torch.eye(3, dtype=D)[:1])[0], first[..., 0]
    )


@pytest.mark.parametrize("name", WRITES)
def test_second_derivatives_of_forward_words(name):
    def f(x):
        return WRITES[name](x) * x.sum()

    def tangent(x):
        return linearize(f, x)[1](T)

    right = second(f)
    torch.testing.assert_close(jacrev(tangent)(X), torch.einsum("...ij,i->...j", right, T))
    torch.testing.assert_close(linearize(tangent, X)[1](X), along(along(right, X)))
    torch.testing.assert_close(jacfwd(jacfwd(f))(X), right)
    torch.testing.assert_close(hessian(f)(X), right)
