"""Functions whose backward cannot be differentiated: a clear error, and no missing term.

Torch's own refusal is passed by where a pass asks for some inputs alone.
"""

# ruff: noqa: ARG004 - torch names the arguments of these methods

import numpy as np
import pytest
import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from forall import grad, hessian, hvp, jacfwd, jacrev, jvp, linearize, vjp, vmap


class Saved(Function):
    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * g * x**2


class InNumpy(Function):
    """What the backward needs is no tensor: nothing that it saved tells of x."""

    @staticmethod
    def forward(ctx, x):
        ctx.x = x.detach().tolist()
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        return g * 3 * torch.from_numpy(np.square(ctx.x))


class Hidden(Function):
    """No mark, and nothing that autograd records."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * g.detach() * x.detach() ** 2


class Steps(Function):
    """Its derivative is zero, and needs no history to be."""

    @staticmethod
    def forward(ctx, x):
        return x.floor()

    @staticmethod
    def backward(ctx, g):
        return torch.zeros_like(g)


X = torch.tensor([0.5, 2.0], dtype=torch.float64)
T = torch.tensor([1.0, -2.0], dtype=torch.float64)


def once(f):
    return {
        "jvp": lambda x: jvp(f, (x,), (T,))[1],
        "jacfwd": jacfwd(f),
        "linearize": lambda x: linearize(f, x)[1](T),
        "jvp of vmap": lambda x: jvp(vmap(lambda x: f(x[None])[0]), (x,), (T,))[1],
        "jvp of grad": lambda x: jvp(grad(lambda x: f(x).sum()), (x,), (T,))[1],
        "hvp": lambda x: hvp(lambda x: f(x).sum())(x, T),
        "hessian": hessian(lambda x: f(x).sum()),
    }


def twice(f):
    return {
        "grad of grad": lambda x: grad(lambda x: grad(lambda x: f(x).sum())(x).sum())(x),
        "grad of grad, times": lambda x: grad(
            lambda x: (grad(lambda x: (f(x) * x).sum())(x) * x).sum()
        )(x),
        "jacrev of vjp": lambda x: jacrev(lambda x: vjp(f, x)[1](T)[0])(x),
        "grad of vmap": lambda x: grad(lambda x: vmap(grad(lambda x: f(x[None])[0] * x))(x).sum())(
            x
        ),
    }


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("f", [Saved.apply, InNumpy.apply], ids=["saved", "in numpy"])
@pytest.mark.parametrize("word", [*once(abs), *twice(abs)])
def test_a_marked_backward_is_not_differentiated(word, f, mapped):
    if f == InNumpy.apply and (mapped or "vmap" in word):
        pytest.skip("tolist has no answer for several examples")
    ours = {**once(f), **twice(f)}[word]
    with pytest.raises(RuntimeError, match="differentiate twice a function that was marked"):
        vmap(ours)(torch.stack([X, X + 1])) if mapped else ours(X)


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("word", once(abs))
def test_a_backward_that_is_not_recorded_has_no_tangent(word, mapped):
    for f in (Hidden.apply, Steps.apply):
        ours = once(f)[word]
        ours = vmap(ours) if mapped else ours
        given = torch.stack([X, X + 1]) if mapped else X
        if f == Steps.apply:
            assert not ours(given).any()
        elif word not in ("jvp of grad", "hvp", "hessian"):
            with pytest.raises(RuntimeError, match="computes what autograd does not record"):
                ours(given)


def test_what_does_not_pass_by_the_mark_is_differentiated():
    w = torch.tensor(3.0, dtype=torch.float64)

    def gradient(w, f):
        return grad(lambda x: (f(x) + w * x * x).sum())(X)

    torch.testing.assert_close(
        jacrev(gradient)(w, Saved.apply), jacrev(gradient)(w, lambda x: x**3)
    )
    torch.testing.assert_close(
        jacfwd(gradient)(w, Saved.apply), jacfwd(gradient)(w, lambda x: x**3)
    )
    first = vmap(grad(lambda x: Saved.apply(x).sin().sum()))(torch.stack([X, X + 1]))
    assert not first.requires_grad
    torch.testing.assert_close(first[0], 3 * X**2 * (X**3).cos())
    assert not grad(lambda x: Saved.apply(x).sin().sum())(X).requires_grad
    assert not vjp(Saved.apply, X)[1](T)[0].requires_grad
