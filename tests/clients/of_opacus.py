"""Opacus: per-example gradients of a module by GradSampleModule in its functorch mode."""

import torch
from opacus import GradSampleModule
from torch import nn


def make():
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.Tanh(), nn.Flatten(), nn.Linear(8 * 36, 10)
    )
    model = GradSampleModule(model, force_functorch=True)
    images, labels = torch.randn(32, 1, 8, 8), torch.randint(10, (32,))

    def run():
        model.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(images), labels).backward()
        return [p.grad_sample for p in model.parameters()]

    return run
