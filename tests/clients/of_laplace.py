"""laplace-torch: a full Laplace approximation of a classifier, and its predictions."""

import torch
from laplace import Laplace
from laplace.curvature import GGNInterface
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Curvature(GGNInterface):
    """The library's own interface, which needs torch.func alone."""


def make():
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    data = TensorDataset(torch.randn(48, 6), torch.randint(3, (48,)))
    loader = DataLoader(data, batch_size=24)
    points = torch.randn(10, 6)

    def run():
        approximation = Laplace(
            model, "classification", "all", hessian_structure="full", backend=Curvature
        )
        approximation.fit(loader)
        gradients, loss = approximation.backend.gradients(*data.tensors)
        return [approximation.H, approximation(points), gradients.detach(), loss.detach()]

    return run
