"""Per-example gradients of a self-attention block."""

import torch
from torch import nn
from torch.nn import functional as F

from registry import Contestants, contest, workload

LENGTH, WIDTH, HEADS, EXAMPLES = 16, 32, 4, 32


def attend(projected: torch.Tensor) -> torch.Tensor:
    """Multi-head attention of packed queries, keys and values (..., length, 3 * width)."""
    query, key, value = (
        part.unflatten(-1, (HEADS, -1)).transpose(-3, -2) for part in projected.chunk(3, dim=-1)
    )
    scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
    return (scores.softmax(-1) @ value).transpose(-3, -2).flatten(-2)


class Block(nn.Module):
    """Layer normalisation, self-attention, output projection and the residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.pack = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(attend(self.pack(self.norm(x))))


def layer_gradients(inputs: torch.Tensor, grad: torch.Tensor):
    """Per-example weight and bias gradients of a linear layer applied along a sequence."""
    return torch.bmm(grad.transpose(1, 2), inputs), grad.sum(1)


def by_jax_loss(jax):
    """The mean squared error of one sequence."""
    np = jax.numpy

    def loss(p, x, target):
        standard = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        normal = standard * p["norm.weight"] + p["norm.bias"]
        packed = normal @ p["pack.weight"].T + p["pack.bias"]
        length, width = x.shape
        query, key, value = (
            part.reshape(length, HEADS, -1).swapaxes(0, 1) for part in np.split(packed, 3, -1)
        )
        scores = query @ key.swapaxes(1, 2) / (width // HEADS) ** 0.5
        attended = (jax.nn.softmax(scores) @ value).swapaxes(0, 1).reshape(length, width)
        output = x + attended @ p["out.weight"].T + p["out.bias"]
        return ((output - target) ** 2).mean()

    return loss


@workload(
    "per-example-attention",
    f"per-example gradients of a {HEADS}-head attention block, {EXAMPLES} sequences of "
    f"length {LENGTH} and width {WIDTH}",
)
def per_example_attention(device: torch.device) -> Contestants:
    return of_size(device, EXAMPLES, LENGTH, WIDTH)


def of_size(device: torch.device, examples: int, length: int, width: int) -> Contestants:
    block = Block(width).to(device)
    parameters = {name: value.detach() for name, value in block.named_parameters()}
    inputs = torch.randn(examples, length, width, device=device)
    targets = torch.randn(examples, length, width, device=device)

    def transformed(api):
        def loss(parameters, x, target):
            return F.mse_loss(api.functional_call(block, parameters, (x,)), target)

        gradients = api.vmap(api.grad(loss), in_dims=(None, 0, 0))
        return lambda: gradients(parameters, inputs, targets)

    def handwritten():
        p = parameters
        standard = F.layer_norm(inputs, (width,))
        normal = (standard * p["norm.weight"] + p["norm.bias"]).requires_grad_()
        projected = F.linear(normal, p["pack.weight"], p["pack.bias"])
        attended = attend(projected)
        output = F.linear(attended, p["out.weight"], p["out.bias"])
        # Summing over the examples what mse_loss averages within each of them.
        loss = (inputs + output - targets).square().sum() / (length * width)
        grads = torch.autograd.grad(loss, (normal, projected, output))
        pack_weight, pack_bias = layer_gradients(normal.detach(), grads[1])
        out_weight, out_bias = layer_gradients(attended.detach(), grads[2])
        return {
            "norm.weight": (grads[0] * standard).sum(1),
            "norm.bias": grads[0].sum(1),
            "pack.weight": pack_weight,
            "pack.bias": pack_bias,
            "out.weight": out_weight,
            "out.bias": out_bias,
        }

    def by_jax(jax):
        gradients = jax.vmap(jax.grad(by_jax_loss(jax)), (None, 0, 0))
        return gradients, (parameters, inputs, targets)

    def of_all(block):
        return (block(inputs) - targets).square().sum() / (length * width)

    return contest(transformed, handwritten, by_jax=by_jax, by_opacus=(block, of_all))
