"""DeepXDE: a Poisson problem in forward mode, and steps of its Nystrom-Newton optimizer."""

import os

os.environ["DDE_BACKEND"] = "pytorch"

import deepxde as dde
import torch
from deepxde.optimizers.pytorch.nncg import NNCG


def make():
    dde.config.set_default_autodiff("forward")
    dde.config.set_random_seed(0)
    dde.config.set_default_float("float64")

    def equation(x, y):
        return -dde.grad.hessian(y, x)[0] - torch.pi**2 * torch.sin(torch.pi * x)

    geometry = dde.geometry.Interval(-1, 1)
    condition = dde.icbc.DirichletBC(geometry, lambda x: 0 * x, lambda _, on_boundary: on_boundary)
    data = dde.data.PDE(geometry, equation, condition, 32, 2)
    net = dde.nn.FNN([1, 8, 1], "tanh", "Glorot uniform")
    model = dde.Model(data, net)
    model.compile("adam", lr=1e-3, verbose=0)
    points = torch.linspace(-1, 1, 32, dtype=torch.float64)[:, None]
    start = {name: p.detach().clone() for name, p in net.named_parameters()}

    def fit():
        return (net(points) - points.sin()).square().mean()

    def run():
        torch.manual_seed(0)
        net.load_state_dict(start)
        inputs = torch.linspace(-1, 1, 32, dtype=torch.float64)[:, None].numpy()
        residual = model.predict(inputs, operator=equation)
        optimizer = NNCG(net.parameters(), lr=1e-1, rank=4, mu=1e-1, cg_tol=1e-3)
        optimizer.step(fit)
        return [residual, [p.detach().clone() for p in net.parameters()]]

    return run
