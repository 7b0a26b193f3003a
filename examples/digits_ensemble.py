"""Part (b): an ensemble of networks trained at once, and its calibration.

stack_module_state stacks the parameters of networks of one architecture along a new first
dimension, and vmap(grad(loss)) over that dimension gives every network's gradient on its own
minibatch. The average of the members' predicted probabilities is the ensemble's prediction (deep
ensembles: Lakshminarayanan et al. 2017, arXiv:1612.01474).

Calibration is measured by the expected calibration error over equal-width bins of confidence
(Guo et al. 2017, arXiv:1706.04599) and by the negative log-likelihood (NLL), on the test images
and, because nearly every network is well calibrated where nearly every answer is right, on the
same images with noise added (as in Ovadia et al. 2019, arXiv:1906.02530).

Laws checked: the whole training, repeated one network at a time with torch.autograd, ends at the
same parameters and logits; the ensemble's NLL is at most the members' mean NLL (Jensen).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, nll_loss

import forall
from digits_checks import (
    FLOAT32_TOLERANCE,
    Comparison,
    check_all_close,
    check_close,
    compare_times,
    progress,
    require,
)
from digits_data import Digits, accuracy, convolutional_network

MEMBERS = 16
BATCH = 32
LEARNING_RATE = 0.05
MOMENTUM = 0.9
BINS = 10
PIXEL_NOISE = 0.6
NOISY_COPIES = 10


@dataclass(frozen=True)
class Calibration:
    """A reliability diagram and the numbers that go with it."""

    accuracy: float
    error: float
    nll: float
    bin_weight: list[float]
    bin_confidence: list[float]
    bin_accuracy: list[float]


@dataclass(frozen=True)
class EnsembleResult:
    """Per kind of test image: every member's calibration, the pooled members', the ensemble's."""

    members: dict[str, list[Calibration]]
    pooled: dict[str, Calibration]
    ensemble: dict[str, Calibration]
    comparison: Comparison


def calibration(log_probabilities: Tensor, labels: Tensor) -> Calibration:
    """Accuracy, expected calibration error and NLL of predictions (N, classes)."""
    confidence, predicted = log_probabilities.double().exp().max(-1)
    correct = (predicted == labels).double()
    bins = (confidence * BINS).long().clamp_max(BINS - 1)
    bin_weight, bin_confidence, bin_accuracy = [], [], []
    for index in bins.unique():
        inside = bins == index
        bin_weight.append(inside.double().mean().item())
        bin_confidence.append(confidence[inside].mean().item())
        bin_accuracy.append(correct[inside].mean().item())
    bins_with_weight = zip(bin_weight, bin_confidence, bin_accuracy, strict=True)
    error = sum(weight * abs(mean - right) for weight, mean, right in bins_with_weight)
    return Calibration(
        accuracy(log_probabilities, labels),
        error,
        nll_loss(log_probabilities.double(), labels).item(),
        bin_weight,
        bin_confidence,
        bin_accuracy,
    )


def ensemble_gradients(skeleton: nn.Module, functions: ModuleType = forall):
    """A function of (stacked parameters, images, labels) that gives every member's gradient."""

    def loss_of_member(params, images, labels):
        return cross_entropy(functions.functional_call(skeleton, params, (images,)), labels)

    return functions.vmap(functions.grad(loss_of_member))


def gradients_loop(networks: Sequence[nn.Module], images: Tensor, labels: Tensor) -> list[tuple]:
    """The same gradients by torch.autograd, one network at a time."""
    return [
        torch.autograd.grad(
            cross_entropy(network(images[member]), labels[member]), tuple(network.parameters())
        )
        for member, network in enumerate(networks)
    ]


def minibatches(digits: Digits, steps: int, seed: int):
    """For each step, a minibatch of its own for every member: (members, batch, ...)."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        drawn = torch.randint(len(digits.train_labels), (MEMBERS, BATCH), generator=generator)
        yield digits.train_images[drawn], digits.train_labels[drawn]


def stacked_parameters(networks: Sequence[nn.Module]) -> dict[str, Tensor]:
    """The members' parameters, stacked along a new first dimension."""
    params, _ = forall.stack_module_state(networks)
    return {name: value.detach().clone() for name, value in params.items()}


def train_at_once(digits: Digits, networks: Sequence[nn.Module], steps: int, seed: int):
    """Train all members together; returns their stacked parameters."""
    gradients_of = ensemble_gradients(networks[0])
    params = stacked_parameters(networks)
    velocity = {name: torch.zeros_like(value) for name, value in params.items()}
    batches = minibatches(digits, steps, seed)
    for _ in progress(range(steps), f"training {MEMBERS} networks at once"):
        gradients = gradients_of(params, *next(batches))
        for name, value in params.items():
            velocity[name].mul_(MOMENTUM).add_(gradients[name])
            value.sub_(velocity[name], alpha=LEARNING_RATE)
    return params


@torch.no_grad()
def descend(network: nn.Module, velocity: list[Tensor], gradients: tuple) -> None:
    """One step of gradient descent with momentum, in place."""
    for value, speed, gradient in zip(network.parameters(), velocity, gradients, strict=True):
        speed.mul_(MOMENTUM).add_(gradient)
        value.sub_(speed, alpha=LEARNING_RATE)


def train_one_by_one(digits: Digits, networks: Sequence[nn.Module], steps: int, seed: int) -> None:
    """The same training by the plain loop, in place."""
    velocities = [[torch.zeros_like(value) for value in net.parameters()] for net in networks]
    batches = minibatches(digits, steps, seed)
    for _ in progress(range(steps), "the same, one network at a time"):
        gradients = gradients_loop(networks, *next(batches))
        for network, velocity, gradient in zip(networks, velocities, gradients, strict=True):
            descend(network, velocity, gradient)


def member_logits(skeleton: nn.Module, params: dict[str, Tensor], images: Tensor) -> Tensor:
    """The logits (members, N, classes) of all members on the same images."""

    def logits_of_member(member):
        return forall.functional_call(skeleton, member, (images,))

    return forall.vmap(logits_of_member)(params)


def noisy_copies(images: Tensor, seed: int) -> Tensor:
    """Every image several times, with Gaussian noise of its own on every pixel."""
    copies = images.repeat(NOISY_COPIES, 1, 1, 1)
    generator = torch.Generator().manual_seed(seed)
    return copies + PIXEL_NOISE * torch.randn(copies.shape, generator=generator)


def evaluate(logits: Tensor, labels: Tensor) -> tuple[list[Calibration], Calibration, Calibration]:
    """The calibration of each member, of all members' predictions pooled, of the ensemble."""
    log_probabilities = logits.double().log_softmax(-1)
    members = [calibration(member, labels) for member in log_probabilities]
    pooled = calibration(log_probabilities.flatten(0, 1), labels.repeat(MEMBERS))
    mean_probabilities = log_probabilities.exp().mean(0)
    ensemble = calibration(mean_probabilities.log(), labels)
    mean_nll = sum(member.nll for member in members) / MEMBERS
    require(
        ensemble.nll <= mean_nll,
        f"the ensemble's NLL {ensemble.nll:.4f} exceeds the members' mean {mean_nll:.4f}",
    )
    return members, pooled, ensemble


def print_calibration(kind: str, members: list[Calibration], ensemble: Calibration) -> None:
    """One line each for the mean of the members, the best member and the ensemble."""

    def line(who, accuracy, error, nll):
        print(f"  {who:<38} accuracy {accuracy:6.1%}   ECE {error:.4f}   NLL {nll:.4f}")

    rows = [(member.accuracy, member.error, member.nll) for member in members]
    accuracies, errors, nlls = zip(*rows, strict=True)
    line(f"{kind}: mean of members", *(sum(column) / MEMBERS for column in zip(*rows, strict=True)))
    line(f"{kind}: best member, each column", max(accuracies), min(errors), min(nlls))
    line(f"{kind}: ensemble", ensemble.accuracy, ensemble.error, ensemble.nll)


def time_gradients(digits: Digits, networks: Sequence[nn.Module], rounds: int) -> Comparison:
    """Time all members' gradients on one minibatch each."""
    params = stacked_parameters(networks)
    images, labels = next(minibatches(digits, 1, seed=0))

    def transformed(functions):
        gradients_of = ensemble_gradients(networks[0], functions)
        return lambda: gradients_of(params, images, labels)

    def loop():
        return gradients_loop(networks, images, labels)

    return compare_times(f"(b) gradients of {MEMBERS} networks", loop, transformed, rounds)


def run_ensemble(digits: Digits, steps: int, rounds: int, seed: int) -> EnsembleResult:
    """Train the ensemble, check it against the loop and report its calibration."""
    print(f"\n(b) {MEMBERS} convolutional networks trained at once, {steps} steps")
    torch.manual_seed(seed)
    networks = [convolutional_network() for _ in range(MEMBERS)]
    params = train_at_once(digits, networks, steps, seed)
    train_one_by_one(digits, networks, steps, seed)
    expected = stacked_parameters(networks)
    check_all_close("parameters after the whole training", params, expected, FLOAT32_TOLERANCE)
    logits = member_logits(networks[0], params, digits.test_images)
    expected_logits = torch.stack([network(digits.test_images) for network in networks])
    check_close("logits of all members", logits, expected_logits, FLOAT32_TOLERANCE)
    noisy = noisy_copies(digits.test_images, seed)
    kinds = {
        "test": (logits, digits.test_labels),
        "noisy test": (
            member_logits(networks[0], params, noisy),
            digits.test_labels.repeat(NOISY_COPIES),
        ),
    }
    members, pooled, ensemble = {}, {}, {}
    for kind, (values, labels) in kinds.items():
        members[kind], pooled[kind], ensemble[kind] = evaluate(values, labels)
        print_calibration(kind, members[kind], ensemble[kind])
    return EnsembleResult(members, pooled, ensemble, time_gradients(digits, networks, rounds))
