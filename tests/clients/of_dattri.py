"""dattri: gradients of each example, products with a Hessian and its inverse."""

import torch
from dattri.func.hessian import hvp, ihvp_cg, ihvp_explicit
from dattri.task import AttributionTask
from torch import nn


def make():
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    xs, ys = torch.randn(20, 6), torch.randint(3, (20,))
    state = model.state_dict()

    def loss(params, data):
        x, y = data
        out = torch.func.functional_call(model, params, (x.unsqueeze(0),))
        return nn.functional.cross_entropy(out, y.unsqueeze(0))

    task = AttributionTask(loss_func=loss, model=model, checkpoints=state)
    weights = torch.randn(12)
    matrix = torch.randn(30, 12)

    def of_weights(w):
        return (matrix @ w).cos().square().mean() + 2 * w.square().sum()

    vectors = torch.randn(4, 12)
    gradients = task.get_grad_loss_func(in_dims=(None, 0))
    params, _ = task.get_param(0)

    def run():
        return [
            gradients(params, (xs, ys)),
            hvp(of_weights)((weights,), vectors[0]),
            ihvp_explicit(of_weights)((weights,), vectors),
            ihvp_cg(of_weights, max_iter=5)((weights,), vectors),
        ]

    return run
