"""Many small operations: what a library costs per operation it intercepts."""

import torch

from registry import JIT, REPLAYED, Contestants, contest, workload


def chain_of(np):
    """50 pointwise operations of torch, or of jax.numpy, values staying of order one."""

    def chain(x, y):
        for _ in range(10):
            x = x * y
            x = x + 0.5
            x = np.sin(x)
            x = x - y
            x = np.tanh(x)
        return x

    return chain


chain = chain_of(torch)


@workload(
    "pointwise-chain",
    "`vmap` over 50 pointwise operations, 64 examples of shape (8,)",
    limits={(REPLAYED, 1): 0.7, (JIT, 2): 1.0},
)
def pointwise_chain(device: torch.device) -> Contestants:
    return of_size(device, 64, 8)


@workload(
    "pointwise-chain-large", "`vmap` over 50 pointwise operations, 4096 examples of shape (1024,)"
)
def pointwise_chain_large(device: torch.device) -> Contestants:
    return of_size(device, 4096, 1024)


def of_size(device: torch.device, examples: int, width: int) -> Contestants:
    x = torch.randn(examples, width, device=device)
    y = torch.randn(examples, width, device=device)

    def transformed(api):
        batched = api.vmap(chain)
        return lambda: batched(x, y)

    def by_jax(jax):
        return jax.vmap(chain_of(jax.numpy)), (x, y)

    return contest(transformed, lambda: chain(x, y), by_jax=by_jax)


@workload("pointwise-chain-grad", "`vmap(grad)` of the sum of the same chain")
def pointwise_chain_grad(device: torch.device) -> Contestants:
    return gradient_of_size(device, 64, 8)


@workload(
    "pointwise-chain-grad-large",
    "`vmap(grad)` of the sum of the same chain, 4096 examples of shape (1024,)",
)
def pointwise_chain_grad_large(device: torch.device) -> Contestants:
    return gradient_of_size(device, 4096, 1024)


def gradient_of_size(device: torch.device, examples: int, width: int) -> Contestants:
    x = torch.randn(examples, width, device=device)
    y = torch.randn(examples, width, device=device)

    def transformed(api):
        batched = api.vmap(api.grad(lambda x, y: chain(x, y).sum()))
        return lambda: batched(x, y)

    def handwritten():
        # The examples do not interact, so one backward pass of the total serves all of them.
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(chain(leaf, y).sum(), leaf)[0]

    def by_jax(jax):
        by_numbers = chain_of(jax.numpy)
        return jax.vmap(jax.grad(lambda x, y: by_numbers(x, y).sum())), (x, y)

    return contest(transformed, handwritten, by_jax=by_jax)
