"""Batch norm writes into running statistics, and its operator's schema says nothing of it."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from draws import make_generator
from forall import grad, vmap

D = torch.float64
ONES = torch.ones(3, dtype=D)
XS = torch.randn(4, 5, 3, 6, dtype=D, generator=make_generator(0))


def gradients(norm, xs):
    def loss(w, x):
        return functional_call(norm, {"weight": w}, (x,)).sin().sum()

    return vmap(grad(loss), (None, 0))(norm.weight, xs)


def twice_the_same(norm, xs):
    return norm(xs[0]) + norm(xs[0])


def for_the_statistics_alone(norm, xs):
    norm(xs[0])
    return xs.sum() + norm.running_mean


def read_before_and_after(norm, xs):
    before = norm.running_var * 2
    return norm(xs[0]), before, norm.running_var * 2


def made_inside(norm, xs):
    mean, var = torch.zeros(3, dtype=D), torch.ones(3, dtype=D)
    y = F.batch_norm(xs[0], mean, var, None, None, True, 0.1)
    return y, mean, var, torch.zeros(3, dtype=D)


def of_instances(norm, xs):
    return F.instance_norm(xs[0], norm.running_mean, norm.running_var, None, None, True, 0.2)


def mapped(norm, xs):
    return vmap(norm)(xs)


WAYS = [
    mapped,
    twice_the_same,
    for_the_statistics_alone,
    read_before_and_after,
    made_inside,
    of_instances,
]


@pytest.mark.filterwarnings("ignore::forall.PerformanceWarning")
def test_what_is_made_of_what_is_captured(recorded):
    """Such a call is made once more, for the recorder, if it has written nothing."""

    def trained(weight, mean, transform):
        f = transform(lambda x: (F.batch_norm(x, mean, ONES, None, None, True) * weight).sum())
        for i in range(5):
            f(weight * (i + 1)).backward()
        return mean, weight.grad

    start = torch.linspace(0, 1, 15, dtype=D).reshape(5, 3)
    ours, theirs = (
        trained(start.clone().requires_grad_(), torch.zeros(3, dtype=D), way)
        for way in (recorded, lambda f: f)
    )
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("f", "mode"),
    [
        *((f, torch.enable_grad) for f in [gradients, *WAYS]),
        *((f, torch.inference_mode) for f in WAYS),
    ],
)
def test_each_call_leaves_what_the_functions_does(f, mode, training, recorded):
    ours = nn.BatchNorm1d(3).to(D).requires_grad_(False).train(training)
    theirs = copy.deepcopy(ours)
    g = recorded(lambda xs: f(ours, xs))
    for i in range(6):
        with mode():
            found, wanted = g(XS + i), f(theirs, XS + i)
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
