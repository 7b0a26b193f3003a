"""The handwritten digits and the networks that the parts of the example share."""

from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

CLASSES = 10
PIXELS = 64
TEST_IMAGES = 450


@dataclass(frozen=True)
class Digits:
    """Images (N, 1, 8, 8) in [-1, 1] and labels (N,), split into training and test sets."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load_split(seed: int) -> Digits:
    """scikit-learn's 1797 digits, a quarter of them held out for testing.

    The scaling uses the known pixel range 0..16, not statistics of the data, so that it costs no
    privacy.
    """
    pixels, target = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    labels = torch.tensor(target)
    train, test = train_test_split(
        range(len(labels)), test_size=TEST_IMAGES, stratify=target, random_state=seed
    )
    return Digits(images[train], labels[train], images[test], labels[test])


def convolutional_network() -> nn.Sequential:
    """A network of 3818 parameters.

    It has no batch normalisation, which would mix the examples of a batch and leave no gradient
    that belongs to one example; tanh keeps activations, and with them gradient norms, bounded,
    which helps when gradients are clipped (Papernot et al. 2021, arXiv:2007.14191).
    """
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(256, CLASSES),
    )


def detached_parameters(network: nn.Module) -> dict[str, Tensor]:
    """A copy of the network's parameters by name, free of autograd history."""
    return {name: value.detach().clone() for name, value in network.named_parameters()}


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """The fraction of rows whose largest entry is at the label."""
    return (logits.argmax(-1) == labels).double().mean().item()
