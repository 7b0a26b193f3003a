"""Marginal likelihood gradients of Gaussian processes, one per set of hyper-parameters."""

import torch

from registry import Contestants, contest, workload

SETS, POINTS = 16, 32


def squared_distances(x: torch.Tensor) -> torch.Tensor:
    return (x.unsqueeze(0) - x.unsqueeze(1)).square().sum(-1)


@workload(
    "gaussian-process",
    f"`vmap(grad)` of the Gaussian-process likelihood (Cholesky), {SETS} sets of "
    f"hyper-parameters, {POINTS} points",
)
def gaussian_process(device: torch.device) -> Contestants:
    # Double precision, as is usual for kernel matrices.
    x = torch.randn(POINTS, 2, dtype=torch.float64, device=device)
    y = torch.randn(POINTS, dtype=torch.float64, device=device)
    distances = squared_distances(x)
    identity = torch.eye(POINTS, dtype=torch.float64, device=device)
    logs = 0.3 * torch.randn(3, SETS, dtype=torch.float64, device=device)
    scales, variances, noises = logs[0], logs[1], logs[2] - 1.5

    def negative_log_likelihood(log_scale, log_variance, log_noise):
        kernel = torch.exp(log_variance - 0.5 * distances * torch.exp(-2 * log_scale))
        factor = torch.linalg.cholesky(kernel + torch.exp(log_noise) * identity)
        white = torch.linalg.solve_triangular(factor, y.unsqueeze(1), upper=False)
        return 0.5 * white.square().sum() + factor.diagonal().log().sum()

    def transformed(api):
        gradients = api.vmap(api.grad(negative_log_likelihood, argnums=(0, 1, 2)))
        return lambda: gradients(scales, variances, noises)

    def handwritten():
        # d/dt = 1/2 tr(A dK/dt) with A = K^-1 - K^-1 y y^T K^-1, for all sets at once.
        scaled = distances * torch.exp(-2 * scales).view(-1, 1, 1)
        kernel = torch.exp(variances.view(-1, 1, 1) - 0.5 * scaled)
        noise = torch.exp(noises)
        factor = torch.linalg.cholesky(kernel + noise.view(-1, 1, 1) * identity)
        inverse = torch.cholesky_inverse(factor)
        weights = inverse @ y
        adjoint = inverse - weights.unsqueeze(2) * weights.unsqueeze(1)
        product = adjoint * kernel
        return (
            0.5 * (product * scaled).sum((1, 2)),
            0.5 * product.sum((1, 2)),
            0.5 * noise * adjoint.diagonal(dim1=1, dim2=2).sum(1),
        )

    return contest(transformed, handwritten)
