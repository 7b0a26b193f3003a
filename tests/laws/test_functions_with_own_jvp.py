"""A Function's own ``jvp`` gives its tangents, as it does in torch's forward mode."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import Function, forward_ad

from forall import grad, hessian, jacfwd, jacrev, jit, jvp, linearize, vmap
from limits import test_functions as functions
from oracle import difference

D = torch.float64
X = torch.linspace(-2, 2, 15, dtype=D).reshape(5, 3)
T = torch.linspace(1, 3, 15, dtype=D).reshape(5, 3).cos()
W = torch.linspace(0.5, 1.5, 3, dtype=D)
called: list[tuple] = []  # the shapes of tangents that a rule was given


@pytest.fixture(autouse=True)
def nothing_called_yet():
    called.clear()


def noted(*tangents: Any) -> None:
    called.append(tuple(None if t is None else tuple(t.shape) for t in tangents))


class Product(functions.OwnJvp):
    """Each derivative is told by its factor: 5 is backward's, 7 the push-forward's."""

    @staticmethod
    def jvp(ctx, tx, tw):
        noted(tx, tw)
        x, w = ctx.saved_tensors
        return 7 * (tx * w + x * tw)


class New(Product):
    """The same, with a context of its own."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, w):
        return x * w

    @staticmethod
    def setup_context(ctx, inputs, _output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)


class OfResult(Function):
    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        ctx.save_for_forward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        return 5 * g * ctx.saved_tensors[0]

    @staticmethod
    def jvp(ctx, t):
        return 7 * t * ctx.saved_tensors[0]


class Two(Function):
    """Two results, of tangents that need not be there."""

    @staticmethod
    def forward(ctx, x, w, n):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, w)
        ctx.save_for_forward(x, w)
        ctx.n = n
        return x.sin() * n, w.cos() * n

    @staticmethod
    def backward(ctx, g, h):
        x, w = ctx.saved_tensors
        return 5 * g * x.cos() * ctx.n, None if h is None else -5 * h * w.sin() * ctx.n, None

    @staticmethod
    def jvp(ctx, tx, tw, _tn):
        x, w = ctx.saved_tensors
        first = x * 0 if tx is None else 7 * tx * x.cos() * ctx.n
        return first, w * 0 if tw is None else -7 * tw * w.sin() * ctx.n


class Forward(Function):
    """A forward and a push-forward in numpy, and no backward at all."""

    @staticmethod
    def forward(ctx, x):
        ctx.x = x.detach().numpy()
        return torch.from_numpy(np.sin(ctx.x))

    @staticmethod
    def jvp(ctx, t):
        noted(t)
        return torch.from_numpy(np.cos(ctx.x)) * t


class InPlace(functions.InPlace):
    @staticmethod
    def jvp(_ctx, t):
        return t.mul_(5)  # 7 is backward's


class Raises(Product):
    @staticmethod
    def jvp(_ctx, _tx, _tw):
        raise ValueError("no such tangent")


def several(x):
    y, z = Two.apply(x * 2, W, 3)
    return y * x + z, Two.apply(W, x.sin(), 2)


FUNCTIONS = {
    "of two": lambda x: Product.apply(x.sin(), W).cos(),
    "both move": lambda x: Product.apply(x.sin(), x),
    "with a context": lambda x: New.apply(x, W * x),
    "a result saved": lambda x: OfResult.apply(x / 2) * x,
    "one in another": lambda x: Product.apply(New.apply(x, x), OfResult.apply(x)),
    "several results": several,
    "in place": lambda x: InPlace.apply(x * 3) * x,
    "of what does not move": lambda x: Product.apply(W, W) * x,
}


def by_torch(f, x, t):
    with forward_ad.dual_level():
        out = f(forward_ad.make_dual(x, t))
        flat, spec = torch.utils._pytree.tree_flatten(out)
        pairs = [forward_ad.unpack_dual(y) for y in flat]
        moves = [p.tangent if p.tangent is not None else torch.zeros_like(p.primal) for p in pairs]
        unflatten = torch.utils._pytree.tree_unflatten
        return unflatten([p.primal for p in pairs], spec), unflatten(moves, spec)


def total(tree):
    leaves = torch.utils._pytree.tree_leaves(tree)
    return sum((k + 1) * y.sin().sum() for k, y in enumerate(leaves))


def same(found, wanted):
    leaves = torch.utils._pytree.tree_leaves
    pairs = zip(leaves(found), leaves(wanted), strict=True)
    told = [difference(a, b) for a, b in pairs]
    assert not any(told), told


@pytest.mark.parametrize("name", FUNCTIONS)
def test_tangents_are_those_of_torchs_forward_mode(name):
    f = FUNCTIONS[name]
    truth = [by_torch(f, x, t) for x, t in zip(X, T, strict=True)]
    stacks = torch.utils._pytree.tree_map(lambda *rows: torch.stack(rows), *truth)
    same(jvp(f, (X[0],), (T[0],)), truth[0])
    same(vmap(lambda x, t: jvp(f, (x,), (t,)))(X, T), stacks)
    same(jvp(vmap(f), (X,), (T,)), stacks)
    same(linearize(f, X[1])[1](T[1]), truth[1][1])
    same(jit(lambda x, t: jvp(f, (x,), (t,)))(X[2], T[2]), truth[2])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_columns_are_tangents(name):
    def f(x):
        return total(FUNCTIONS[name](x)).reshape(1)

    columns = torch.stack([by_torch(f, X[0], e)[1] for e in torch.eye(3, dtype=D)], -1)
    same(jacfwd(f)(X[0]), columns)
    rows = vmap(jacfwd(f))(X)
    same(rows[0], columns)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_tangent_has_the_gradient_that_autograd_gives(name):
    f = FUNCTIONS[name]
    for x, t in zip(X, T, strict=True):
        p, q = x.clone().requires_grad_(), t.clone().requires_grad_()
        value = total(by_torch(f, p, q))
        wanted = torch.autograd.grad(value, (p, q), allow_unused=True, materialize_grads=True)
        found = grad(lambda x, t: total(jvp(f, (x,), (t,))), (0, 1))(x, t)
        same(found, wanted)


def test_gradients_are_those_of_the_backward():
    f = FUNCTIONS["both move"]
    x = X[0].clone().requires_grad_()
    (wanted,) = torch.autograd.grad(total(f(x)), x)
    same(grad(lambda x: total(f(x)))(X[0]), wanted)
    same(jacrev(lambda x: total(f(x)))(X[0]), wanted)
    assert not called


def test_an_example_is_told_as_the_loop_is():
    vmap(lambda x, t: jvp(Product.apply, (x, W), (t, W))[1])(X, T)
    jacfwd(lambda x: Product.apply(x, W))(X[0])
    assert called == [((3,), (3,))] * 2  # once for all examples, and once for all columns


def test_what_has_no_backward_is_pushed_forward():
    same(jvp(Forward.apply, (X[0],), (T[0],)), (X[0].sin(), X[0].cos() * T[0]))
    same(jacfwd(Forward.apply)(X[0]), torch.diag(X[0].cos()))
    same(vmap(jacfwd(Forward.apply))(X), torch.diag_embed(X.cos()))


def test_the_second_derivative_of_one_that_agrees():
    class Cube(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            ctx.save_for_forward(x)
            return x**3

        @staticmethod
        def backward(ctx, g):
            return 3 * g * ctx.saved_tensors[0] ** 2

        @staticmethod
        def jvp(ctx, t):
            return 3 * t * ctx.saved_tensors[0] ** 2

    f = lambda x: Cube.apply(x).sum()  # noqa: E731
    wanted = torch.diag(6 * X[0])
    for second in (hessian(f), jacfwd(jacfwd(f)), jacrev(jacfwd(f)), jacfwd(jacrev(f))):
        same(second(X[0]), wanted)
        same(vmap(second)(X)[0], wanted)
    same(jacfwd(jacfwd(jacfwd(Cube.apply)))(X[0, :1]).flatten(), torch.tensor([6.0], dtype=D))


def test_an_error_of_the_rule_is_the_users_and_leaves_nothing():
    with pytest.raises(ValueError, match="no such tangent"):
        jvp(lambda x: Raises.apply(x, W), (X[0],), (T[0],))
    same(jvp(torch.sin, (X[0],), (T[0],))[1], X[0].cos() * T[0])


class AsItIs(Function):
    """Results and tangents are those given. Torch's forward mode takes a view of them alone."""

    generate_vmap_rule = True

    @staticmethod
    def forward(_tag, *xs):
        return xs

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(_ctx, *gradients):
        return None, *gradients

    @staticmethod
    def jvp(_ctx, _tag, *tangents):
        return tangents


def test_a_tangent_may_be_given_on_as_it_is():
    p = W.clone().requires_grad_()

    def f(x):
        y, z = AsItIs.apply("tag", x * p, x.sin())
        return y * z

    def truth(x):
        return x * p * x.sin()

    def rows(f):
        return torch.stack([f(x, t) for x, t in zip(X, T, strict=True)])

    same(jvp(f, (X[0],), (T[0],)), torch.func.jvp(f, (X[0],), (T[0],)))
    wanted = rows(lambda x, t: jvp(truth, (x,), (t,))[1])
    same(vmap(lambda x, t: jvp(f, (x,), (t,))[1])(X, T), wanted)
    same(jvp(vmap(f), (X,), (T,))[1], wanted)
    same(vmap(jacfwd(f))(X), vmap(jacfwd(truth))(X))
    of_sum = lambda f: lambda x: f(x).sum()  # noqa: E731
    same(vmap(hessian(of_sum(f)))(X), vmap(hessian(of_sum(truth)))(X))
    push = lambda f: lambda x: jvp(f, (x,), (T[0],))[1].sum()  # noqa: E731
    same(grad(push(f))(X[0]), grad(push(truth))(X[0]))
