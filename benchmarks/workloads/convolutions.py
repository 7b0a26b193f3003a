"""Per-example weight gradients of convolutions, and calls that have a stacked form.

Written by hand, the gradients have three forms: groups, a product with what the filter meets, and a
convolution with the roles of images and channels swapped. The one that is fastest when the workload
is built takes part.
"""

import time
from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight

from registry import Contestants, Program, contest, workload

Form = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def by_groups(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """3x3 with padding 1: (B, I, H, W), (B, O, H, W) -> (B, O, I, 3, 3)."""
    (examples, channels), filters = x.shape[:2], g.shape[1]
    shape = (examples * filters, channels, 3, 3)
    flat = [a.flatten(0, 1).unsqueeze(0) for a in (x, g)]
    grads = conv2d_weight(flat[0], shape, flat[1], padding=1, groups=examples)
    return grads.unflatten(0, (examples, filters))


def by_product(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    columns = F.unfold(x, 3, padding=1)
    grads = torch.bmm(g.flatten(2), columns.transpose(1, 2))
    return grads.unflatten(2, (x.shape[1], 3, 3))


def by_views(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """The product again, unfolded by views and one copy."""
    met = F.pad(x, (1, 1, 1, 1)).unfold(2, 3, 1).unfold(3, 3, 1)  # (B, I, H, W, 3, 3)
    columns = met.permute(0, 1, 4, 5, 2, 3).flatten(1, 3).flatten(2)
    grads = torch.bmm(g.flatten(2), columns.transpose(1, 2))
    return grads.unflatten(2, (x.shape[1], 3, 3))


def by_roles(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """Channels are images, and cotangents are filters."""
    grads = F.conv2d(x.transpose(0, 1), g.flatten(0, 1).unsqueeze(1), padding=1, groups=len(x))
    return grads.unflatten(1, (len(x), g.shape[1])).movedim(0, 2)


def fastest(forms: list[Form], x: torch.Tensor, g: torch.Tensor) -> Form:
    def cost(form: Form) -> float:
        form(x, g)
        times = []
        for _ in range(20):
            started = time.perf_counter()
            form(x, g)
            times.append(time.perf_counter() - started)
        return min(times)

    return min(forms, key=cost)


def weights(channels: int, filters: int, size: int, device: torch.device) -> Contestants:
    """Half the squares of the outputs, whose cotangents are the outputs."""
    examples = 32
    x = torch.randn(examples, channels, size, size, device=device)
    w = torch.randn(filters, channels, 3, 3, device=device)
    call = partial(F.conv2d, padding=1)
    form = fastest([by_groups, by_product, by_views, by_roles], x, call(x, w))

    def transformed(api) -> Program:
        def loss(w, x):
            return call(x.unsqueeze(0), w).square().sum() / 2

        gradients = api.vmap(api.grad(loss), in_dims=(None, 0))
        return lambda: gradients(w, x)

    return contest(transformed, lambda: form(x, call(x, w)))


for _name, _sizes in {
    "small": (1, 8, 28),
    "middle": (16, 32, 32),
    "wide": (64, 64, 8),
}.items():
    workload(
        f"conv-weights-{_name}",
        "per-example weight gradients of a 3x3 convolution, 32 images of "
        f"{_sizes[0]}x{_sizes[2]}x{_sizes[2]}, {_sizes[1]} filters",
        limits={(0, 1): 0.9, (0, 2): 1.1},
    )(partial(weights, *_sizes))


def stacked(call: Callable, stacks: tuple, in_dims: tuple) -> Contestants:
    """`call` on examples that have a batch of their own, and once on all of them in one batch."""
    joined = [a if d is None else a.flatten(0, 1) for a, d in zip(stacks, in_dims, strict=True)]

    def transformed(api) -> Program:
        mapped = api.vmap(call, in_dims=in_dims)
        return lambda: mapped(*stacks)

    return contest(transformed, lambda: call(*joined).unflatten(0, stacks[0].shape[:2]))


@workload(
    "conv2d-shared",
    "`vmap(F.conv2d)` with one weight for all, 16 examples of 4 images of 16x32x32, 32 filters",
    names=("forall", "torch.func", "plain call"),
    limits={(0, 2): 1.3},
)
def conv2d_shared(device: torch.device) -> Contestants:
    x = torch.randn(16, 4, 16, 32, 32, device=device)
    w = torch.randn(32, 16, 3, 3, device=device)
    return stacked(partial(F.conv2d, padding=1), (x, w), (0, None))


@workload(
    "attention-stacked",
    "`vmap(F.scaled_dot_product_attention)`, 16 examples of 4 sequences of length 64, 4 heads",
    names=("forall", "torch.func", "plain call"),
    limits={(0, 2): 1.3},
)
def attention_stacked(device: torch.device) -> Contestants:
    qkv = tuple(torch.randn(16, 4, 4, 64, 32, device=device) for _ in range(3))
    return stacked(F.scaled_dot_product_attention, qkv, (0, 0, 0))
