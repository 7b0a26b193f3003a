"""A Function's own ``vmap`` is run in the place of its forward, once for all examples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import Function

from forall import PerformanceWarning, grad, hessian, jacrev, jvp, vmap

D = torch.float64
X = torch.linspace(-2, 2, 15, dtype=D).reshape(5, 3)
shapes: list[tuple[int, ...]] = []  # of what the forwards in numpy were given
rules: list[tuple] = []  # what each call of a rule was told


@pytest.fixture(autouse=True)
def nothing_called_yet():
    shapes.clear()
    rules.clear()


class InNumpy(Function):
    of: Any
    sign = 1

    @classmethod
    def derivative(cls):
        raise NotImplementedError

    @staticmethod
    def setup_context(ctx, inputs, _output):
        ctx.save_for_backward(inputs[0])


def computed(f, x):
    shapes.append(tuple(x.shape))
    return torch.from_numpy(np.asarray(f(x.detach().numpy())))


def told(cls, info, in_dims, x):
    rules.append((info.batch_size, info.randomness, in_dims, tuple(x.shape)))
    return cls.apply(x), in_dims[0]


class Sin(InNumpy):
    @staticmethod
    def forward(x):
        return computed(np.sin, x)

    @staticmethod
    def backward(ctx, g):
        return g * Cos.apply(ctx.saved_tensors[0])

    @staticmethod
    def vmap(info, in_dims, x):
        return told(Sin, info, in_dims, x)


class Cos(InNumpy):
    @staticmethod
    def forward(x):
        return computed(np.cos, x)

    @staticmethod
    def backward(ctx, g):
        return -g * Sin.apply(ctx.saved_tensors[0])

    @staticmethod
    def vmap(info, in_dims, x):
        return told(Cos, info, in_dims, x)


def total(x):
    return Sin.apply(x).sum()


LEAF = X.clone().requires_grad_()
CALLS = {
    "vmap": (lambda: vmap(Sin.apply)(X), X.sin()),
    "axis 1": (lambda: vmap(Sin.apply, 1)(X), X.sin().T),
    "axis 1 and back": (lambda: vmap(Sin.apply, 1, 1)(X), X.sin()),
    "nested": (lambda: vmap(vmap(Sin.apply))(X), X.sin()),
    "nested, other axes": (lambda: vmap(vmap(Sin.apply), 1, 1)(X), X.sin()),
    "grad inside": (lambda: vmap(grad(total))(X), X.cos()),
    "grad outside": (lambda: grad(lambda x: vmap(Sin.apply)(x).sum())(X), X.cos()),
    "grad of grad inside": (lambda: vmap(vmap(grad(grad(Sin.apply))))(X), -X.sin()),
    "jvp inside": (lambda: vmap(lambda x: jvp(Sin.apply, (x,), (x,))[1])(X), X.cos() * X),
    "jvp outside": (lambda: jvp(vmap(Sin.apply), (X,), (X,))[1], X.cos() * X),
    "jacrev inside": (lambda: vmap(jacrev(Sin.apply))(X), torch.diag_embed(X.cos())),
    "backward": (
        lambda: torch.autograd.grad(vmap(Sin.apply)(LEAF).sum(), LEAF)[0],
        X.cos(),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_forward_in_numpy_runs_once_for_all_examples(name):
    call, right = CALLS[name]
    torch.testing.assert_close(call(), right)
    assert rules
    assert all(torch.Size(s).numel() == X.numel() for s in shapes), shapes
    assert len(shapes) <= 4  # forward, and what its derivatives need


def test_rule_is_told_of_the_level_and_of_axes():
    vmap(Sin.apply, 1, randomness="same")(X)
    assert rules == [(3, "same", (1,), (5, 3))]


def test_second_derivatives_by_both_modes_are_right():
    found = vmap(hessian(total))(X)
    torch.testing.assert_close(found, torch.diag_embed(-X.sin()))


class Quiet(InNumpy):
    """Its forward changes nothing that others see."""

    @staticmethod
    def forward(x):
        return torch.from_numpy(np.sin(x.detach().numpy()))

    @staticmethod
    def vmap(_info, in_dims, x):
        return Quiet.apply(x), in_dims[0]


def test_diverged_examples_are_right():
    found = vmap(lambda x: Quiet.apply(x) if x.sum() > 0 else 2 * x)(X)
    right = torch.where(X.sum(1, keepdim=True) > 0, X.sin(), 2 * X)
    torch.testing.assert_close(found, right)


def test_forward_that_changes_a_list_runs_in_groups_once_examples_diverge():
    with pytest.warns(PerformanceWarning, match="has changed what others see"):
        found = vmap(lambda x: Sin.apply(x) if x.sum() > 0 else 2 * x)(X)
    right = torch.where(X.sum(1, keepdim=True) > 0, X.sin(), 2 * X)
    torch.testing.assert_close(found, right)


class Scaled(Function):
    """Of several arguments and results, some of which are no tensors."""

    calls = 0

    @staticmethod
    def forward(x, factor, shared, pair):
        Scaled.calls += 1
        return x * factor * shared + pair[0], x.sum(), factor

    @staticmethod
    def setup_context(ctx, inputs, _output):
        x, ctx.factor, shared, _ = inputs
        ctx.save_for_backward(x, shared)

    @staticmethod
    def backward(ctx, g, h, _):
        x, shared = ctx.saved_tensors
        return g * ctx.factor * shared + h, None, (g * x).sum() * ctx.factor, None

    @staticmethod
    def vmap(_info, in_dims, x, factor, shared, pair):
        assert in_dims == (0, None, None, (0, None))
        assert pair[1] == "text"
        x = x.movedim(in_dims[0], 0)
        Scaled.rules += 1
        return (x.mT * factor * shared + pair[0], x.sum(1), factor), (1, 0, None)

    rules = 0


def test_arguments_and_results_of_all_kinds_come_through_a_rule():
    shared = torch.tensor(3.0, dtype=D)
    extra = torch.arange(5.0, dtype=D)

    def f(x, e):
        y, total, factor = Scaled.apply(x, 2.0, shared, (e, "text"))
        assert factor == 2.0
        return y, total

    y, sums = vmap(f)(X, extra)
    torch.testing.assert_close(y, X * 6 + extra[:, None])
    torch.testing.assert_close(sums, X.sum(1))
    slopes = vmap(grad(lambda x, e: f(x, e)[0].sum() + f(x, e)[1]))(X, extra)
    torch.testing.assert_close(slopes, torch.full_like(X, 7.0))
    assert Scaled.calls == 0
    assert Scaled.rules == 3


class Generated(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.exp()

    @staticmethod
    def setup_context(ctx, _inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0]


def test_generated_rule_means_none_of_its_own():
    torch.testing.assert_close(vmap(Generated.apply)(X), X.exp())
    torch.testing.assert_close(vmap(grad(lambda x: Generated.apply(x).sum()))(X), X.exp())


class Wrong(Generated):
    generate_vmap_rule = False

    @staticmethod
    def vmap(_info, _in_dims, x):
        return x.exp()


def test_rule_that_gives_no_out_dims_is_an_error():
    with pytest.raises(RuntimeError, match="vmap: returns the outputs and their out_dims"):
        vmap(Wrong.apply)(X)
    torch.testing.assert_close(vmap(Generated.apply)(X), X.exp())
