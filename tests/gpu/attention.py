"""Scaled dot products by each of torch's kernels, which a GPU chooses among by dtype and shape."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from forall import grad, hessian, jacfwd, jit, jvp, vmap
from gpu.checks import (
    Check,
    assert_same,
    gradients,
    gradients_of_weights,
    numbers,
    parameters,
    total,
    truth_of,
)
from oracle import loop

KERNELS = ("MATH", "EFFICIENT_ATTENTION", "FLASH_ATTENTION", "CUDNN_ATTENTION")
FORMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "plain": F.scaled_dot_product_attention,
    "causal": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "with a mask": lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, attn_mask=q.new_ones(q.shape[-2], k.shape[-2]).tril().bool()
    ),
    "fewer heads of keys": lambda q, k, v: F.scaled_dot_product_attention(
        q, k[:, :1], v[:, :1], enable_gqa=True
    ),
}


def checks(device: torch.device) -> list[Check]:
    found = []
    for kernel, dtype, form in product(
        KERNELS, (torch.float32, torch.float16, torch.bfloat16), FORMS
    ):
        name = f"{kernel.lower()}, {str(dtype).removeprefix('torch.')}, {form}"
        found += of_kernel(name, getattr(SDPBackend, kernel), dtype, FORMS[form], device)
    return [*found, *of_layers(device)]


def of_kernel(
    name: str, kernel: SDPBackend, dtype: torch.dtype, f: Callable, device: torch.device
) -> list[Check]:
    def stacks() -> list[Tensor]:
        return [numbers(device, 3, 2, 4, 32, 32, dtype=dtype, seed=i) for i in range(3)]

    def of_total(*xs: Tensor) -> Tensor:
        return total(f(*xs))

    def values() -> None:
        with sdpa_kernel(kernel):
            truth = truth_of(lambda: loop(f)(*stacks()))
            assert_same(vmap(f)(*stacks()), truth)

    def shared() -> None:
        q, k, v = stacks()
        with sdpa_kernel(kernel):
            truth = truth_of(lambda: loop(f, (0, None, None))(q, k[0], v[0]))
            assert_same(vmap(f, in_dims=(0, None, None))(q, k[0], v[0]), truth)

    def slopes() -> None:
        with sdpa_kernel(kernel):
            truth = truth_of(lambda: loop(gradients(f))(*stacks()))
            assert_same(vmap(grad(of_total, (0, 1, 2)))(*stacks()), truth)

    def second() -> None:
        """Of second derivatives the kernels have none: the truth is that of the plain formula."""
        xs = tuple(x[0] for x in stacks())
        directions = tuple(x.cos() for x in xs)
        with sdpa_kernel(kernel):
            truth_of(lambda: gradients(f)(*xs))  # whether it runs here at all
        with sdpa_kernel(SDPBackend.MATH):
            truth = truth_of(lambda: torch.autograd.functional.hvp(of_total, xs, directions)[1])
        with sdpa_kernel(kernel):
            found = jvp(grad(of_total, (0, 1, 2)), xs, directions)[1]
        assert_same(found, truth)

    found = [
        Check(f"{name}, vmap", values),
        Check(f"{name}, vmap with shared keys", shared),
        Check(f"{name}, vmap of grad", slopes),
    ]
    return [*found, Check(f"{name}, jvp of grad", second)] if dtype is torch.float32 else found


def of_layers(device: torch.device) -> list[Check]:
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    encoder = encoder.to(device).eval()
    xs = numbers(device, 4, 6, 16, dtype=torch.float32)
    params = parameters(encoder)

    def of_one(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return total(torch.func.functional_call(encoder, p, (x,)))

    def weights() -> None:
        truth = gradients_of_weights(encoder, xs)
        mapped = vmap(grad(of_one), in_dims=(None, 0))
        assert_same(mapped(params, xs), truth)
        recorded = jit(mapped)
        for _ in range(3):
            assert_same(recorded(params, xs), truth, "jit")

    def values() -> None:
        with torch.no_grad():
            assert_same(vmap(encoder)(xs), loop(encoder)(xs), "without a derivative")
        assert_same(vmap(encoder)(xs).detach(), loop(encoder)(xs).detach())

    def curved() -> None:
        f = lambda x: total(encoder(x.view(2, 16)))  # noqa: E731
        rows = xs[:2, :2].flatten(1)
        with sdpa_kernel(SDPBackend.MATH):  # the other kernels have no second derivative
            truth = loop(lambda x: torch.autograd.functional.hessian(f, x))(rows)
        assert_same(vmap(hessian(f))(rows), truth)

    def columns() -> None:
        f = lambda x: encoder(x.view(2, 16))  # noqa: E731
        rows = xs[:2, :2].flatten(1)
        truth = loop(lambda x: torch.autograd.functional.jacobian(f, x))(rows)
        assert_same(vmap(jacfwd(f))(rows), truth)

    return [
        Check("an encoder layer, vmap", values),
        Check("an encoder layer, gradients of the weights", weights),
        Check("an encoder layer, Hessians", curved),
        Check("an encoder layer, jacfwd", columns),
    ]
