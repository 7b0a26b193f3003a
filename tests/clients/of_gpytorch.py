"""GPyTorch: derivatives of a kernel's entries, and interactions of an additive kernel."""

import gpytorch
import torch


def make():
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=3)).double()
    params = {name: p.detach() for name, p in kernel.named_parameters()}
    points, others = torch.rand(8, 3).double(), torch.rand(12, 3).double()
    covariances = torch.rand(3, 12, 12)

    def entries(params, points):
        return torch.func.functional_call(kernel, params, (points, others)).to_dense()

    def run():
        slopes = torch.func.jacrev(entries, argnums=(0, 1))(params, points)
        forward = torch.func.jacfwd(entries, argnums=1)(params, points)
        sums = gpytorch.utils.sum_interaction_terms(covariances, max_degree=3, dim=-3)
        return [*slopes, forward, sums.to_dense()]

    return run
