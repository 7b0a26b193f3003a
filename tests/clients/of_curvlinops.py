"""curvlinops: products with Hessian, Gauss-Newton and Jacobian operators of a module."""

import torch
from curvlinops import GGNLinearOperator, HessianLinearOperator, JacobianLinearOperator
from torch import nn


def make():
    model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 3))
    params = list(model.parameters())
    data = [(torch.randn(16, 10), torch.randint(3, (16,))) for _ in range(2)]
    loss = nn.CrossEntropyLoss()
    hessian = HessianLinearOperator(model, loss, params, data)
    ggn = GGNLinearOperator(model, loss, params, data)
    jacobian = JacobianLinearOperator(model, params, data)
    vectors = torch.randn(hessian.shape[1], 4)

    def run():
        return [hessian @ vectors, ggn @ vectors, jacobian @ vectors]

    return run
