"""DeepXDE: a Poisson problem in forward mode, and its Nystrom-Newton optimizer's products."""

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
    params = list(net.parameters())
    optimizer = NNCG(params, rank=4)
    vectors = torch.randn(4, sum(p.numel() for p in params), dtype=torch.float64)

    def run():
        residual = model.predict(points.numpy(), operator=equation)
        _, losses = model.outputs_losses_train(*model.data.train_next_batch())
        gradient = torch.autograd.grad(losses.sum(), params)
        fit = (net(points) - points.sin()).square().mean()
        slopes = torch.autograd.grad(fit, params, create_graph=True)
        slope = torch.cat([p.reshape(-1) for p in slopes])
        products = optimizer._hvp_vmap(slope, params)(vectors)
        return [residual, losses.detach(), list(gradient), products]

    return run
