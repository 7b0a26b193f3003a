"""torchjd: a Gramian of per-example gradients, and Jacobian descent with two losses."""

import torch
from torch import nn
from torchjd.aggregation import Mean
from torchjd.autogram import Engine
from torchjd.autojac import backward, jac_to_grad


def make():
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
    engine = Engine(model, batch_dim=0)
    other = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))
    aggregator = Mean()
    xs, ys = torch.randn(16, 10), torch.randn(16, 1)

    def run():
        losses = (model(xs) - ys).square().squeeze(1)
        gramian = engine.compute_gramian(losses)
        other.zero_grad()
        backward(list(other(xs).square().mean(0)))
        jac_to_grad(other.parameters(), aggregator)
        return [gramian, [p.grad.clone() for p in other.parameters()]]

    return run
