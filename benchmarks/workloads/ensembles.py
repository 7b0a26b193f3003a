"""An ensemble of perceptrons evaluated, and differentiated, as one batch of models."""

import copy
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from registry import JIT, Contestants, contest, workload

MODELS, EXAMPLES = 32, 64


def ensemble(device: torch.device):
    """The models, a common batch of inputs and its labels."""
    models = [
        nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
        for _ in range(MODELS)
    ]
    inputs = torch.randn(EXAMPLES, 64, device=device)
    labels = torch.randint(10, (EXAMPLES,), device=device)
    return models, inputs, labels


def losses(api, models: Sequence[nn.Module], inputs: torch.Tensor, labels: torch.Tensor):
    """The loss of one model, and all models' parameters and buffers."""
    skeleton = copy.deepcopy(models[0]).to("meta")

    def loss(parameters, buffers):
        logits = api.functional_call(skeleton, (parameters, buffers), (inputs,))
        return F.cross_entropy(logits, labels)

    return loss, *api.stack_module_state(models)


def stacked(models: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """The models' parameters stacked by hand."""
    names = [name for name, _ in models[0].named_parameters()]
    return {
        name: torch.stack([model.get_parameter(name).detach() for model in models])
        for name in names
    }


def forward(parameters: dict[str, torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
    """All models at once, with batched matrix products."""
    shared = inputs.expand(MODELS, *inputs.shape)
    hidden = torch.baddbmm(
        parameters["0.bias"].unsqueeze(1), shared, parameters["0.weight"].transpose(1, 2)
    ).relu()
    return torch.baddbmm(
        parameters["2.bias"].unsqueeze(1), hidden, parameters["2.weight"].transpose(1, 2)
    )


def by_jax_forward(jax):
    """One model."""

    def forward(p, inputs):
        hidden = jax.nn.relu(inputs @ p["0.weight"].T + p["0.bias"])
        return hidden @ p["2.weight"].T + p["2.bias"]

    return forward


@workload(
    "ensemble-forward",
    f"forward pass of {MODELS} perceptrons 64-64-10, 64 examples",
    limits={(JIT, 2): 1.1},
)
def ensemble_forward(device: torch.device) -> Contestants:
    models, inputs, _ = ensemble(device)
    weights = stacked(models)
    skeleton = copy.deepcopy(models[0]).to("meta")

    def transformed(api):
        parameters, buffers = api.stack_module_state(models)
        parameters = {name: value.detach() for name, value in parameters.items()}

        def call(parameters, buffers, inputs):
            return api.functional_call(skeleton, (parameters, buffers), (inputs,))

        batched = api.vmap(call, in_dims=(0, 0, None))
        return lambda: batched(parameters, buffers, inputs)

    def by_jax(jax):
        return jax.vmap(by_jax_forward(jax), (0, None)), (weights, inputs)

    return contest(transformed, lambda: forward(weights, inputs), by_jax=by_jax)


def gradients_by_hand(
    weights: dict[str, torch.Tensor], inputs: torch.Tensor, labels: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The gradients of every model's loss."""
    leaves = {name: value.detach().requires_grad_() for name, value in weights.items()}
    logits = forward(leaves, inputs).flatten(0, 1)
    # Every model's mean over the examples, summed over the models.
    loss = F.cross_entropy(logits, labels.repeat(MODELS), reduction="sum") / EXAMPLES
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return dict(zip(leaves, grads, strict=True))


@workload("ensemble-grad", "the same ensemble's losses differentiated in its parameters")
def ensemble_grad(device: torch.device) -> Contestants:
    models, inputs, labels = ensemble(device)
    weights = stacked(models)

    def transformed(api):
        loss, parameters, buffers = losses(api, models, inputs, labels)
        parameters = {name: value.detach() for name, value in parameters.items()}
        batched = api.vmap(api.grad(loss))
        return lambda: batched(parameters, buffers)

    def handwritten():
        return gradients_by_hand(weights, inputs, labels)

    def by_jax(jax):
        logits = by_jax_forward(jax)

        def loss(p, inputs, labels):
            chosen = jax.nn.log_softmax(logits(p, inputs))[jax.numpy.arange(EXAMPLES), labels]
            return -chosen.mean()

        return jax.vmap(jax.grad(loss), (0, None, None)), (weights, inputs, labels)

    return contest(transformed, handwritten, by_jax=by_jax)


@workload("ensemble-backward", "the losses by `vmap`, differentiated outside by torch's autograd")
def ensemble_backward(device: torch.device) -> Contestants:
    models, inputs, labels = ensemble(device)
    weights = stacked(models)

    def transformed(api):
        loss, parameters, buffers = losses(api, models, inputs, labels)
        batched = api.vmap(loss)

        def program():
            total = batched(parameters, buffers).sum()
            grads = torch.autograd.grad(total, list(parameters.values()))
            return dict(zip(parameters, grads, strict=True))

        return program

    return contest(transformed, lambda: gradients_by_hand(weights, inputs, labels))
