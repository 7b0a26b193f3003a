"""torchopt: the derivative of a ridge regression's solution by implicit differentiation."""

import torch
import torchopt
from torchopt.diff.implicit import custom_root


def make():
    data, targets = torch.randn(32, 8), torch.randn(32)

    def loss(params, penalty):
        return (data @ params - targets).square().mean() + penalty * params.square().sum()

    @custom_root(
        torch.func.grad(loss, argnums=0),
        argnums=1,
        solve=torchopt.linear_solve.solve_normal_cg(),
    )
    def solved(start, penalty):
        matrix = data.T @ data / 32 + penalty * torch.eye(8)
        return torch.linalg.solve(matrix, data.T @ targets / 32)

    def run():
        penalty = torch.tensor(0.5, requires_grad=True)
        solution = solved(torch.zeros(8), penalty)
        return [solution.detach(), *torch.autograd.grad(solution.sum(), penalty)]

    return run
