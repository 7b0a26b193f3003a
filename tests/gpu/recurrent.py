"""Recurrent networks, which a GPU runs by kernels of cuDNN and by fused cells."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import forall
from forall import grad, hessian, jacfwd, jvp, vmap
from gpu.checks import (
    Check,
    D,
    assert_same,
    gradients_of_weights,
    numbers,
    parameters,
    total,
    truth_of,
    vmapped_and_differentiated,
)
from laws.recurrent import CELLS, LAYERS
from oracle import loop


def checks(device: torch.device) -> list[Check]:
    found = []
    for dtype in (torch.float32, D):
        word = str(dtype).removeprefix("torch.")
        for name, (kind, options) in LAYERS.items():
            torch.manual_seed(0)
            net = kind(3, 4, **options).to(dtype).to(device)
            xs = numbers(device, 4, 5, 2, 3, dtype=dtype)
            found += of_module(f"{word} {name}", net, xs, lambda out: out[0])
        for name, (kind, options) in CELLS.items():
            torch.manual_seed(0)
            net = kind(3, 4, **options).to(dtype).to(device)
            xs = numbers(device, 4, 2, 3, dtype=dtype)
            found += of_module(f"{word} cell {name}", net, xs, lambda out: tree_leaves(out)[0])
    return found


def of_module(name: str, net: nn.Module, xs: torch.Tensor, first: Callable) -> list[Check]:
    working = torch.float32 if xs.dtype is torch.float32 else None

    def value(x: torch.Tensor) -> torch.Tensor:
        return first(net(x)).sin().sum()

    def ensemble() -> None:
        """Weights of each example's own."""
        stacks = {
            k: torch.stack([p * (1 + i / 4) for i in range(4)]) for k, p in parameters(net).items()
        }
        call = lambda p, x: first(forall.functional_call(net, p, (x,)))  # noqa: E731
        truth = truth_of(lambda: loop(call, (dict.fromkeys(stacks, 0), 0))(stacks, xs))
        assert_same(vmap(call)(stacks, xs).detach(), truth.detach())

    def weights() -> None:
        truth = truth_of(lambda: gradients_of_weights(net, xs, lambda out: first(out).sin().sum()))
        of_one = grad(lambda p, x: first(forall.functional_call(net, p, (x,))).sin().sum())
        assert_same(vmap(of_one, in_dims=(None, 0))(parameters(net), xs), truth)

    def without_cudnn(run: Callable) -> Callable:
        """cuDNN has no second derivative of these, so the truth is by other kernels."""

        def plain(*args: torch.Tensor) -> torch.Tensor:
            with torch.backends.cudnn.flags(enabled=False):
                return run(*args)

        return plain

    def second() -> None:
        plain = without_cudnn(lambda x: torch.autograd.functional.hessian(value, x))
        truth = truth_of(lambda: loop(plain)(xs[:2]))
        assert_same(vmap(hessian(value))(xs[:2]), truth, working=working)

    def product() -> None:
        """A Hessian times a vector, in the weights."""
        params = parameters(net)
        of_all = lambda p: sum(  # noqa: E731
            first(forall.functional_call(net, p, (x,))).sin().sum() for x in xs
        )
        plain = without_cudnn(
            lambda: torch.autograd.functional.hvp(
                lambda *ps: of_all(dict(zip(params, ps, strict=True))),
                tuple(params.values()),
                tuple(p.cos() for p in params.values()),
            )[1]
        )
        truth = truth_of(plain)
        mapped = lambda p: vmap(  # noqa: E731
            lambda x: first(forall.functional_call(net, p, (x,))).sin().sum()
        )(xs).sum()
        directions = {k: p.cos() for k, p in params.items()}
        found = jvp(grad(mapped), (params,), (directions,))[1]
        assert_same(tuple(found.values()), truth, working=working)

    def columns() -> None:
        plain = lambda x: torch.autograd.functional.jacobian(lambda x: first(net(x)), x)  # noqa: E731
        truth = truth_of(lambda: loop(plain)(xs[:2]))
        assert_same(vmap(jacfwd(lambda x: first(net(x))))(xs[:2]), truth, working=working)

    def backward_outside() -> None:
        def grads(mapped: Callable) -> tuple[torch.Tensor, ...]:
            leaf = xs.clone().requires_grad_()
            leaves = [leaf, *net.parameters()]
            return torch.autograd.grad(total(mapped(leaf)), leaves, materialize_grads=True)

        truth = truth_of(lambda: grads(loop(net)))
        assert_same(grads(vmap(net)), truth)

    return [
        *vmapped_and_differentiated(name, net, xs, working=working),
        Check(f"{name}, weights of each example", ensemble),
        Check(f"{name}, gradients of the weights", weights),
        Check(f"{name}, backward pass outside", backward_outside),
        Check(f"{name}, Hessians", second),
        Check(f"{name}, Hessian times a vector in the weights", product),
        Check(f"{name}, jacfwd", columns),
    ]
