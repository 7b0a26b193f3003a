"""Parts (c) and (d): the Hessian of a loss, and the Jacobians of a network at every test image.

(c) A small multilayer perceptron is trained in float64, and the Hessian of its training loss is
taken with respect to all its parameters. Laws checked: the Hessian is the one that torch.autograd
gives row by row; it is symmetric; Hessian-vector products, jvp of grad, agree with it; and power
iteration on them alone finds its eigenvalue of largest magnitude.

(d) vmap(jacrev(network)) gives, for every test image, the derivative of the 10 logits with respect
to the 64 pixels. Law checked: the same from torch.autograd, one image and one logit at a time.
From a Jacobian J and logits z, the distance to the nearest decision boundary, with the network
taken to be linear around the image, is the least (z_p - z_j) / |J_p - J_j| over the classes j other
than the predicted class p (DeepFool: Moosavi-Dezfooli et al. 2016, arXiv:1511.04599).
"""

import math
from collections.abc import Callable
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
    check_close,
    compare_times,
    progress,
    require,
)
from digits_data import CLASSES, PIXELS, Digits, accuracy

HIDDEN = 5


@dataclass(frozen=True)
class HessianResult:
    """The eigenvalues, ascending, and the one that power iteration found."""

    eigenvalues: Tensor
    power_eigenvalue: float
    power_iterations: int
    comparison: Comparison


@dataclass(frozen=True)
class JacobianResult:
    """Means over each digit's test images: the image, and |d own logit / d pixel|; (10, 8, 8)."""

    mean_images: Tensor
    sensitivity: Tensor
    comparison: Comparison


def small_network() -> nn.Sequential:
    """A perceptron small enough for its full Hessian."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(PIXELS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES)
    ).double()


def loss_of_vector(
    network: nn.Module, digits: Digits, functions: ModuleType = forall
) -> Callable[[Tensor], Tensor]:
    """The training loss as a function of one vector that holds all parameters."""
    images, labels = digits.train_images.double(), digits.train_labels
    shapes = {name: value.shape for name, value in network.named_parameters()}
    sizes = [shape.numel() for shape in shapes.values()]

    def loss(vector):
        pieces = zip(shapes.items(), vector.split(sizes), strict=True)
        params = {name: piece.view(shape) for (name, shape), piece in pieces}
        return cross_entropy(functions.functional_call(network, params, (images,)), labels)

    return loss


def train_vector(loss: Callable[[Tensor], Tensor], vector: Tensor, steps: int) -> Tensor:
    """Gradient descent with momentum on the full training set."""
    value_of = forall.grad_and_value(loss)
    velocity = torch.zeros_like(vector)
    bar = progress(range(steps), "training a small network")
    for step in bar:
        gradient, value = value_of(vector)
        velocity = 0.9 * velocity + gradient
        vector = vector - 0.2 * velocity
        if step % 50 == 0:
            bar.set_postfix(loss=f"{value.item():.3f}")
    return vector


def hessian_loop(loss: Callable[[Tensor], Tensor], vector: Tensor) -> Tensor:
    """The Hessian by torch.autograd, row by row: the gradient of each entry of the gradient."""
    vector = vector.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(vector), vector, create_graph=True)
    rows = [torch.autograd.grad(entry, vector, retain_graph=True)[0] for entry in gradient]
    return torch.stack(rows)


def power_iteration(
    product: Callable[[Tensor], Tensor], start: Tensor, iterations: int
) -> tuple[float, int, float]:
    """The eigenvalue of largest magnitude, the iterations used and the relative residual.

    The Rayleigh quotient's error is of the order of the residual squared, so a residual of 1e-6
    is enough for a tolerance of 1e-9.
    """
    vector = start / start.norm()
    used, eigenvalue, residual = 0, math.nan, math.inf
    for _ in progress(range(iterations), "power iteration"):
        image = product(vector)
        used += 1
        eigenvalue = torch.dot(vector, image).item()
        residual = (image - eigenvalue * vector).norm().item() / abs(eigenvalue)
        if residual < 1e-6:
            break
        vector = image / image.norm()
    return eigenvalue, used, residual


def check_hessian(
    loss: Callable[[Tensor], Tensor], vector: Tensor, seed: int
) -> tuple[Tensor, float, int]:
    """Check the Hessian in four ways; returns its eigenvalues and power iteration's answer."""
    hessian = forall.hessian(loss)(vector)
    check_close("Hessian, all rows", hessian, hessian_loop(loss, vector), FLOAT64_TOLERANCE)
    check_close("Hessian against its transpose", hessian, hessian.mT, FLOAT64_TOLERANCE)
    gradient_of = forall.grad(loss)

    def product(direction):
        return forall.jvp(gradient_of, (vector,), (direction,))[1]

    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(vector.shape, generator=generator, dtype=vector.dtype)
    check_close(
        "Hessian-vector product, jvp of grad", product(start), hessian @ start, FLOAT64_TOLERANCE
    )
    eigenvalues = torch.linalg.eigvalsh(hessian)
    largest = eigenvalues[eigenvalues.abs().argmax()]
    found, iterations, residual = power_iteration(product, start, iterations=3000)
    require(residual < 1e-6, f"power iteration stopped at a relative residual of {residual:.1e}")
    check_close(
        f"largest eigenvalue by power iteration ({iterations} products)",
        torch.tensor(found, dtype=largest.dtype),
        largest,
        FLOAT64_TOLERANCE,
    )
    return eigenvalues, found, iterations


def run_hessian(digits: Digits, steps: int, rounds: int, seed: int) -> HessianResult:
    """Train the small network, check its Hessian and report the spectrum."""
    torch.manual_seed(seed)
    network = small_network()
    vector = nn.utils.parameters_to_vector(network.parameters()).detach()
    print(f"\n(c) Hessian of the loss for a network of {len(vector)} parameters")
    loss = loss_of_vector(network, digits)
    vector = train_vector(loss, vector, steps)
    nn.utils.vector_to_parameters(vector.clone(), network.parameters())
    reached = accuracy(network(digits.test_images.double()), digits.test_labels)
    print(f"  training loss {loss(vector).item():.4f}, test accuracy {reached:.1%}")
    eigenvalues, found, iterations = check_hessian(loss, vector, seed)
    negative = (eigenvalues < -1e-9 * eigenvalues[-1]).sum().item()
    print(
        f"  largest eigenvalue {eigenvalues[-1].item():.4f}, smallest "
        f"{eigenvalues[0].item():.2e}; {negative} of {len(eigenvalues)} are negative"
    )

    def transformed(functions):
        hessian_of = functions.hessian(loss_of_vector(network, digits, functions))
        return lambda: hessian_of(vector)

    comparison = compare_times(
        f"(c) Hessian, {len(vector)} x {len(vector)}",
        lambda: hessian_loop(loss, vector),
        transformed,
        rounds,
    )
    return HessianResult(eigenvalues, found, iterations, comparison)


def jacobians(network: nn.Module, params: dict[str, Tensor], functions: ModuleType = forall):
    """A function of images (N, 1, 8, 8) that gives their Jacobians (N, 10, 1, 8, 8)."""

    def logits_of_image(image):
        return functions.functional_call(network, params, (image.unsqueeze(0),)).squeeze(0)

    return functions.vmap(functions.jacrev(logits_of_image))


def jacobian_of_one_image(network: nn.Module, image: Tensor) -> Tensor:
    """The Jacobian at one image by torch.autograd, one logit at a time."""
    image = image.clone().requires_grad_()
    logits = network(image.unsqueeze(0)).squeeze(0)
    rows = [torch.autograd.grad(logit, image, retain_graph=True)[0] for logit in logits]
    return torch.stack(rows)


def jacobians_loop(network: nn.Module, images: Tensor) -> Tensor:
    """The same Jacobians by the plain loop."""
    return torch.stack([jacobian_of_one_image(network, image) for image in images])


def linearised_distances(logits: Tensor, jacobian: Tensor) -> Tensor:
    """The distance in pixel space to the nearest boundary of the linearised network."""
    predicted = logits.argmax(1, keepdim=True)
    gap = logits.gather(1, predicted) - logits
    own_rows = jacobian.gather(1, predicted.unsqueeze(2).expand(-1, -1, PIXELS))
    slope = (own_rows - jacobian).norm(dim=2)
    distances = (gap / slope.clamp_min(1e-12)).scatter(1, predicted, float("inf"))
    return distances.min(1).values


def run_jacobians(
    digits: Digits, network: nn.Module, params: dict[str, Tensor], rounds: int
) -> JacobianResult:
    """Take the Jacobians at all test images, check them and report how near the boundary is."""
    images, labels = digits.test_images, digits.test_labels
    print(f"\n(d) Jacobians ({CLASSES} x {PIXELS}) of the private network at {len(images)} images")
    values = jacobians(network, params)(images)
    expected = jacobians_loop(network, images)
    check_close(f"{len(images)} Jacobians", values, expected, FLOAT32_TOLERANCE)
    with torch.no_grad():
        logits = network(images)
    distances = linearised_distances(logits, values.flatten(2))
    right = logits.argmax(1) == labels
    print(
        f"  median distance to the linearised boundary: {distances[right].median().item():.2f} "
        f"where the answer is right, {distances[~right].median().item():.2f} where it is wrong"
    )
    own = values[torch.arange(len(labels)), labels].abs()
    mean_images, sensitivity = (
        torch.stack([maps[labels == digit].mean(0).squeeze(0) for digit in range(CLASSES)])
        for maps in (images, own)
    )

    def transformed(functions):
        jacobians_of = jacobians(network, params, functions)
        return lambda: jacobians_of(images)

    comparison = compare_times(
        f"(d) Jacobians at {len(images)} images",
        lambda: jacobians_loop(network, images),
        transformed,
        rounds,
    )
    return JacobianResult(mean_images, sensitivity, comparison)
