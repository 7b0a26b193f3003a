"""Calls that are recorded: `jit` by each backend, and calls that are replayed unasked."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map

import forall
from forall import grad, hessian, jacfwd, jacrev, jit, jvp, scan, vmap
from gpu.checks import (
    Check,
    Skipped,
    assert_same,
    brief,
    cross_entropy,
    numbers,
    only_cuda,
    parameters,
    perceptron,
)

CALLS = 5


def programs(device: torch.device) -> dict[str, tuple[Callable, Callable[[int], tuple]]]:
    """Functions, and arguments that are others at each call."""
    net = perceptron(device, dtype=torch.float32)
    params = parameters(net)
    labels = torch.arange(8, device=device)

    def rows(i: int, *shape: int) -> Tensor:
        return numbers(device, *shape, dtype=torch.float32, seed=i)

    def of_net(x: Tensor) -> Tensor:
        return forall.functional_call(net, params, (x,)).sum()

    return {
        "gradients of a perceptron": (
            vmap(grad(cross_entropy(net)), in_dims=(None, 0, 0)),
            lambda i: (params, rows(i, 8, 16), labels),
        ),
        "a chain": (
            vmap(lambda x: ((x.sin() * 2 + x).tanh() - x.exp() / 3).sum()),
            lambda i: (rows(i, 32, 64),),
        ),
        "Hessians": (vmap(hessian(of_net)), lambda i: (rows(i, 4, 16),)),
        "a Hessian times a vector": (
            lambda x, v: jvp(grad(of_net), (x,), (v,))[1],
            lambda i: (rows(i, 16), rows(i + 9, 16)),
        ),
        "Jacobians": (
            lambda x: (jacrev(net)(x), jacfwd(net)(x)),
            lambda i: (rows(i, 16),),
        ),
        "a scan": (
            vmap(lambda x: scan(lambda c, y: ((c * y).sin(), c), x.sum(), x)),
            lambda i: (rows(i, 4, 6),),
        ),
        "writes in place": (
            vmap(lambda x: torch.zeros(3, 3, device=device).fill_diagonal_(2.0).add_(x[:3])),
            lambda i: (rows(i, 4, 16),),
        ),
        "an argument that is written into": (
            lambda x: x.mul_(2).sum(),
            lambda i: (rows(i, 4, 16),),
        ),
        "views": (
            lambda x: (x.t(), x[1:], (x * 2).view(-1)),
            lambda i: (rows(i, 4, 16),),
        ),
        "convolutions": (
            vmap(grad(lambda w, x: F.conv2d(x, w).square().sum()), in_dims=(None, 0)),
            lambda i: (rows(i, 4, 3, 3, 3), rows(i + 9, 4, 1, 3, 9, 9)),
        ),
        "attention": (
            vmap(grad(lambda q, k: F.scaled_dot_product_attention(q, k, k).square().sum())),
            lambda i: (rows(i, 3, 2, 8, 16), rows(i + 9, 3, 2, 8, 16)),
        ),
        "indices": (
            vmap(lambda x, i: x.index_put((i,), x[0]).sort()[0]),
            lambda i: (rows(i, 8, 16), (labels + i) % 16),
        ),
        "integers": (vmap(lambda i: (i * 3 + 1) % 7), lambda i: (labels + i,)),
        "several shapes": (
            vmap(grad(lambda x: x.sin().sum())),
            lambda i: (rows(i, 3 + i % 2, 5),),
        ),
        "a captured tensor that is written into": captured(device),
    }


def captured(device: torch.device) -> tuple[Callable, Callable[[int], tuple]]:
    weight = torch.ones(16, device=device)

    def given(i: int) -> tuple:
        weight.fill_(i + 1)
        return (numbers(device, 4, 16, dtype=torch.float32, seed=i),)

    return vmap(lambda x: (x * weight).cumsum(0)), given


def checks(device: torch.device) -> list[Check]:
    found = [*by_backend("python", device), *by_backend("cudagraphs", device)]
    others: dict[str, Callable] = {
        "replay: compared with each call": replay_is_the_call,
        "replay: a step that is called often": replay_of_a_step,
        "replay: backward pass outside": replay_with_a_backward,
        "cudagraphs: results of earlier calls stay": results_stay,
        "cudagraphs: many kinds": many_kinds,
    }
    return [*found, *(Check(name, lambda f=f: f(device)) for name, f in others.items())]


def by_backend(backend: str, device: torch.device) -> list[Check]:
    return [
        *(Check(f"{backend}: {n}", of_backend(backend, n, device)) for n in programs(device)),
        Check(f"{backend}: training outside", lambda: training(backend, device)),
    ]


def recorder(f: Callable, backend: str, device: torch.device) -> Any:
    """`jit` by this backend, where this machine has it."""
    if backend == "cudagraphs":
        only_cuda(device)
    try:
        return jit(f, backend=backend)  # pyright: ignore[reportArgumentType]
    except RuntimeError as error:
        if "this machine cannot run that backend" not in str(error):
            raise
        raise Skipped(brief(error)) from error


def of_backend(backend: str, name: str, device: torch.device) -> Callable[[], str]:
    def run() -> str:
        f, given = programs(device)[name]
        recorded = recorder(f, backend, device)
        kept: list[tuple[Any, Any]] = []
        for i in range(CALLS):
            mine, theirs = (tree_map(Tensor.clone, given(i)) for _ in range(2))
            truth = f(*theirs)
            found = recorded(*mine)
            assert_same(found, truth, f"call {i}")
            assert_same(mine, theirs, f"arguments of call {i}")
            kept.append((found, tree_map(Tensor.clone, found)))
        for i, pair in enumerate(kept):
            assert_same(*pair, f"the result of call {i}, after later ones")
        hits = recorded.cache_info().hits
        assert hits >= CALLS - 3, f"{hits} of {CALLS} calls are replayed"
        return f"{hits} of {CALLS} calls are replayed"

    return run


def training(backend: str, device: torch.device) -> None:
    net = perceptron(device, dtype=torch.float32)
    xs = numbers(device, 8, 16, dtype=torch.float32)
    labels = torch.arange(8, device=device)

    def loss(params: dict[str, Tensor]) -> Tensor:
        return vmap(cross_entropy(net), in_dims=(None, 0, 0))(params, xs, labels).mean()

    both = []
    for f in (loss, recorder(loss, backend, device)):
        params = {k: p.clone().requires_grad_() for k, p in parameters(net).items()}
        for _ in range(4):
            f(params).backward()
            with torch.no_grad():
                for p in params.values():
                    assert p.grad is not None
                    p -= 0.1 * p.grad
                    p.grad = None
        both.append({k: p.detach() for k, p in params.items()})
    assert_same(both[1], both[0])


def results_stay(device: torch.device) -> None:
    recorded = recorder(vmap(lambda x: (x * 2, x.sin())), "cudagraphs", device)
    xs = [numbers(device, 4, 8, seed=i) for i in range(6)]
    found = [recorded(x) for x in xs]
    for x, (doubled, sine) in zip(xs, found, strict=True):
        assert_same((doubled, sine), (x * 2, x.sin()))
        doubled.zero_()
    assert_same(recorded(xs[0]), (xs[0] * 2, xs[0].sin()))


def many_kinds(device: torch.device) -> str:
    """Every shape is a graph of its own; what they hold of the device's memory is told."""
    recorded = recorder(vmap(grad(lambda x: x.sin().square().sum())), "cudagraphs", device)
    before = torch.cuda.memory_reserved(device)
    for n in range(2, 34):
        x = numbers(device, n, 8)
        for _ in range(3):
            assert_same(recorded(x), 2 * x.sin() * x.cos())
    taken = torch.cuda.memory_reserved(device) - before
    return f"32 kinds hold {taken / 2**20:.0f} MB"


# --- unasked --------------------------------------------------------------------------------------


def replay_is_the_call(device: torch.device) -> None:
    before = forall.config.replay, forall.config.patience
    forall.config.replay, forall.config.patience = "check", 0.0
    try:
        for name, (f, given) in programs(device).items():
            for i in range(CALLS):
                mine, theirs = (tree_map(Tensor.clone, given(i)) for _ in range(2))
                forall.config.replay = False
                truth = f(*theirs)
                forall.config.replay = "check"
                assert_same(f(*mine), truth, f"{name}, call {i}")
                assert_same(mine, theirs, f"{name}, arguments of call {i}")
    finally:
        forall.config.replay, forall.config.patience = before


def replay_of_a_step(device: torch.device) -> str:
    """Whether a step is replayed where Python's time matters most; its time is told."""
    net = perceptron(device, dtype=torch.float32)
    xs = numbers(device, 8, 16, dtype=torch.float32)
    labels, params = torch.arange(8, device=device), parameters(net)
    step = vmap(grad(cross_entropy(net)), in_dims=(None, 0, 0))
    first = step(params, xs, labels)
    times = []
    for _ in range(150):
        started = time.perf_counter()
        step(params, xs, labels)
        times.append(time.perf_counter() - started)
    assert_same(step(params, xs, labels), first)
    early, late = sorted(times[:15])[7], sorted(times[-30:])[15]
    return f"a call takes the host {1e3 * early:.2f} ms at first and {1e3 * late:.2f} ms at last"


def replay_with_a_backward(device: torch.device) -> None:
    before = forall.config.replay, forall.config.patience
    xs = numbers(device, 4, 6)
    w = numbers(device, 6, seed=1).requires_grad_()
    f = vmap(lambda x: (x * w).sin().sum())
    forall.config.replay, forall.config.patience = True, 0.0
    try:
        for _ in range(8):
            (found,) = torch.autograd.grad(f(xs).sum(), w)
            assert_same(found, (xs * (xs * w.detach()).cos()).sum(0))
    finally:
        forall.config.replay, forall.config.patience = before
