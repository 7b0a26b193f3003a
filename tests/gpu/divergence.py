"""Examples that part: the acceptance functions and the everyday programs of the benchmarks."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import forall
from divergence.cases import Case
from divergence.functions import CASES
from divergence.truth import looped
from gpu.checks import Check, assert_same, default_device, numbers, on, total, truth_of
from oracle import loop

EXAMPLES = 6
QUICK = 3  # one in so many of the checks is made with --quick


def checks(device: torch.device) -> list[Check]:
    key = forall.random.key(0).to(device)
    everyday = load_everyday()
    found = [*ways(device)]
    for name, program in everyday.PROGRAMS.items():
        found.append(Check(f"everyday: {name}", of_everyday(program, device), True))
    for case in CASES.values():
        found.append(Check(f"{case.name}", of_values(case, key, device), True))
        if case.grads and not case.writes:
            found.append(Check(f"{case.name}, gradients", of_gradients(case, key, device), True))
    return found


def load_everyday() -> ModuleType:
    """The benchmarks' forty programs."""
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "everyday.py"
    spec = importlib.util.spec_from_file_location("everyday", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def of_everyday(program: Any, device: torch.device) -> Callable[[], None]:
    def run() -> None:
        torch.manual_seed(0)
        stacks = on(device, program.inputs(EXAMPLES))
        with default_device(device):
            truth = truth_of(lambda: loop(program.func)(*stacks))
            assert_same(forall.vmap(program.func)(*stacks), truth)

    return run


def of_values(case: Case, key: torch.Tensor, device: torch.device) -> Callable[[], None]:
    options: dict[str, Any] = {"randomness": key} if case.keyed else {}

    def run() -> None:
        given = [on(device, case.stacks(EXAMPLES, seed=1)) for _ in range(2)]
        with default_device(device):
            dims = [0] * len(given[0])
            truth = truth_of(
                lambda: looped(case.plain, dims, key if case.keyed else None)(*given[0])
            )
            found = forall.vmap(case.f, **options)(*given[1])
            assert_same(found, truth)
            assert_same(given[1], given[0], "arguments after the call")

    return run


def of_gradients(case: Case, key: torch.Tensor, device: torch.device) -> Callable[[], None]:
    options: dict[str, Any] = {"randomness": key} if case.keyed else {}

    def run() -> None:
        stacks = on(device, case.stacks(EXAMPLES, seed=1))
        with default_device(device):

            def slopes(*row: torch.Tensor) -> tuple[torch.Tensor, ...]:
                xs = [x.clone().requires_grad_(i in case.grads) for i, x in enumerate(row)]
                leaves = [xs[i] for i in case.grads]
                y = total(case.plain(*xs))
                if not y.requires_grad:
                    return tuple(torch.zeros_like(x) for x in leaves)
                return torch.autograd.grad(y, leaves, materialize_grads=True)

            dims = [0] * len(stacks)
            truth = truth_of(lambda: looped(slopes, dims, key if case.keyed else None)(*stacks))
            of_total = forall.grad(lambda *xs: total(case.f(*xs)), argnums=case.grads)
            assert_same(forall.vmap(of_total, **options)(*stacks), truth)

    return run


# --- each strategy, with gradients and nested -----------------------------------------------


def newton(a: torch.Tensor) -> torch.Tensor:
    x = a
    while (x * x - a).abs() > 1e-9 * a:
        x = (x + a / x) / 2
    return x


def branched(x: torch.Tensor) -> torch.Tensor:
    if x > 5:
        return x.sin()
    if x > 2:
        return x.cos() * 2
    return x * x


def masked(x: torch.Tensor) -> torch.Tensor:
    v = torch.stack([x - 5, x, 2 * x])
    return v[v > 1].sum()


WAYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "while": newton,
    "if": branched,
    "mask": masked,
    "item": lambda x: x * int(x.item()),
    "range of a number": lambda x: sum((x * i for i in range(int(x.item()))), x * 0),
    "number of Python's": lambda x: x * (1.5 if x.item() > 3 else 0.5),
}


def ways(device: torch.device) -> list[Check]:
    xs = numbers(device, 64).abs() * 10 + 0.1

    def slope(f: Callable) -> Callable:
        def run(x: torch.Tensor) -> torch.Tensor:
            leaf = x.detach().clone().requires_grad_()
            return torch.autograd.grad(f(leaf), leaf)[0]

        return run

    def of(f: Callable, ours: Callable, truth: Callable) -> Callable[[], None]:
        def run() -> None:
            for setting in ("together", "measured", "loop"):
                before, forall.config.strategy = forall.config.strategy, setting
                try:
                    assert_same(ours(f)(xs), truth(f)(xs), setting)
                finally:
                    forall.config.strategy = before

        return run

    pairs = {
        "vmap": (forall.vmap, loop),
        "vmap of grad": (lambda f: forall.vmap(forall.grad(f)), lambda f: loop(slope(f))),
        "vmap of jvp": (
            lambda f: forall.vmap(lambda x: forall.jvp(f, (x,), (torch.ones_like(x),))[1]),
            lambda f: loop(slope(f)),
        ),
        "vmap of vmap": (
            lambda f: lambda xs: forall.vmap(forall.vmap(f))(xs.view(8, 8)).flatten(),
            loop,
        ),
    }
    found = [
        Check(f"{name}, {verb}", of(f, *pairs[verb]), True)
        for name, f in WAYS.items()
        for verb in pairs
    ]
    return [
        *found,
        Check("ragged results", lambda: ragged(xs)),
        Check("an example that fails is named", lambda: named(device)),
    ]


def ragged(xs: torch.Tensor) -> None:
    rows = xs.view(16, 4)
    found = forall.vmap(lambda v: v[v > 3], ragged=True)(rows).unbind()
    assert_same(list(found), [v[v > 3] for v in rows])


def named(device: torch.device) -> None:
    matrices = torch.eye(3, device=device, dtype=torch.float64).repeat(4, 1, 1)
    matrices[2] = 0
    try:
        forall.vmap(torch.linalg.inv)(matrices)
    except RuntimeError as error:
        told = " ".join([str(error), *getattr(error, "__notes__", [])])
        assert "2" in told, told
        return
    raise AssertionError("the inverse of a matrix of zeros raised nothing")
