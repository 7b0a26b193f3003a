"""Gradients of parameters that all examples share: what a step of training takes."""

from collections.abc import Callable

import torch
from torch import nn
from torch.func import functional_call

from registry import Contestants, contest, workload


def shared(net: nn.Module, loss: Callable, batch: torch.Tensor) -> Contestants:
    """The gradient of the mean over examples of ``loss(output)``."""
    parameters = {name: p.detach() for name, p in net.named_parameters()}

    def transformed(api):
        def of_all(parameters):
            each = api.vmap(lambda x: loss(functional_call(net, parameters, (x,))))
            return each(batch).mean()

        gradient = api.grad(of_all)
        return lambda: gradient(parameters)

    def handwritten():
        found = torch.autograd.grad(loss(net(batch)).mean(), [*net.parameters()])
        return dict(zip(parameters, found, strict=True))

    return contest(transformed, handwritten)


@workload(
    "shared-mlp",
    "`grad` of a mean loss by `vmap`, a 64-256-256-8 perceptron, 256 examples",
)
def shared_mlp(device: torch.device) -> Contestants:
    net = nn.Sequential(
        nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 8)
    ).to(device)
    return shared(net, lambda y: y.square().mean(-1), torch.randn(256, 64, device=device))


@workload(
    "shared-cnn",
    "the same of a small CNN, 64 images of 3 x 32 x 32",
)
def shared_cnn(device: torch.device) -> Contestants:
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(-3),
        nn.Linear(32 * 15 * 15, 10),
    ).to(device)
    return shared(net, lambda y: y.square().mean(-1), torch.randn(64, 3, 32, 32, device=device))


@workload(
    "shared-embedding",
    "the same of an embedding of 2000 words and a read-out, 64 sentences of 12 words",
)
def shared_embedding(device: torch.device) -> Contestants:
    net = nn.Sequential(
        nn.Embedding(2000, 64), nn.LayerNorm(64), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 50)
    ).to(device)
    words = torch.randint(0, 2000, (64, 12), device=device)
    return shared(net, lambda y: y.square().mean((-1, -2)), words)
