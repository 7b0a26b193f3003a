"""One meta-gradient of MAML on sinusoid regression."""

import torch
from torch.nn import functional as F

from registry import Contestants, contest, workload

TASKS, SHOTS, HIDDEN, INNER_STEPS, RATE = 16, 10, 32, 2, 0.05


def sinusoids(device: torch.device):
    """Support and query sets of all tasks, each (inputs, targets) of shape (TASKS, SHOTS, 1)."""
    amplitude = 0.1 + 4.9 * torch.rand(TASKS, 1, 1)
    phase = torch.pi * torch.rand(TASKS, 1, 1)
    sets = []
    for _ in range(2):
        inputs = 10 * torch.rand(TASKS, SHOTS, 1) - 5
        targets = amplitude * torch.sin(inputs + phase)
        sets.append((inputs.to(device), targets.to(device)))
    return sets


def initial_parameters(device: torch.device) -> list[torch.Tensor]:
    shapes = [(1, HIDDEN), (HIDDEN,), (HIDDEN, HIDDEN), (HIDDEN,), (HIDDEN, 1), (1,)]
    return [torch.randn(*shape, device=device) / shape[0] ** 0.5 for shape in shapes]


def mse(p: list[torch.Tensor], inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The loss of one task."""
    hidden = torch.tanh(inputs @ p[0] + p[1])
    hidden = torch.tanh(hidden @ p[2] + p[3])
    return F.mse_loss(hidden @ p[4] + p[5], targets)


def batched_mse(p: list[torch.Tensor], inputs: torch.Tensor, targets: torch.Tensor):
    """The sum over tasks of their losses, every task with weights of its own."""
    hidden = torch.tanh(torch.baddbmm(p[1].unsqueeze(1), inputs, p[0]))
    hidden = torch.tanh(torch.baddbmm(p[3].unsqueeze(1), hidden, p[2]))
    output = torch.baddbmm(p[5].unsqueeze(1), hidden, p[4])
    return F.mse_loss(output, targets, reduction="sum") / SHOTS


@workload("maml", f"MAML meta-gradient, {TASKS} tasks, {INNER_STEPS} inner gradient steps")
def maml(device: torch.device) -> Contestants:
    support, query = sinusoids(device)
    initial = initial_parameters(device)

    def transformed(api):
        inner_gradient = api.grad(mse)

        def adapted_loss(p, support_x, support_y, query_x, query_y):
            for _ in range(INNER_STEPS):
                grads = inner_gradient(p, support_x, support_y)
                p = [value - RATE * grad for value, grad in zip(p, grads, strict=True)]
            return mse(p, query_x, query_y)

        tasks = api.vmap(adapted_loss, in_dims=(None, 0, 0, 0, 0))
        meta_gradient = api.grad(lambda p: tasks(p, *support, *query).mean())
        return lambda: meta_gradient(initial)

    def handwritten():
        leaves = [value.detach().requires_grad_() for value in initial]
        p = [leaf.expand(TASKS, *leaf.shape) for leaf in leaves]
        for _ in range(INNER_STEPS):
            grads = torch.autograd.grad(batched_mse(p, *support), p, create_graph=True)
            p = [value - RATE * grad for value, grad in zip(p, grads, strict=True)]
        return list(torch.autograd.grad(batched_mse(p, *query) / TASKS, leaves))

    return contest(transformed, handwritten, tolerance=1e-3)
