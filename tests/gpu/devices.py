"""Tensors of several devices, and devices that are not named."""

from __future__ import annotations

from collections.abc import Callable

import torch

from forall import grad, hessian, jacfwd, jacrev, jit, jvp, vmap
from gpu.checks import Check, Skipped, assert_same, default_device, numbers, only_cuda
from oracle import loop


def checks(device: torch.device) -> list[Check]:
    found = [
        Check(f"numbers of the CPU's: {name}", f) for name, f in numbers_of_the_cpu(device).items()
    ]
    others: dict[str, Callable] = {
        "indices of the CPU's": indices,
        "to the host and back": there_and_back,
        "a default device": a_default_device,
        "a default device that changes": a_changed_default_device,
        "set_default_device": set_default_device,
        "jit replays under a default device": jit_replays,
        "a second device": a_second_device,
        "pinned memory": pinned,
    }
    return [*found, *(Check(name, lambda f=f: f(device)) for name, f in others.items())]


def numbers_of_the_cpu(device: torch.device) -> dict[str, Callable[[], None]]:
    """A tensor of the CPU's without dimensions goes with those of any device: so say the loops."""
    xs = numbers(device, 5, 8)
    two, each = torch.tensor(2.0, dtype=xs.dtype), torch.arange(5.0, dtype=xs.dtype)
    one = torch.tensor(1.0, dtype=xs.dtype)
    jacobian = torch.autograd.functional.jacobian
    first = xs[0]

    def of_scale(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return (x * s).sin()

    def slope(s: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        leaf = s.detach().clone().requires_grad_()
        return torch.autograd.grad(of_scale(x, leaf).sum(), leaf)[0]

    cases: dict[str, tuple[Callable, Callable]] = {
        "captured": (
            lambda: vmap(lambda x: x * two + one)(xs),
            lambda: loop(lambda x: x * two + one)(xs),
        ),
        "grad": (
            lambda: grad(lambda s: of_scale(xs, s).sum())(two),
            lambda: slope(two, xs),
        ),
        "jvp": (
            lambda: jvp(lambda s: of_scale(xs, s), (two,), (one,))[1],
            lambda: xs * (xs * 2).cos(),
        ),
        "jacrev": (
            lambda: jacrev(lambda s: of_scale(first, s))(two),
            lambda: jacobian(lambda s: of_scale(first, s), two),
        ),
        "jacfwd": (
            lambda: jacfwd(lambda s: of_scale(first, s))(two),
            lambda: first * (first * 2).cos(),
        ),
        "hessian": (
            lambda: hessian(lambda s: of_scale(first, s).sum())(two),
            lambda: torch.autograd.functional.hessian(lambda s: of_scale(first, s).sum(), two),
        ),
        "mapped": (lambda: vmap(of_scale)(xs, each), lambda: loop(of_scale)(xs, each)),
        "mapped, grad": (
            lambda: vmap(grad(lambda s, x: of_scale(x, s).sum()))(each, xs),
            lambda: loop(slope)(each, xs),
        ),
        "mapped, where": (
            lambda: vmap(lambda x, s: torch.where(x > 0, x, s))(xs, each),
            lambda: loop(lambda x, s: torch.where(x > 0, x, s))(xs, each),
        ),
        "mapped, written into": (
            lambda: vmap(lambda x, s: x.clone().mul_(s))(xs, each),
            lambda: loop(lambda x, s: x.clone().mul_(s))(xs, each),
        ),
        "mapped, clamp": (
            lambda: vmap(lambda x, s: x.clamp(min=s))(xs, each),
            lambda: loop(lambda x, s: x.clamp(min=s))(xs, each),
        ),
        "mapped, addcmul": (
            lambda: vmap(lambda x, s: torch.addcmul(x, x, x * s))(xs, each),
            lambda: loop(lambda x, s: torch.addcmul(x, x, x * s))(xs, each),
        ),
        "mapped, power": (
            lambda: vmap(lambda x, s: x.abs() ** s)(xs, each),
            lambda: loop(lambda x, s: x.abs() ** s)(xs, each),
        ),
        "of each example, made inside": (
            lambda: vmap(lambda x: x * x.sum().cpu())(xs),
            lambda: loop(lambda x: x * x.sum().cpu())(xs),
        ),
    }
    return {
        name: lambda ours=ours, truth=truth: assert_same(ours(), truth())
        for name, (ours, truth) in cases.items()
    }


def indices(device: torch.device) -> None:
    xs = numbers(device, 5, 8)
    places, each = torch.tensor([1, 3]), torch.arange(5)
    assert_same(vmap(lambda x: x[places])(xs), xs[:, [1, 3]])
    assert_same(vmap(lambda x, i: x[i])(xs, each), xs[range(5), range(5)])
    truth = loop(lambda x, i: x[i.expand(2)])(xs, each)
    assert_same(vmap(lambda x, i: x[i.expand(2)])(xs, each), truth)


def there_and_back(device: torch.device) -> None:
    xs = numbers(device, 5, 8)
    f = lambda x: x.cpu().sin().to(device, non_blocking=True) + x  # noqa: E731
    assert_same(vmap(f)(xs), xs.sin() + xs)
    assert_same(vmap(grad(lambda x: x.cpu().sin().to(device).sum()))(xs), xs.cos())
    recorded = jit(vmap(f))
    for i in range(3):
        given = numbers(device, 5, 8, seed=i)
        assert_same(recorded(given), given.sin() + given)


def a_default_device(device: torch.device) -> None:
    xs = numbers(device, 5, 8)
    f = lambda x: (x * torch.arange(8.0) + torch.tensor(2.0)).sin()  # noqa: E731
    steps = torch.arange(8.0, device=device)
    with default_device(device):
        assert_same(vmap(f)(xs), (xs * steps + 2).sin())
        of_total = vmap(grad(lambda x: f(x).sum()))
        recorded = jit(of_total)
        for g in (of_total, recorded, recorded, recorded):
            assert_same(g(xs), (xs * steps + 2).cos() * steps)
        found = vmap(lambda x: 3)(xs)
        assert found.device == loop(lambda x: 3)(xs).device, f"of numbers: {found.device}"


def a_changed_default_device(device: torch.device) -> None:
    """Where something is made is asked at each call, replayed or not."""
    f = jit(lambda n: torch.ones(2) * n)
    f(2), f(2)
    for _ in range(3):
        with default_device(device):
            assert f(2).device == device
        assert f(2).device.type == "cpu"


def set_default_device(device: torch.device) -> None:
    torch.set_default_device(device)
    try:
        xs = numbers(device, 4, 6)
        f = vmap(grad(lambda x: (x * torch.linspace(0, 1, 6, dtype=x.dtype)).sin().sum()))
        w = torch.linspace(0, 1, 6, dtype=xs.dtype)
        recorded = jit(f)
        for g in (f, recorded, recorded):
            assert_same(g(xs), (xs * w).cos() * w)
    finally:
        torch.set_default_device(None)


def jit_replays(device: torch.device) -> str:
    xs = numbers(device, 4, 16)
    f = jit(vmap(grad(lambda x: (x * torch.ones(16, dtype=x.dtype)).sin().sum())))
    with default_device(device):
        for _ in range(4):
            assert_same(f(xs), xs.cos())
    hits = f.cache_info().hits
    assert hits, f"{hits} of 4 calls are replayed"
    return f"{hits} of 4 calls are replayed"


def a_second_device(device: torch.device) -> None:
    only_cuda(device)
    if torch.cuda.device_count() < 2:
        raise Skipped("this machine has one")
    other = torch.device("cuda", (device.index + 1) % torch.cuda.device_count())
    xs = numbers(other, 4, 16)
    for backend in ("python", "cudagraphs", "inductor"):
        f = jit(vmap(grad(lambda x: x.sin().sum())), backend=backend)
        for _ in range(3):
            assert_same(f(xs), xs.cos(), backend)
    f = vmap(lambda x: x.sin() if x.sum() > 0 else x.cos())
    assert_same(f(xs), loop(lambda x: x.sin() if x.sum() > 0 else x.cos())(xs))


def pinned(device: torch.device) -> None:
    only_cuda(device)
    xs = numbers(torch.device("cpu"), 5, 8).pin_memory()
    f = lambda x: x.to(device, non_blocking=True).sin()  # noqa: E731
    assert_same(vmap(f)(xs), xs.to(device).sin())
