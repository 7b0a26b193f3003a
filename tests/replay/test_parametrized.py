"""Modules whose weights are computed from others: torch's parametrizations, and the user's own."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import forall
from forall import grad, jit, vmap

pytestmark = pytest.mark.usefixtures("at_once")
D = torch.float64
X = torch.linspace(-1, 1, 12, dtype=D).reshape(3, 4)


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).mT


class Shifted(nn.Linear):
    """A class of the user's, from which torch derives one of its own."""

    by = 1.0

    def forward(self, x):
        return super().forward(x) + self.by


def symmetric(net: nn.Module) -> nn.Module:
    parametrize.register_parametrization(net, "weight", Symmetric())
    return net


WAYS = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "the user's": symmetric,
}


def made(way: str, kind: type[nn.Linear] = nn.Linear) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(WAYS[way](kind(4, 4, dtype=D)), nn.Tanh())


def alike(f, x) -> None:
    """As without replay."""
    found = f(x)
    on, forall.config.replay = forall.config.replay, False
    wanted = f(x)
    forall.config.replay = on
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("kind", [nn.Linear, Shifted])
@pytest.mark.parametrize("way", WAYS)
def test_each_call_has_the_weights_of_now(way, kind, either_way, hits):
    net = made(way, kind).eval()
    mapped = vmap(grad(lambda x: net(x).square().sum()))
    for _ in range(6):
        alike(mapped, X)
        with torch.no_grad():
            for p in net.parameters():
                p.add_(0.1)
    assert hits
    if kind is Shifted:
        vars(net[0])["by"] = 2.0
        alike(mapped, X)
    parametrize.remove_parametrizations(net[0], "weight")
    alike(mapped, X)


def test_statistics_of_a_norm_move_on_with_each_call(either_way):
    """A spectral norm in training takes a step of its power iteration with each."""
    nets = [made("spectral_norm") for _ in range(2)]
    on, forall.config.replay = forall.config.replay, False
    wanted = [grad(lambda x: nets[0](x).square().sum())(X) for _ in range(6)]
    forall.config.replay = on
    slope = grad(lambda x: nets[1](x).square().sum())
    for expected in wanted:
        torch.testing.assert_close(slope(X), expected)


@pytest.mark.filterwarnings("ignore:.*not recorded")
@pytest.mark.parametrize("verb", [vmap, jit])
def test_weights_that_are_cached_for_a_while(verb):
    net = made("the user's").requires_grad_(False)
    f = verb(lambda x: net(x))
    for _ in range(4):
        torch.testing.assert_close(f(X), net(X))
    with parametrize.cached():
        before = f(X).clone()
        net.get_parameter("0.parametrizations.weight.original").mul_(2)
        torch.testing.assert_close(f(X), before)  # that is what it is for
    for _ in range(4):
        torch.testing.assert_close(f(X), net(X))
        net.get_parameter("0.parametrizations.weight.original").add_(1)


@pytest.mark.filterwarnings("ignore:.*not recorded")
@pytest.mark.parametrize("verb", [vmap, jit])
def test_first_called_while_weights_are_cached(verb):
    net = made("weight_norm").requires_grad_(False)
    f = verb(lambda x: net(x))
    with parametrize.cached():
        for _ in range(3):
            f(X)
    for _ in range(4):
        for p in net.parameters():
            p.mul_(1.5)
        torch.testing.assert_close(f(X), net(X))
