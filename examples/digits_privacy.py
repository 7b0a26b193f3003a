"""Part (a): differentially private training, with per-example gradients.

DP-SGD (Abadi et al. 2016, arXiv:1607.00133) draws each batch by Poisson sampling, clips the
gradient of every example to norm C, and adds Gaussian noise of standard deviation sigma * C to
their sum. The gradients of the single examples are vmap(grad(loss)).

The privacy loss is accounted for in Renyi differential privacy (RDP), for data sets that differ by
adding or removing one example:

* one step with sampling rate q has, at an integer order alpha, the RDP
      1 / (alpha - 1) * log sum_k binom(alpha, k) (1 - q)^(alpha - k) q^k exp((k^2 - k) / 2 sigma^2)
  (Mironov, Talwar, Zhang 2019, "Renyi Differential Privacy of the Sampled Gaussian Mechanism",
  arXiv:1908.10530, section 3.3), and the RDP of several steps adds up;
* RDP (alpha, rho) implies (epsilon, delta)-differential privacy with
      epsilon = rho + log((alpha - 1) / alpha) - (log delta + log alpha) / (alpha - 1)
  (Canonne, Kamath, Steinke 2020, "The Discrete Gaussian for Differential Privacy",
  arXiv:2004.00010, proposition 12; Balle et al. 2020, "Hypothesis Testing Interpretations and
  Renyi Differential Privacy", arXiv:1905.09982, theorem 21).

Laws checked: vmap(grad) gives the gradients that torch.autograd gives one example at a time, and
the clipped sum built from them is the loop's; the accountant's formula equals a numerical
integral of its definition, and alpha / 2 sigma^2 at q = 1.

This shows the computation and is no hardened implementation: its noise comes from PyTorch's
ordinary generator, and the hyperparameters were chosen outside the privacy budget.
"""

import math
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import forall
from digits_checks import (
    FLOAT32_TOLERANCE,
    FLOAT64_TOLERANCE,
    Comparison,
    check_all_close,
    check_close,
    compare_times,
    progress,
    require,
)
from digits_data import Digits, accuracy, convolutional_network, detached_parameters

ORDERS = range(2, 257)
TIMED_IMAGES = 256


@dataclass(frozen=True)
class PrivacySettings:
    """The settings of private training and its two targets."""

    steps: int = 300
    sampling_rate: float = 0.25
    noise_multiplier: float = 3.0
    clip_norm: float = 0.5
    learning_rate: float = 0.3
    momentum: float = 0.9
    delta: float = 1e-4
    largest_epsilon: float = 8.0
    least_accuracy: float = 0.9


@dataclass(frozen=True)
class PrivacyResult:
    """The curves of private training, and what it led to."""

    steps: list[int]
    accuracies: list[float]
    epsilons: list[float]
    settings: PrivacySettings
    network: nn.Module
    params: dict[str, Tensor]
    comparison: Comparison


def renyi_dp(order: int, sampling_rate: float, noise_multiplier: float) -> float:
    """The RDP of one step of the sampled Gaussian mechanism at an integer order."""
    k = torch.arange(order + 1, dtype=torch.float64)
    log_binomial = math.lgamma(order + 1) - torch.lgamma(k + 1) - torch.lgamma(order - k + 1)
    # xlogy makes 0 * log 0 zero, which covers a sampling rate of 1.
    log_weight = torch.xlogy(order - k, torch.tensor(1 - sampling_rate, dtype=torch.float64))
    log_weight = log_weight + k * math.log(sampling_rate)
    log_terms = log_binomial + log_weight + (k * k - k) / (2 * noise_multiplier**2)
    return torch.logsumexp(log_terms, 0).item() / (order - 1)


def renyi_dp_by_quadrature(order: int, sampling_rate: float, noise_multiplier: float) -> float:
    """The same from the definition: log E[(p / p0)^order] under p0 = N(0, sigma^2).

    Here p = (1 - q) N(0, sigma^2) + q N(1, sigma^2). The trapezoidal rule converges faster than
    any power of its step on such an integrand.
    """
    reach = 12 * noise_multiplier
    z = torch.linspace(-reach, order + reach, 200_001, dtype=torch.float64)
    variance = noise_multiplier**2
    log_ratio = torch.log1p(sampling_rate * torch.expm1((2 * z - 1) / (2 * variance)))
    log_density = -z.square() / (2 * variance) - math.log(math.sqrt(2 * math.pi * variance))
    log_integral = torch.logsumexp(order * log_ratio + log_density, 0) + torch.log(z[1] - z[0])
    return log_integral.item() / (order - 1)


def epsilon_spent(rdp_of_a_step: dict[int, float], steps: int, delta: float) -> float:
    """The least epsilon over all orders after `steps` steps."""
    epsilons = [
        steps * rdp
        + math.log((order - 1) / order)
        - (math.log(delta) + math.log(order)) / (order - 1)
        for order, rdp in rdp_of_a_step.items()
    ]
    return max(0.0, min(epsilons))


def check_accountant(settings: PrivacySettings) -> None:
    """Check the accountant's formula against quadrature and against its closed form."""
    sigma, orders = settings.noise_multiplier, (2, 3, 8, 32)
    formula = [renyi_dp(order, settings.sampling_rate, sigma) for order in orders]
    integral = [renyi_dp_by_quadrature(order, settings.sampling_rate, sigma) for order in orders]
    unsampled = [renyi_dp(order, 1.0, sigma) for order in orders]
    closed_form = [order / (2 * sigma**2) for order in orders]
    check_close(
        "accountant: formula against quadrature and closed form",
        torch.tensor(formula + unsampled, dtype=torch.float64),
        torch.tensor(integral + closed_form, dtype=torch.float64),
        FLOAT64_TOLERANCE,
    )


def per_example_gradients(network: nn.Module, functions: ModuleType = forall):
    """A function of (parameters, images, labels) that gives one gradient per image."""

    def loss_of_example(params, image, label):
        logits = functions.functional_call(network, params, (image.unsqueeze(0),))
        return cross_entropy(logits, label.unsqueeze(0))

    return functions.vmap(functions.grad(loss_of_example), in_dims=(None, 0, 0))


def gradient_of_one_example(network: nn.Module, image: Tensor, label: Tensor) -> tuple:
    """The gradient of one image's loss by torch.autograd."""
    loss = cross_entropy(network(image.unsqueeze(0)), label.unsqueeze(0))
    return torch.autograd.grad(loss, tuple(network.parameters()))


def per_example_gradients_loop(network: nn.Module, images: Tensor, labels: Tensor) -> dict:
    """The same gradients by the plain loop."""
    pairs = zip(images, labels, strict=True)
    gradients = [gradient_of_one_example(network, image, label) for image, label in pairs]
    names = [name for name, _ in network.named_parameters()]
    return dict(zip(names, map(torch.stack, zip(*gradients, strict=True)), strict=True))


def clipped_sum(gradients: dict[str, Tensor], clip_norm: float) -> dict[str, Tensor]:
    """The sum of the per-example gradients, each first scaled down to norm at most C."""
    squares = [value.flatten(1).square().sum(1) for value in gradients.values()]
    factors = (clip_norm / torch.stack(squares).sum(0).sqrt().clamp_min(1e-12)).clamp_max(1.0)
    return {name: torch.einsum("n,n...->...", factors, value) for name, value in gradients.items()}


def clipped_sum_loop(network: nn.Module, images: Tensor, labels: Tensor, clip_norm: float) -> dict:
    """The same sum by the plain loop, clipped by PyTorch's own utility."""
    total = {name: torch.zeros_like(value) for name, value in network.state_dict().items()}
    for image, label in zip(images, labels, strict=True):
        network.zero_grad()
        cross_entropy(network(image.unsqueeze(0)), label.unsqueeze(0)).backward()
        nn.utils.clip_grad_norm_(network.parameters(), clip_norm)
        for name, value in network.named_parameters():
            if value.grad is not None:
                total[name] += value.grad
    network.zero_grad()
    return total


def train_privately(digits: Digits, network: nn.Module, settings: PrivacySettings, seed: int):
    """DP-SGD with momentum; returns the parameters and (step, accuracy) pairs."""
    gradients_of = per_example_gradients(network)
    generator = torch.Generator().manual_seed(seed)
    params = detached_parameters(network)
    velocity = {name: torch.zeros_like(value) for name, value in params.items()}
    # The expected batch size is public; the realised one would leak how many were drawn.
    expected_batch = settings.sampling_rate * len(digits.train_labels)
    deviation = settings.noise_multiplier * settings.clip_norm
    curve = []
    for step in progress(range(1, settings.steps + 1), "private training"):
        drawn = torch.rand(len(digits.train_labels), generator=generator) < settings.sampling_rate
        gradients = gradients_of(params, digits.train_images[drawn], digits.train_labels[drawn])
        total = clipped_sum(gradients, settings.clip_norm)
        for name, value in params.items():
            noise = deviation * torch.randn(value.shape, generator=generator)
            velocity[name].mul_(settings.momentum).add_((total[name] + noise) / expected_batch)
            params[name] = value - settings.learning_rate * velocity[name]
        if step % 5 == 0 or step == settings.steps:
            logits = forall.functional_call(network, params, (digits.test_images,))
            curve.append((step, accuracy(logits, digits.test_labels)))
    return params, curve


def check_gradients(network: nn.Module, digits: Digits, settings: PrivacySettings, when: str):
    """Check gradients of all training images, and their clipped sum, against the loop."""
    images, labels = digits.train_images, digits.train_labels
    params = detached_parameters(network)
    gradients = per_example_gradients(network)(params, images, labels)
    expected = per_example_gradients_loop(network, images, labels)
    what = f"{len(labels)} per-example gradients {when}"
    check_all_close(what, gradients, expected, FLOAT32_TOLERANCE)
    total = clipped_sum(gradients, settings.clip_norm)
    expected_total = clipped_sum_loop(network, images, labels, settings.clip_norm)
    check_all_close(f"clipped sum of them {when}", total, expected_total, FLOAT32_TOLERANCE)


def time_gradients(network: nn.Module, digits: Digits, rounds: int) -> Comparison:
    """Time the per-example gradients of a batch."""
    images, labels = digits.train_images[:TIMED_IMAGES], digits.train_labels[:TIMED_IMAGES]
    params = detached_parameters(network)

    def transformed(functions):
        gradients_of = per_example_gradients(network, functions)
        return lambda: gradients_of(params, images, labels)

    def loop():
        return per_example_gradients_loop(network, images, labels)

    return compare_times(f"(a) gradients of {TIMED_IMAGES} images", loop, transformed, rounds)


def run_privacy(digits: Digits, settings: PrivacySettings, rounds: int, seed: int, quick: bool):
    """Train privately, check everything and report."""
    print("\n(a) differentially private training of a convolutional network")
    check_accountant(settings)
    torch.manual_seed(seed)
    network = convolutional_network()
    check_gradients(network, digits, settings, "before training")
    params, curve = train_privately(digits, network, settings, seed)
    network.load_state_dict(params)
    check_gradients(network, digits, settings, "after training")
    print("      (at both ends only: the loop over all steps would take over a minute)")
    rdp = {
        order: renyi_dp(order, settings.sampling_rate, settings.noise_multiplier)
        for order in ORDERS
    }
    steps, accuracies = map(list, zip(*curve, strict=True))
    epsilons = [epsilon_spent(rdp, step, settings.delta) for step in steps]
    report_privacy(settings, accuracies[-1], epsilons[-1], quick)
    comparison = time_gradients(network, digits, rounds)
    return PrivacyResult(steps, accuracies, epsilons, settings, network, params, comparison)


def report_privacy(settings: PrivacySettings, reached: float, epsilon: float, quick: bool) -> None:
    """Print what private training reached, and hold it against the targets."""
    print(
        f"  noise multiplier {settings.noise_multiplier}, sampling rate "
        f"{settings.sampling_rate}, {settings.steps} steps, clip norm {settings.clip_norm}"
    )
    print(f"  test accuracy {reached:.1%} at epsilon {epsilon:.2f}, delta {settings.delta:g}")
    require(
        epsilon <= settings.largest_epsilon,
        f"private training spent epsilon {epsilon:.2f}, more than {settings.largest_epsilon:g}",
    )
    if quick:
        print("  --quick: too few steps for the accuracy target, which is not checked")
        return
    require(
        reached >= settings.least_accuracy,
        f"private training reached {reached:.1%}, less than {settings.least_accuracy:.0%}",
    )
