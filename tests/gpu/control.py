"""The operators of control flow under the transforms, beside plain Python."""

from __future__ import annotations

from collections.abc import Callable

import torch

import forall
from control.programs import PLAIN, PROGRAMS, nested
from gpu.checks import Check, D, assert_same, default_device, numbers, second_call_of

QUICK = 2  # one in so many of the checks is made with --quick


def slope(f: Callable) -> Callable:
    def run(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        x = x.view_as(x) if x.requires_grad else x.detach().clone().requires_grad_()
        return torch.autograd.grad(f(x, p), x, create_graph=True)[0]

    return run


def looped(f: Callable) -> Callable:
    return lambda xs, ps: torch.stack([f(x, p) for x, p in zip(xs, ps, strict=True)])


def curved(f: Callable) -> Callable:
    return lambda x, p: torch.autograd.functional.hessian(lambda x: f(x, p), x)


def directed(f: Callable) -> Callable:
    return lambda x, p: forall.jvp(lambda x: f(x, p), (x,), (x.cos(),))[1]


WAYS: dict[str, tuple[Callable, Callable]] = {
    "vmap": (forall.vmap, looped),
    "vmap of grad": (lambda f: forall.vmap(forall.grad(f)), lambda f: looped(slope(f))),
    "vmap of hessian": (lambda f: forall.vmap(forall.hessian(f)), lambda f: looped(curved(f))),
    "vmap of jvp": (
        lambda f: forall.vmap(directed(f)),
        lambda f: looped(lambda x, p: slope(f)(x, p) @ x.cos()),
    ),
    "grad of vmap": (
        lambda f: forall.grad(lambda xs, ps: forall.vmap(f)(xs, ps).sum()),
        lambda f: slope(lambda xs, ps: looped(f)(xs, ps).sum()),
    ),
    "jit of vmap of grad": (
        lambda f: second_call_of(forall.jit(forall.vmap(forall.grad(f)))),
        lambda f: looped(slope(f)),
    ),
}


def checks(device: torch.device) -> list[Check]:
    xs = numbers(device, 4, 3, dtype=D) * 0.5
    ps = torch.tensor([3, 0, 5, 2], device=device)

    def of(program: Callable, ours: Callable, truth: Callable) -> Callable[[], None]:
        def run() -> None:
            with default_device(device):
                wanted = truth(lambda x, p: program(PLAIN, torch, x, p))(xs, ps)
                found = ours(lambda x, p: program(forall, torch, x, p))(xs, ps)
            assert_same(found, wanted)

        return run

    programs = PROGRAMS | {f"{name} in a scan": nested(f) for name, f in PROGRAMS.items()}
    return [
        Check(f"{name}, {way}", of(f, *WAYS[way])) for name, f in programs.items() for way in WAYS
    ]
