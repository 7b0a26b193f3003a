"""Ratios of forall to torch.func and to hand-written programs on a device: part of `make gpu`.

Each contestant agrees with the hand-written program before anything is timed. All of them run in
every round, one after the other, and a ratio is the median over rounds. Times are the wall clock's,
between two synchronisations around so many calls that they take some milliseconds. Below 1, forall
is the faster one. The columns:

    eager/func     forall as it is, to torch.func
    replayed/..    with calls replayed unasked; jit/.., graphs/.., inductor/..: by `jit` and backend
    ../hand        to the hand-written program
    ../loop        to the loop over examples, where torch.func refuses
    host share     of an eager call's time until the host is done with it: near 1, the device waits
    memory/..      peak memory of eager calls, as the allocator counts it
    by hand        the time of one call of the hand-written program
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("KINETO_LOG_LEVEL", "99")
warnings.filterwarnings("ignore", module="torch.fx", category=UserWarning)

import torch
from torch import nn
from torch.nn import functional as F

import forall
import workloads  # noqa: F401 - importing the groups registers their workloads
from measure import Disagreement, make, synchroniser, time_programs
from memory import peak_bytes
from registry import (
    DIVERGING,
    JIT,
    NAMES,
    REPLAYED,
    WORKLOADS,
    Contestants,
    Program,
    Workload,
    assert_agree,
    loop_contest,
)
from report import ratios
from workloads import attention
from workloads.diverging import newton, newton_masked
from workloads.hessians import at_points
from workloads.per_example import convolutional, perceptron
from workloads.pointwise import gradient_of_size, of_size

# What is divided by torch.func, or by what stands in its place, and by the hand-written program.
OURS = {"eager": 0, "replayed": REPLAYED, "jit": JIT, "graphs": JIT + 2, "inductor": JIT + 3}
OTHERS = {NAMES: "func", DIVERGING: "loop"}  # the second contestant, by the names of all
ROUNDS, TARGET = 7, 0.02
COMPILED = 3  # rows that torch's compiler is tried on too, seconds each


class Row(NamedTuple):
    """A workload, and whether its peak memory is told too."""

    workload: Workload
    with_memory: bool = False


def registered(name: str, with_memory: bool = False) -> Row:
    return Row(WORKLOADS[name], with_memory)


def made(
    name: str,
    build: Callable[[torch.device], Contestants],
    with_memory: bool = False,
    names: tuple[str, str, str] = NAMES,
) -> Row:
    return Row(Workload(name, "", "time", build, names), with_memory)


# --- programs that no other benchmark has ---------------------------------------------------------


def scanned(device: torch.device) -> Contestants:
    """A recurrence over 64 steps, which torch.func has no operator for: the loop inside vmap."""
    xs = torch.randn(256, 64, 32, device=device)
    start = torch.zeros(256, 32, device=device)

    def step(state: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state = (state * 0.9 + x).tanh()
        return state, state

    def unrolled(state: torch.Tensor, xs: torch.Tensor) -> torch.Tensor:
        for x in xs.unbind():
            state, _ = step(state, x)
        return state

    ours = forall.vmap(lambda s, x: forall.scan(step, s, x)[0])
    theirs = torch.func.vmap(unrolled)
    turned = xs.transpose(0, 1)
    programs = (
        lambda: ours(start, xs),
        lambda: theirs(start, xs),
        lambda: unrolled(start, turned),
    )
    return Contestants(programs, lambda actual, wanted: assert_agree(actual, wanted, 1e-5))


def drawn(device: torch.device) -> Contestants:
    """Dropout with a draw for each example: equal in how many numbers are kept."""
    xs = torch.ones(512, 1024, device=device)

    def transformed(api: Any) -> Callable[[], torch.Tensor]:
        mapped = api.vmap(lambda x: F.dropout(x * 2).sin(), randomness="different")
        return lambda: mapped(xs)

    def check(actual: torch.Tensor, wanted: torch.Tensor) -> None:
        share = (actual != 0).double().mean().item()
        assert actual.shape == wanted.shape
        assert abs(share - 0.5) < 0.01, f"{share} of the numbers are kept"

    programs = (transformed(forall), transformed(torch.func), lambda: F.dropout(xs * 2).sin())
    return Contestants(programs, check, transformed=transformed)


def keyed(device: torch.device) -> Contestants:
    """The same with a key, for which torch.func has nothing: beside draws without one."""
    xs = torch.ones(512, 1024, device=device)
    key = forall.random.key(0).to(device)
    mapped = forall.vmap(lambda x: F.dropout(x * 2).sin(), randomness=key)
    found = drawn(device)
    programs = (lambda: mapped(xs), *found.programs[1:])
    return Contestants(programs, found.check)


def newtons(device: torch.device) -> Contestants:
    """Square roots by Newton of 65536 numbers; the loop runs over 16 of them."""
    a = 10 ** (30 * torch.rand(1 << 16, dtype=torch.float64, device=device))
    return loop_contest(newton, (a,), lambda: newton_masked(a), chosen=range(0, 1 << 16, 1 << 12))


def branched(device: torch.device) -> Contestants:
    """An `if` over 65536 numbers; the loop runs over 16 of them."""
    x = torch.randn(1 << 16, device=device)

    def f(v: torch.Tensor) -> torch.Tensor:
        return v.sin() if v > 0 else v.exp()

    def handwritten() -> torch.Tensor:
        return torch.where(x > 0, x.sin(), x.exp())

    return loop_contest(f, (x,), handwritten, chosen=range(0, 1 << 16, 1 << 12), tolerance=1e-5)


def lstm_gradients(device: torch.device) -> Contestants:
    """The gradient of an LSTM in its input, 64 sequences; the loop runs over 8."""
    net = nn.LSTM(64, 128).to(device).requires_grad_(False)
    xs = torch.randn(64, 20, 64, device=device)
    slope = forall.grad(lambda x: net(x)[0].square().sum())
    by_autograd = lambda x: torch.autograd.grad(net(x)[0].square().sum(), x)[0]  # noqa: E731

    def handwritten() -> torch.Tensor:
        return by_autograd(xs.transpose(0, 1).clone().requires_grad_()).transpose(0, 1)

    chosen = range(8)
    programs = (
        lambda: forall.vmap(slope)(xs),
        lambda: torch.stack([by_autograd(xs[i].clone().requires_grad_()) for i in chosen]),
        handwritten,
    )
    found = loop_contest(lambda x: x, (xs,), handwritten, chosen=chosen, tolerance=1e-3)
    return Contestants(programs, found.check, (1.0, len(xs) / len(chosen), 1.0))


def larger_attention(device: torch.device) -> Contestants:
    return attention.of_size(device, 256, 128, 128)


# --- the rows, the most important ones first ------------------------------------------------------

ROWS = (
    registered("per-example-mlp", with_memory=True),
    registered("per-example-cnn", with_memory=True),
    registered("per-example-attention", with_memory=True),
    registered("ensemble-grad", with_memory=True),
    registered("batched-hessian"),
    registered("jacrev"),
    registered("jacfwd"),
    registered("hvp-forward-over-reverse"),
    made("newton, 65536 numbers", newtons, names=DIVERGING),
    made("scan, 64 steps", scanned),
    made("draws", drawn),
    made("per-example-mlp, 2048", lambda d: perceptron(d, 2048), with_memory=True),
    made("per-example-cnn, 512", lambda d: convolutional(d, 512), with_memory=True),
    made("per-example-attention, 256 x 128 x 128", larger_attention, with_memory=True),
    registered("norms-mlp", with_memory=True),
    registered("grad-of-two-numbers"),
    registered("vmap-grad-of-two-numbers"),
    registered("pointwise-chain"),
    registered("pointwise-chain-grad"),
    made("chain, 4096 x 1024", lambda d: of_size(d, 4096, 1024), with_memory=True),
    made("chain-grad, 4096 x 1024", lambda d: gradient_of_size(d, 4096, 1024), with_memory=True),
    made("batched-hessian, 4096", lambda d: at_points(d, 4096), with_memory=True),
    registered("ensemble-forward"),
    registered("ensemble-backward"),
    registered("shared-mlp"),
    registered("shared-cnn"),
    registered("shared-residual"),
    registered("hvp-reverse-over-reverse"),
    registered("linearize"),
    registered("jacrev-gelu"),
    registered("gradient-penalty"),
    registered("steps-with-closures"),
    made("draws of a key", keyed),
    made("if, 65536 numbers", branched, names=DIVERGING),
    made("LSTM, gradients", lstm_gradients, names=DIVERGING),
    registered("lstm"),
    registered("gru-cell"),
    *(registered(name) for name in WORKLOADS if name.startswith(("maml", "gaussian"))),
)
QUICK = 10  # the first of them


Tell = Callable[[str, str, str], None]  # a name, a status, and a text


def by_backends(
    row: Row, contestants: Contestants, device: torch.device, compiled: bool, tell: Tell
) -> list[Program | None]:
    """The first program by `jit` with CUDA graphs, and with torch's compiler, where it can be."""
    found: list[Program | None] = []
    for backend in ("cudagraphs", "inductor"):
        is_tried = device.type == "cuda" if backend == "cudagraphs" else compiled
        program = None
        if is_tried and contestants.jitted is not None and contestants.transformed is not None:
            name = f"{row.workload.name} by {backend}"
            try:
                program = forall.jit(contestants.anew(forall), backend=backend)
                for _ in range(3):
                    contestants.check(program(), contestants.programs[2]())
            except AssertionError as error:
                tell(name, "wrong", str(error))
                program = None
            except Exception as error:
                lacks = "this machine cannot run that backend" in str(error)
                tell(name, "skipped" if lacks else "error", f"{type(error).__name__}: {error}")
                program = None
        found.append(program)
    return found


def medians(samples: list[tuple[float, ...]], names: tuple[str, ...]) -> dict[str, float]:
    """The ratios that are known, by the names of their columns."""
    below = {"hand": 2} | ({OTHERS[names]: 1} if names in OTHERS else {})
    found = {
        f"{ours}/{other}": statistics.median(ratios(samples, OURS[ours], place))
        for other, place in sorted(below.items())
        for ours in OURS
    }
    return {name: value for name, value in found.items() if not math.isnan(value)}


def share_of_the_host(program: Program, device: torch.device, calls: int = 20) -> float:
    """By how much of a call's time the host is done: near 1, it is what the device waits for."""
    synchronise = synchroniser(device)
    synchronise()
    started = time.perf_counter()
    for _ in range(calls):
        program()
    said = time.perf_counter() - started
    synchronise()
    return said / (time.perf_counter() - started)


def measured(
    row: Row, device: torch.device, quick: bool, compiled: bool, tell: Tell
) -> dict[str, Any]:
    """One line of the table."""
    workload = row.workload
    contestants = make(workload, device)
    programs: list[Program | None] = [program for program, _ in contestants.all]
    factors = [factor for _, factor in contestants.all]
    programs += by_backends(row, contestants, device, compiled, tell)
    factors += [factors[0]] * (len(programs) - len(factors))
    rounds, target = (3, 0.005) if quick else (ROUNDS, TARGET)
    samples = [
        tuple(t * factor for t, factor in zip(sample, factors, strict=True))
        for sample in time_programs(programs, rounds, target, device)
    ]
    by_hand = statistics.median(sample[2] for sample in samples)
    found = medians(samples, workload.names)
    if device.type == "cuda":
        found["host share"] = share_of_the_host(contestants.programs[0], device)
    if row.with_memory and device.type == "cuda":
        eager, other, hand = (float(peak_bytes(p, device)) for p in contestants.programs)
        if workload.names == NAMES:
            found["memory/func"] = eager / other
        found["memory/hand"] = eager / hand
    return {"name": workload.name, "ratios": found, "by hand": f"{1e3 * by_hand:.3g} ms"}


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--device", default="cuda")
    p.add_argument("--quick", action="store_true", help=f"the first {QUICK} rows, shorter samples")
    p.add_argument("--seconds", type=float, default=180.0)
    p.add_argument("--preload")
    p.add_argument("--child", help=argparse.SUPPRESS)  # as `tests/gpu/run.py` starts it
    p.add_argument("--until", type=float, help=argparse.SUPPRESS)
    p.add_argument("--out", type=Path, help="every row, one a line, as JSON")
    return p.parse_args()


def main() -> int:
    options = arguments()
    if options.preload:
        importlib.import_module(options.preload)
    until = options.until or time.time() + options.seconds
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    forall.config.replay = False  # but in the contestants that are there to show it
    device = torch.device(options.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    rows = ROWS[:QUICK] if options.quick else ROWS
    lines = options.out.open("w") if options.out else None

    def tell(entry: dict[str, Any]) -> None:
        print(json.dumps(entry), file=lines or sys.stdout, flush=True)

    def status(name: str, word: str, text: str, seconds: float = 0.0, count: int = 1) -> None:
        short = " ".join(text.split())[:300]
        entry = {"section": "times", "name": name, "status": word, "text": short}
        tell(entry | {"seconds": seconds, "count": count})

    failed = False
    for i, row in enumerate(rows):
        name, started = row.workload.name, time.time()
        if started > until - 3:
            status(f"{len(rows) - i} rows", "not run", "the time was over", count=len(rows) - i)
            break
        tell({"begun": name, "place": i, "left": 0})
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                compiled = not options.quick and i < COMPILED
                entry = measured(row, device, options.quick, compiled, status)
        except Exception as error:
            traceback.print_exception(error)
            failed = True
            word = "wrong" if isinstance(error, Disagreement) else "error"
            status(name, word, f"{type(error).__name__}: {error}", time.time() - started)
            continue
        tell(entry)
        status(name, "ok", "", time.time() - started)
    return 0 if options.child else int(failed)


if __name__ == "__main__":
    sys.exit(main())
