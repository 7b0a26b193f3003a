"""Synchronisations: the host waits for the device only where the function asks for a number."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import forall
from forall import grad, hessian, jacfwd, jacrev, jit, jvp, linearize, vjp, vmap
from gpu.checks import (
    Check,
    Skipped,
    Waits,
    cross_entropy,
    numbers,
    parameters,
    perceptron,
)


@contextlib.contextmanager
def counted(device: torch.device) -> Iterator[list[str]]:
    """What waited for the device in the body, each by where it did."""
    found: list[str] = []
    if device.type == "cuda":
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield found
            finally:
                torch.cuda.set_sync_debug_mode("default")
        waits = [w for w in told if "called a synchronizing" in str(w.message)]
        found += [f"{'/'.join(w.filename.split('/')[-2:])}:{w.lineno}" for w in waits]
        return
    counter = getattr(getattr(torch.ops, device.type, None), "syncs", None)
    if counter is None:
        raise Skipped("this device does not tell")
    before = counter()
    yield found
    found += ["?"] * (counter() - before)


def checks(device: torch.device) -> list[Check]:
    def of(call: Callable[[], Any], allowed: int) -> Callable[[], str]:
        def run() -> str:
            with counted(device):  # or this device does not tell
                program = call()
            before, forall.config.strategy = forall.config.strategy, "together"
            try:
                for _ in range(3):
                    program()
                with counted(device) as waits:
                    program()
            finally:
                forall.config.strategy = before
            text = f"{len(waits)} synchronisations, {allowed} needed at most"
            if len(waits) > allowed:
                raise Waits(f"{text}: {', '.join(dict.fromkeys(waits))}")
            return text

        return run

    found = [Check(name, of(call, 0)) for name, call in without(device).items()]
    return found + [Check(n, of(call, most)) for n, (most, call) in with_tests(device).items()]


def without(device: torch.device) -> dict[str, Callable[[], Callable[[], Any]]]:
    """Programs in which nothing depends on data; each is made, and then called again and again."""
    net = perceptron(device, dtype=torch.float32)
    params = parameters(net)
    xs = numbers(device, 8, 16, dtype=torch.float32)
    labels = torch.arange(8, device=device)
    loss = cross_entropy(net)
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    encoder = encoder.to(device).eval()
    conv = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
    conv = conv.to(device)
    lstm, cell = nn.LSTM(16, 8).to(device), nn.GRUCell(16, 8).to(device)
    words = numbers(device, 4, 10, 32, dtype=torch.float32)
    images = numbers(device, 4, 2, 3, 12, 12, dtype=torch.float32)
    sequences = numbers(device, 4, 5, 2, 16, dtype=torch.float32)
    square = numbers(device, 4, 3, 3) + 3 * torch.eye(3, device=device, dtype=torch.float64)
    key = forall.random.key(0).to(device)
    one = xs[0]

    def of_net(x: Tensor) -> Tensor:
        return forall.functional_call(net, params, (x,)).sum()

    def of_encoder(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return forall.functional_call(encoder, p, (x[None],)).sum()

    def outside() -> None:
        vmap(net)(xs).sum().backward()

    def stepped() -> Callable[[], Any]:
        optimizer = torch.optim.SGD(net.parameters(), 0.0)

        def step() -> None:
            optimizer.zero_grad()
            vmap(net)(xs).square().mean().backward()
            optimizer.step()

        return step

    def inside(x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(leaf.sin().sum(), leaf)[0] * x

    of_example = vmap(grad(loss), in_dims=(None, 0, 0))
    of_weights = vmap(grad(of_encoder), in_dims=(None, 0))
    programs: dict[str, Callable[[], Any]] = {
        "vmap": lambda: vmap(net)(xs),
        "grad": lambda: grad(of_net)(one),
        "vjp": lambda: vjp(net, one)[1](torch.ones(10, device=device)),
        "jvp": lambda: jvp(net, (one,), (one,)),
        "jvp of grad": lambda: jvp(grad(of_net), (one,), (one,)),
        "linearize": lambda: linearize(net, one)[1](one),
        "jacrev": lambda: jacrev(net)(one),
        "jacfwd": lambda: jacfwd(net)(one),
        "hessian": lambda: hessian(of_net)(one),
        "hvp, laplacian, hessian_diag": lambda: (
            forall.hvp(of_net)(one, one),
            forall.laplacian(of_net)(one),
            forall.hessian_diag(of_net)(one),
        ),
        "vmap of grad": lambda: of_example(params, xs, labels),
        "vmap of jacrev": lambda: vmap(jacrev(net))(xs),
        "vmap of jacfwd": lambda: vmap(jacfwd(net))(xs),
        "vmap of hessian": lambda: vmap(hessian(of_net))(xs),
        "vmap of jvp": lambda: vmap(lambda x: jvp(net, (x,), (x,)))(xs),
        "vmap of vmap": lambda: vmap(vmap(torch.outer, (None, 0)), (0, None))(xs, xs),
        "vmap in chunks": lambda: vmap(net, chunk_size=3)(xs),
        "vmap in chunks, automatic": lambda: vmap(net, chunk_size="auto")(xs),
        "grad of vmap": lambda: grad(lambda xs: vmap(of_net)(xs).sum())(xs),
        "a transformer's layer": lambda: of_weights(parameters(encoder), words),
        "convolutions and batch norm": lambda: vmap(conv)(images),
        "gradients of convolutions": lambda: vmap(
            grad(lambda p, x: F.conv2d(x, p).square().sum()), in_dims=(None, 0)
        )(conv[0].weight.detach(), images),
        "LSTM": lambda: vmap(lambda x: lstm(x)[0])(sequences),
        "LSTM, gradients": lambda: vmap(grad(lambda x: lstm(x)[0].sum()))(sequences),
        "GRUCell, gradients": lambda: vmap(grad(lambda x: cell(x).sum()))(xs),
        "an embedding": lambda: vmap(grad(lambda w, i: F.embedding(i, w).sum()), in_dims=(None, 0))(
            xs, labels[:, None]
        ),
        "index, index_put, gather": lambda: vmap(
            lambda x, i: (x[i], x.index_put((i,), x[0]), x.gather(0, i[None]))
        )(xs, labels),
        "scatter, sort, cumsum": lambda: vmap(
            lambda x, i: x.scatter_add(0, i[None], x[:1]).sort()[0].cumsum(0)
        )(xs, labels),
        "linear algebra": lambda: vmap(
            lambda a: (a @ a, torch.linalg.det(a), torch.linalg.solve_ex(a, a)[0])
        )(square),
        "writes in place": lambda: vmap(
            lambda x: torch.zeros(4, device=device).add_(x[:4]).mul_(2)
        )(xs),
        "draws": lambda: vmap(F.dropout, randomness="different")(xs),
        "draws of a key": lambda: vmap(F.dropout, randomness=key)(xs),
        "forall.random": lambda: forall.random.normal(key, (8,)),
        "scan": lambda: vmap(lambda v: forall.scan(lambda c, y: ((c * y).sin(), y), v[0], v)[0])(
            xs
        ),
        "scan, gradients": lambda: vmap(
            grad(lambda v: forall.scan(lambda c, y: ((c * y).sin(), y), v[0], v)[0])
        )(xs),
        "norms of gradients": lambda: forall.per_example_grad_norm(loss, in_dims=(None, 0, 0))(
            params, xs, labels
        ),
        "an ensemble": lambda: vmap(lambda p: forall.functional_call(net, p, (xs,)))(
            {k: torch.stack([v, v]) for k, v in params.items()}
        ),
        "backward outside": outside,
        "autograd inside": lambda: vmap(inside)(xs),
    }
    made = {name: lambda f=f: f for name, f in programs.items()}
    recorded = jit(of_example)
    made["jit"] = lambda: lambda: recorded(params, xs, labels)
    made["a step of training outside"] = stepped
    if device.type == "cuda":
        by_graph = jit(of_example, backend="cudagraphs")
        made["jit by cudagraphs"] = lambda: lambda: by_graph(params, xs, labels)
    return made


def doubled(v: Tensor) -> Tensor:
    while v < 1000:
        v = v * 2 + 1
    return v


def with_tests(device: torch.device) -> dict[str, tuple[int, Callable[[], Callable[[], Any]]]]:
    """Programs that ask for numbers, and how often they have to wait for one."""
    lanes = numbers(device, 64).abs() * 9
    branched = vmap(lambda v: v.sin() if v > 4 else v.cos())
    mapped, read = vmap(doubled), vmap(lambda v: v * v.item())
    masked = vmap(lambda v: v[v > 0].sum())
    looped = vmap(lambda c: forall.while_loop(lambda c: c < 1000, lambda c: c * 2 + 1, c))
    rows = numbers(device, 8, 16)
    chosen = vmap(lambda v: forall.cond(v.sum() > 0, torch.sin, torch.cos, v))
    return {
        "cond": (1, lambda: lambda: chosen(rows)),
        "an if": (2, lambda: lambda: branched(lanes)),
        "a while of ten steps": (16, lambda: lambda: mapped(lanes)),
        "while_loop of ten steps": (14, lambda: lambda: looped(lanes)),
        "item() of each": (2, lambda: lambda: read(lanes)),
        "a mask of each": (3, lambda: lambda: masked(rows)),
    }
