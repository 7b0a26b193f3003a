"""BoTorch: gradients and Hessians of an acquisition function at many points."""

import torch
from botorch.acquisition import LogExpectedImprovement
from botorch.models import SingleTaskGP

WHY_LOOP = (
    "`vmap(grad)` of an acquisition function by torch.func ends in a segmentation fault, or in "
    "`RuntimeError: tensor does not have a device`. forall is compared with a loop over "
    "torch.autograd."
)


def make_acquisition():
    xs = torch.rand(16, 2, dtype=torch.float64)
    model = SingleTaskGP(xs, xs.sin().sum(-1, keepdim=True)).eval()
    acquisition = LogExpectedImprovement(model, best_f=0.5)
    points = torch.rand(8, 2, dtype=torch.float64)
    return lambda x: acquisition(x[None]).squeeze(0), points


def make():
    value, points = make_acquisition()

    def run():
        slopes = torch.func.vmap(torch.func.grad(value))(points)
        curvatures = torch.func.vmap(torch.func.hessian(value))(points)
        return [slopes.detach(), curvatures.detach()]

    return run


def make_loop():
    value, points = make_acquisition()
    derivatives = torch.autograd.functional

    def run():
        slopes = [derivatives.jacobian(value, x) for x in points]
        curvatures = [derivatives.hessian(value, x) for x in points]
        return [torch.stack(slopes), torch.stack(curvatures)]

    return run
