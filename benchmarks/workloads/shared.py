"""Gradients of parameters that all examples share: what a step of training takes."""

from collections.abc import Callable

import torch
from torch import nn
from torch.func import functional_call

from registry import Contestants, contest, workload


def shared(
    net: nn.Module, loss: Callable, batch: torch.Tensor, one: Callable = lambda x: x
) -> Contestants:
    """The gradient of the mean over examples of ``loss(output)``; the network takes ``one(x)``."""
    parameters = {name: p.detach() for name, p in net.named_parameters()}

    def transformed(api):
        def of_all(parameters):
            each = api.vmap(lambda x: loss(functional_call(net, parameters, (one(x),))))
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


@workload(
    "shared-bags",
    "the same of an `EmbeddingBag` of 5000 words and a read-out, 128 bags of 20 words",
)
def shared_bags(device: torch.device) -> Contestants:
    net = nn.Sequential(nn.EmbeddingBag(5000, 64), nn.Linear(64, 5)).to(device)
    words = torch.randint(0, 5000, (128, 20), device=device)
    return shared(net, lambda y: y.square().mean(-1), words, lambda bag: bag[None])


@workload(
    "shared-weight-norm",
    "the same of a 64-256-8 perceptron with `weight_norm`, 256 examples",
)
def shared_weight_norm(device: torch.device) -> Contestants:
    normed = nn.utils.parametrizations.weight_norm
    net = nn.Sequential(normed(nn.Linear(64, 256)), nn.Tanh(), normed(nn.Linear(256, 8)))
    net.to(device)
    batch = torch.randn(256, 64, device=device)
    parameters = [*net.parameters()]

    def transformed(api):
        each = api.vmap(lambda x: net(x).square().mean())
        return lambda: torch.autograd.grad(each(batch).mean(), parameters)

    def handwritten():
        return torch.autograd.grad(net(batch).square().mean(-1).mean(), parameters)

    return contest(transformed, handwritten)


@workload(
    "shared-residual",
    "`grad` of a squared Laplace residual: `hessian` at 512 points of a 2-64-64-1 perceptron",
)
def shared_residual(device: torch.device) -> Contestants:
    net = nn.Sequential(
        nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    ).to(device)
    points = torch.randn(512, 2, device=device)
    parameters = {name: p.detach() for name, p in net.named_parameters()}

    def transformed(api):
        def value(parameters, z):
            return functional_call(net, parameters, (z,)).squeeze()

        def residual(parameters, z):
            return api.hessian(value, 1)(parameters, z).diagonal().sum() ** 2

        def of_all(parameters):
            return api.vmap(residual, (None, 0))(parameters, points).mean()

        gradient = api.grad(of_all)
        return lambda: gradient(parameters)

    def handwritten():
        z = points.clone().requires_grad_()
        (slope,) = torch.autograd.grad(net(z).sum(), z, create_graph=True)
        rows = [torch.autograd.grad(slope[:, i].sum(), z, create_graph=True)[0] for i in range(2)]
        loss = sum(row[:, i] for i, row in enumerate(rows)).square().mean()
        found = torch.autograd.grad(loss, [*net.parameters()], allow_unused=True)
        return {
            name: torch.zeros_like(p) if g is None else g
            for (name, p), g in zip(parameters.items(), found, strict=True)
        }

    return contest(transformed, handwritten)


@workload(
    "shared-critic",
    "a gradient penalty (`grad` inside `vmap`) of a convolutional critic, 64 images of 8 x 8",
)
def shared_critic(device: torch.device) -> Contestants:
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.Softplus(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.Softplus(),
        nn.Flatten(-3),
        nn.Linear(16 * 64, 1),
    ).to(device)
    images = torch.randn(64, 1, 8, 8, device=device)
    parameters = [*net.parameters()]

    def gradients(loss):
        return torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)

    def transformed(api):
        def penalty(image):
            slope = api.grad(lambda z: net(z).squeeze())(image)
            return (slope.square().sum().sqrt() - 1) ** 2

        each = api.vmap(penalty)
        return lambda: gradients(each(images).mean())

    def handwritten():
        z = images.clone().requires_grad_()
        (slope,) = torch.autograd.grad(net(z).sum(), z, create_graph=True)
        return gradients((slope.flatten(1).norm(dim=1) - 1).square().mean())

    return contest(transformed, handwritten)
