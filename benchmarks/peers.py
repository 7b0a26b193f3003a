"""Programs of `forall.jit` beside those of other compilers and libraries, on one thread."""

import contextlib
import math
import statistics
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

import forall
from first_calls import until_recorded
from measure import Built, Disagreement, seconds, settled, synchroniser, time_programs
from registry import Contestants, Program
from report import lined, mean, number, ratios
from rivals import RIVALS, Rival, nothing_kept

# Fixed, so that one release can be held against another.
SMALL = (
    "pointwise-chain",
    "pointwise-chain-grad",
    "grad-of-two-numbers",
    "jacrev",
    "jacfwd",
    "batched-hessian",
)
OTHERS = (
    "per-example-mlp",
    "per-example-cnn",
    "per-example-attention",
    "ensemble-forward",
    "ensemble-grad",
)
ROUNDS, COMPILED_ROUNDS = 21, 5
LONG = 1e-3  # seconds by hand, from which on a row counts for the mean of jit


class Row(NamedTuple):
    """Of one workload the samples, the costs of compiling, and what was left out."""

    name: str
    samples: list[tuple[float, ...]]
    compiling: list[float]
    left: list[str]


def compiled(
    rival: Rival, contestants: Contestants, wanted: Any, device: torch.device
) -> tuple[Program | None, float]:
    """Its program, and the seconds until that was compiled; it agrees with the one by hand."""
    program = rival.program(contestants)
    if program is None or rival.calls is None:
        cost = math.nan
    else:
        cost = seconds(program, rival.calls, synchroniser(device))
    if program is not None:
        contestants.check(rival.read(program()), wanted)
        contestants.check(rival.read(program()), wanted)
    return program, cost


def recorded(contestants: Contestants, device: torch.device) -> float:
    """The first call of `forall.jit`: what is cheap is measured several times."""
    if contestants.jitted is None:
        return math.nan

    def once(program: Program) -> float:
        return seconds(program, 1, synchroniser(device))

    with settled():
        costs = [
            sum(until_recorded(contestants.jit(contestants.anew(forall)), once))
            for _ in range(COMPILED_ROUNDS)
        ]
    return statistics.median(costs)


def measured(
    name: str, contestants: Contestants, rivals: list[Rival], rounds: int, device: torch.device
) -> Row:
    wanted = contestants.programs[-1]()
    programs, costs, left = [], [], []
    base = recorded(contestants, device)
    torch.compiler.reset()  # what it took out of other rows' programs
    for rival in rivals:
        program, cost = None, math.nan
        try:
            with nothing_kept(), refusals(rival.name, name, left):
                program, cost = compiled(rival, contestants, wanted, device)
        except Exception as error:
            if rival.name == "jit":
                raise Disagreement(f"{name}: {error}") from error
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            left.append(f"- {rival.name} of {name} is left out: {why}")
        programs.append(program)
        costs.append(cost / base)
    return Row(name, time_programs(programs, rounds, 0.01, device), costs, left)


@contextlib.contextmanager
def refusals(rival: str, name: str, left: list[str]) -> Iterator[None]:
    """What forall says where it runs a program as it is, or not as it was asked to."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        yield
    ours = [w.message for w in told if issubclass(w.category, forall.PerformanceWarning)]
    left += [f"- {rival} of {name}: {message}" for message in ours]


def warm_up(rivals: list[Rival], device: torch.device) -> None:
    """What is imported and set up once per process is no part of compiling a program."""
    x = torch.ones(3, device=device)
    contestants = Contestants(
        (lambda: x.sin() + 1,) * 3,
        lambda actual, expected: None,
        jitted=lambda: None,
        transformed=lambda api: lambda: x.sin() + 1,
        by_jax=lambda jax: (lambda x: jax.numpy.sin(x) + 1, (x,)),
    )
    for rival in rivals:
        with nothing_kept():
            compiled(rival, contestants, None, device)


def table(rows: list[Row], rivals: list[Rival], base: int) -> list[str]:
    names = [rival.name for rival in rivals]
    above = [i for i in range(len(rivals)) if i != base]
    compilers = [i for i in above if rivals[i].calls is not None and names[i] != "jit"]
    if rivals[base].calls is not None:
        compilers.append(base)
    titles = [
        "workload",
        *(f"{names[i]} / {names[base]}" for i in above),
        *(f"compiling: {names[i]} / jit" for i in compilers),
        "by hand",
    ]
    lines = [
        [
            row.name,
            *(number(ratio(row, i, base)) for i in above),
            *(number(row.compiling[i]) for i in compilers),
            ">= 1 ms" if is_long(row, names.index("hand-written")) else "< 1 ms",
        ]
        for row in rows
    ]
    return lined(titles, lines, said=1)


def ratio(row: Row, above: int, below: int) -> float:
    return statistics.median(ratios(row.samples, above, below))


def is_long(row: Row, by_hand: int) -> bool:
    return statistics.median(sample[by_hand] for sample in row.samples) >= LONG


def means(rows: list[Row], names: list[str], base: int) -> list[str]:
    by_hand = names.index("hand-written")
    long = [row for row in rows if is_long(row, by_hand)]
    small = [row for row in rows if row.name in SMALL]
    found = [["jit", "rows of at least 1 ms by hand", long], ["jit", "all rows", rows]]
    if "inductor" in names:
        found += [["inductor", "rows of small operators", small], ["inductor", "all rows", rows]]
    lines = []
    for name, which, chosen in found:
        known = [ratio(row, names.index(name), base) for row in chosen]
        lines.append([f"{name} / {names[base]}, {which}", mean(known), f"{len(chosen)}"])
    small_names = ", ".join(f"`{name}`" for name in SMALL)
    return ["", *lined(["ratio", "geometric mean", "rows"], lines), "", f"Small: {small_names}."]


def section(built: Built, rounds: int, device: torch.device) -> list[str]:
    if device.type != "cpu":
        return ["", "## Peers", "", "Only on the CPU."]
    chosen = [(w.name, c) for w, c in built if w.name in SMALL + OTHERS]
    if not chosen:
        return []
    lacking = {rival.name: rival.missing() for rival in RIVALS}
    rivals = [rival for rival in RIVALS if lacking[rival.name] is None]
    names = [rival.name for rival in rivals]
    base = names.index("JAX" if "JAX" in names else "hand-written")
    rows = []
    with warnings.catch_warnings():  # of others' programs, about themselves
        warnings.simplefilter("ignore")
        warm_up(rivals, device)
        for name, contestants in chosen:
            rows.append(measured(name, contestants, rivals, min(rounds, ROUNDS), device))
            print(table(rows[-1:], rivals, base)[-1], flush=True)
    return [
        "",
        "## Peers",
        "",
        'jit and inductor are forall\'s, `jit(f)` and `jit(f, backend="inductor")`; torch.compile',
        "is given the program of torch.func, and JAX is `jax.jit`, on one thread. Compiling is all",
        "until a program is there, from empty caches, measured once and divided by the first call",
        "of `jit`.",
        "",
        *table(rows, rivals, base),
        *means(rows, names, base),
        "",
        *(f"- {name} is left out: {why}." for name, why in lacking.items() if why),
        *(line for row in rows for line in row.left),
    ]
