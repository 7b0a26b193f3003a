"""Per-example weight gradients of convolutions, and calls that have a stacked form.

Written by hand, the gradients have three forms: groups, a product with what the filter meets, and a
convolution with the roles of images and channels swapped. There are three ways to lay out what the
filter meets. The form that is fastest when the workload is built takes part.
"""

import time
from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight

from registry import REPLAYED, Contestants, Program, contest, workload

Form = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


def by_groups(x: torch.Tensor, g: torch.Tensor, k: int) -> torch.Tensor:
    """KxK with padding K // 2: (B, I, H, W), (B, O, H, W) -> (B, O, I, K, K)."""
    (examples, channels), filters = x.shape[:2], g.shape[1]
    shape = (examples * filters, channels, k, k)
    flat = [a.flatten(0, 1).unsqueeze(0) for a in (x, g)]
    grads = conv2d_weight(flat[0], shape, flat[1], padding=k // 2, groups=examples)
    return grads.unflatten(0, (examples, filters))


def by_product(x: torch.Tensor, g: torch.Tensor, k: int) -> torch.Tensor:
    columns = F.unfold(x, k, padding=k // 2)
    grads = torch.bmm(g.flatten(2), columns.transpose(1, 2))
    return grads.unflatten(2, (x.shape[1], k, k))


def by_views(x: torch.Tensor, g: torch.Tensor, k: int) -> torch.Tensor:
    """The product again, unfolded by views and one copy."""
    met = F.pad(x, (k // 2,) * 4).unfold(2, k, 1).unfold(3, k, 1)  # (B, I, H, W, K, K)
    columns = met.permute(0, 1, 4, 5, 2, 3).flatten(1, 3).flatten(2)
    grads = torch.bmm(g.flatten(2), columns.transpose(1, 2))
    return grads.unflatten(2, (x.shape[1], k, k))


def by_channels_last(x: torch.Tensor, g: torch.Tensor, k: int) -> torch.Tensor:
    """The product once more: channels last, so that the copy is of longer pieces."""
    met = F.pad(x, (k // 2,) * 4).permute(0, 2, 3, 1).contiguous()
    met = met.unfold(1, k, 1).unfold(2, k, 1).permute(0, 1, 2, 4, 5, 3)  # (B, H, W, K, K, I)
    grads = torch.bmm(g.flatten(2), met.flatten(3).flatten(1, 2))
    return grads.unflatten(2, (k * k, x.shape[1])).mT.unflatten(3, (k, k)).contiguous()


def by_roles(x: torch.Tensor, g: torch.Tensor, k: int) -> torch.Tensor:
    """Channels are images, and cotangents are filters."""
    grads = F.conv2d(x.transpose(0, 1), g.flatten(0, 1).unsqueeze(1), padding=k // 2, groups=len(x))
    return grads.unflatten(1, (len(x), g.shape[1])).movedim(0, 2)


def fastest(x: torch.Tensor, g: torch.Tensor, k: int) -> Form:
    def cost(form: Form) -> float:
        form(x, g, k)
        times = []
        for _ in range(20):
            started = time.perf_counter()
            form(x, g, k)
            times.append(time.perf_counter() - started)
        return min(times)

    return min((by_groups, by_product, by_views, by_channels_last, by_roles), key=cost)


def weights(channels: int, filters: int, size: int, k: int, device: torch.device) -> Contestants:
    """The output, and the weight's gradient from a cotangent of it: no other work takes part."""
    examples = 32
    x = torch.randn(examples, channels, size, size, device=device)
    g = torch.randn(examples, filters, size, size, device=device)
    w = torch.randn(filters, channels, k, k, device=device)
    call = partial(F.conv2d, padding=k // 2)
    form = fastest(x, g, k)

    def transformed(api) -> Program:
        def pulled(w, x, g):
            out, pull = api.vjp(lambda w: call(x.unsqueeze(0), w).squeeze(0), w)
            return out, *pull(g)

        both = api.vmap(pulled, in_dims=(None, 0, 0))
        return lambda: both(w, x, g)

    return contest(transformed, lambda: (call(x, w), form(x, g, k)))


for _name, _sizes in {
    "images": (3, 32, 32, 3),
    "deep": (128, 128, 8, 3),
    "1x1": (64, 64, 14, 1),
    "blocks": (16, 32, 32, 3),
}.items():
    workload(
        f"conv-weights-{_name}",
        "output and per-example weight gradients of a {3}x{3} convolution, 32 images of "
        "{0}x{2}x{2}, {1} filters".format(*_sizes),
        limits={(REPLAYED, 1): 0.9, (REPLAYED, 2): 1.1},
    )(partial(weights, *_sizes))


def stacked(call: Callable, stacks: tuple, in_dims: tuple) -> Contestants:
    """`call` on examples that have a batch of their own, and once on all of them in one batch."""
    joined = [a if d is None else a.flatten(0, 1) for a, d in zip(stacks, in_dims, strict=True)]

    def transformed(api) -> Program:
        mapped = api.vmap(call, in_dims=in_dims)
        return lambda: mapped(*stacks)

    return contest(transformed, lambda: call(*joined).unflatten(0, stacks[0].shape[:2]))


plain_call = partial(
    workload, names=("forall", "torch.func", "plain call"), limits={(REPLAYED, 2): 1.3}
)


@plain_call(
    "conv2d-shared",
    "`vmap(F.conv2d)` with one weight for all, 16 examples of 4 images of 16x32x32, 32 filters",
)
def conv2d_shared(device: torch.device) -> Contestants:
    x = torch.randn(16, 4, 16, 32, 32, device=device)
    w = torch.randn(32, 16, 3, 3, device=device)
    return stacked(partial(F.conv2d, padding=1), (x, w), (0, None))


@plain_call(
    "attention-stacked",
    "`vmap(F.scaled_dot_product_attention)`, 16 examples of 4 sequences of length 64, 4 heads",
)
def attention_stacked(device: torch.device) -> Contestants:
    qkv = tuple(torch.randn(16, 4, 4, 64, 32, device=device) for _ in range(3))
    return stacked(F.scaled_dot_product_attention, qkv, (0, 0, 0))
