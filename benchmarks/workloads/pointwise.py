"""Many small operations: what a library costs per operation it intercepts."""

import torch

from registry import JIT, REPLAYED, Contestants, contest, workload


def chain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """50 pointwise operations, values staying of order one."""
    for _ in range(10):
        x = x * y
        x = x + 0.5
        x = torch.sin(x)
        x = x - y
        x = torch.tanh(x)
    return x


@workload(
    "pointwise-chain",
    "`vmap` over 50 pointwise operations, 64 examples of shape (8,)",
    limits={(REPLAYED, 1): 0.7, (JIT, 2): 1.0},
)
def pointwise_chain(device: torch.device) -> Contestants:
    x = torch.randn(64, 8, device=device)
    y = torch.randn(64, 8, device=device)

    def transformed(api):
        batched = api.vmap(chain)
        return lambda: batched(x, y)

    return contest(transformed, lambda: chain(x, y))


@workload("pointwise-chain-grad", "`vmap(grad)` of the sum of the same chain")
def pointwise_chain_grad(device: torch.device) -> Contestants:
    x = torch.randn(64, 8, device=device)
    y = torch.randn(64, 8, device=device)

    def transformed(api):
        batched = api.vmap(api.grad(lambda x, y: chain(x, y).sum()))
        return lambda: batched(x, y)

    def handwritten():
        # The examples do not interact, so one backward pass of the total serves all of them.
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(chain(leaf, y).sum(), leaf)[0]

    return contest(transformed, handwritten)
