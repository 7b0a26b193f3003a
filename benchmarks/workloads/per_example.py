"""Per-example gradients of a multilayer perceptron and of a convolutional network.

The hand-written programs run one forward and one backward pass over the whole batch, keep the
input of every layer and the gradient at its output, and combine the two per example.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight

import forall
from registry import JIT, Contestants, assert_agree, contest, workload


def per_example_gradients(api, model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor):
    """The usual way: differentiate the loss of one example, then vectorise over examples."""
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def loss(parameters, example, label):
        logits = api.functional_call(model, parameters, (example.unsqueeze(0),))
        return F.cross_entropy(logits, label.unsqueeze(0))

    gradients = api.vmap(api.grad(loss), in_dims=(None, 0, 0))
    return lambda: gradients(parameters, inputs, labels)


def by_jax(jax, logits, model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor):
    """The same in JAX, where `logits` is the network on one example."""

    def loss(parameters, example, label):
        return -jax.nn.log_softmax(logits(parameters, example))[label]

    gradients = jax.vmap(jax.grad(loss), (None, 0, 0))
    return gradients, (dict(model.named_parameters()), inputs, labels)


def of_two_layers(model: nn.Module, activation, inputs: torch.Tensor, labels: torch.Tensor):
    """The gradients by hand, of a network whose parameters are those of two linear layers."""
    names = [name for name, _ in model.named_parameters()]
    weight1, bias1, weight2, bias2 = (value.detach() for value in model.parameters())

    def handwritten():
        # Starting the graph behind the first layer spares the gradients of the shared weights.
        first = F.linear(inputs, weight1, bias1).requires_grad_()
        hidden = activation(first)
        second = F.linear(hidden, weight2, bias2)
        loss = F.cross_entropy(second, labels, reduction="sum")
        grad1, grad2 = torch.autograd.grad(loss, (first, second))
        of_weight1 = torch.bmm(grad1.unsqueeze(2), inputs.unsqueeze(1))
        of_weight2 = torch.bmm(grad2.unsqueeze(2), hidden.detach().unsqueeze(1))
        return dict(zip(names, (of_weight1, grad1, of_weight2, grad2), strict=True))

    return handwritten


def perceptron(
    device: torch.device, examples: int, width: int = 784, hidden_units: int = 128
) -> Contestants:
    model = nn.Sequential(
        nn.Linear(width, hidden_units), nn.ReLU(), nn.Linear(hidden_units, 10)
    ).to(device)
    inputs = torch.randn(examples, width, device=device)
    labels = torch.randint(10, (examples,), device=device)

    return contest(
        lambda api: per_example_gradients(api, model, inputs, labels),
        of_two_layers(model, F.relu, inputs, labels),
        by_jax=lambda jax: by_jax(jax, perceptron_by_jax(jax), model, inputs, labels),
        by_opacus=(model, lambda m: F.cross_entropy(m(inputs), labels, reduction="sum")),
    )


def perceptron_by_jax(jax):
    def logits(p, x):
        hidden = jax.nn.relu(p["0.weight"] @ x + p["0.bias"])
        return p["2.weight"] @ hidden + p["2.bias"]

    return logits


def convolution_weight_gradient(inputs: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Per-example weight gradients of a 3x3 convolution with padding 1.

    One grouped convolution with a group per example: on small images it beats unfolding the
    input into a matrix.
    """
    examples, channels, filters = *inputs.shape[:2], grad.shape[1]
    gradients = conv2d_weight(
        inputs.flatten(0, 1).unsqueeze(0),
        (examples * filters, channels, 3, 3),
        grad.flatten(0, 1).unsqueeze(0),
        padding=1,
        groups=examples,
    )
    return gradients.view(examples, filters, channels, 3, 3)


def convolutional(device: torch.device, examples: int) -> Contestants:
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 7 * 7, 10),
    ).to(device)
    inputs = torch.randn(examples, 1, 28, 28, device=device)
    labels = torch.randint(10, (examples,), device=device)
    weight1, bias1, weight2, bias2, weight3, bias3 = (
        value.detach() for value in model.parameters()
    )

    def handwritten():
        first = F.conv2d(inputs, weight1, bias1, padding=1).requires_grad_()
        pooled1 = F.max_pool2d(F.relu(first), 2)
        second = F.conv2d(pooled1, weight2, bias2, padding=1)
        pooled2 = F.max_pool2d(F.relu(second), 2).flatten(1)
        logits = F.linear(pooled2, weight3, bias3)
        loss = F.cross_entropy(logits, labels, reduction="sum")
        grad1, grad2, grad3 = torch.autograd.grad(loss, (first, second, logits))
        return {
            "0.weight": convolution_weight_gradient(inputs, grad1),
            "0.bias": grad1.sum((2, 3)),
            "3.weight": convolution_weight_gradient(pooled1.detach(), grad2),
            "3.bias": grad2.sum((2, 3)),
            "7.weight": torch.bmm(grad3.unsqueeze(2), pooled2.detach().unsqueeze(1)),
            "7.bias": grad3,
        }

    return contest(
        lambda api: per_example_gradients(api, model, inputs, labels),
        handwritten,
        by_jax=lambda jax: by_jax(jax, convolutional_by_jax(jax), model, inputs, labels),
        by_opacus=(model, lambda m: F.cross_entropy(m(inputs), labels, reduction="sum")),
    )


def convolutional_by_jax(jax):
    def convolved(x, weight, bias):
        y = jax.lax.conv_general_dilated(x[None], weight, (1, 1), "SAME")[0]
        return jax.nn.relu(y + bias[:, None, None])

    def pooled(x):
        return jax.lax.reduce_window(x, -jax.numpy.inf, jax.lax.max, (1, 2, 2), (1, 2, 2), "VALID")

    def logits(p, x):
        first = pooled(convolved(x, p["0.weight"], p["0.bias"]))
        second = pooled(convolved(first, p["3.weight"], p["3.bias"]))
        return p["7.weight"] @ second.reshape(-1) + p["7.bias"]

    return logits


@workload(
    "per-example-mlp",
    "per-example gradients of a 784-128-10 perceptron, 64 examples",
    limits={(JIT, 2): 1.15},
)
def per_example_mlp(device: torch.device) -> Contestants:
    return perceptron(device, 64)


@workload(
    "per-example-cnn",
    "per-example gradients of a small CNN, 32 images of 28x28",
    limits={(JIT, 2): 1.0},
)
def per_example_cnn(device: torch.device) -> Contestants:
    return convolutional(device, 32)


@workload("memory-mlp", "per-example gradients of the perceptron, 256 examples", "peak memory")
def memory_mlp(device: torch.device) -> Contestants:
    return perceptron(device, 256)


@workload("memory-cnn", "per-example gradients of the CNN, 128 images", "peak memory")
def memory_cnn(device: torch.device) -> Contestants:
    return convolutional(device, 128)


# The norms alone: wanted in a quarter of the time of the gradients, and a tenth of their memory.
NORMS = ("forall", "vmap(grad)", "hand-written")


def norms(model: nn.Module, inputs: torch.Tensor, handwritten) -> Contestants:
    """`per_example_grad_norm`, the norms of gradients that are made, and a program by hand."""
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def loss(parameters, example):
        return forall.functional_call(model, parameters, (example,)).square().mean()

    direct = forall.per_example_grad_norm(loss)
    gradients = forall.vmap(forall.grad(loss), in_dims=(None, 0))

    def made():
        found = gradients(parameters, inputs).values()
        return torch.stack([torch.linalg.vector_norm(g.flatten(1), dim=1) for g in found]).norm(
            dim=0
        )

    return Contestants(
        (lambda: direct(parameters, inputs), made, handwritten),
        lambda actual, expected: assert_agree(actual, expected, 1e-5),
    )


def wide(device: torch.device, examples: int, width: int = 1024) -> Contestants:
    layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*layers[:-1]).to(device)
    inputs = torch.randn(examples, width, device=device)

    def handwritten():
        entering, leaving, value = [], [], inputs
        for layer in model:
            if isinstance(layer, nn.Linear):
                entering.append(value)
                value = F.linear(value, layer.weight.detach(), layer.bias.detach())
                value = value if value.requires_grad else value.requires_grad_()
                leaving.append(value)
            else:
                value = layer(value)
        found = torch.autograd.grad(value.square().mean(1).sum(), leaving)
        squares = [
            g.square().sum(1) * (1 + x.detach().square().sum(1))
            for x, g in zip(entering, found, strict=True)
        ]
        return torch.stack(squares).sum(0).sqrt()

    return norms(model, inputs, handwritten)


@workload(
    "norms-mlp",
    "norms of the gradients of four layers of width 1024, 64 examples",
    names=NORMS,
    limits={(0, 1): 0.25},
)
def norms_mlp(device: torch.device) -> Contestants:
    return wide(device, 64)


@workload(
    "norms-mlp-memory",
    "norms of the gradients of four layers of width 1024, 64 examples",
    "peak memory",
    names=NORMS,
    limits={(0, 1): 0.1},
)
def norms_mlp_memory(device: torch.device) -> Contestants:
    return wide(device, 64)
