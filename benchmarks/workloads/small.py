"""Functions of a few numbers: the price of a call."""

import torch

from registry import REPLAYED, Contestants, contest, workload


def well(x: torch.Tensor) -> torch.Tensor:
    """Rosenbrock's function of two numbers."""
    return (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2


def by_autograd(f, x: torch.Tensor):
    def handwritten():
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(f(leaf), leaf)[0]

    return handwritten


@workload(
    "grad-of-two-numbers",
    "`grad` of Rosenbrock's function of 2 numbers",
    limits={(REPLAYED, 1): 0.5},
)
def grad_of_two_numbers(device: torch.device) -> Contestants:
    x = torch.randn(2, device=device)

    def transformed(api):
        gradient = api.grad(well)
        return lambda: gradient(x)

    return contest(transformed, by_autograd(well, x), by_jax=lambda jax: (jax.grad(well), (x,)))


@workload(
    "vmap-grad-of-two-numbers",
    "`vmap(grad)` of the same at 64 points",
    limits={(REPLAYED, 1): 0.4},
)
def vmap_grad_of_two_numbers(device: torch.device) -> Contestants:
    xs = torch.randn(64, 2, device=device)

    def transformed(api):
        gradient = api.vmap(api.grad(well))
        return lambda: gradient(xs)

    return contest(transformed, by_autograd(lambda x: well(x.T).sum(), xs))
