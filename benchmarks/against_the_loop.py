"""Everyday programs in which examples diverge: `vmap` against the loop that it stands for.

First calls are of programs that were never seen: the module is loaded anew for each. Warm calls are
those after forall has found out which way of running takes less time.
"""

import importlib.util
import statistics
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import Any, NamedTuple

import torch

import forall
from measure import Disagreement, time_programs
from registry import Program
from report import lined, number, ratios
from rivals import from_jax, jax_, no_module

SIZES = (1, 2, 16, 256, 4096)
ROUNDS, FIRST_ROUNDS = 9, 3
WARM = 0.3  # seconds of calls in which forall finds out
SAMPLE = 0.01  # seconds of a sample
ALLOWED, SLACK = 3.0, 0.05  # times the loop, and seconds, that a first call may take
FILE = Path(__file__).with_name("everyday.py")


class Cell(NamedTuple):
    """Ratios of one program at one size; nan for what is not written by hand, or for JAX."""

    warm: float  # to the loop
    first: float  # to what a first call may take
    by_hand: float
    by_jax: float


def load() -> ModuleType:
    """The programs, as functions that were never called."""
    spec = importlib.util.spec_from_file_location("everyday", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def looped(func: Callable, stacks: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The loop as one writes it; to index each stack, as `registry.looped` does, takes longer."""
    return torch.stack([func(*rows) for rows in zip(*stacks, strict=True)])


def first_call(name: str, stacks: tuple[torch.Tensor, ...]) -> float:
    """Seconds of the first call of a program that nobody has seen."""
    mapped = forall.vmap(load().PROGRAMS[name].func)
    start = perf_counter()
    mapped(*stacks)
    return perf_counter() - start


def until_settled(program: Program) -> None:
    end = perf_counter() + WARM
    calls = 0
    while calls < 4 or perf_counter() < end:
        program()
        calls += 1


def cell(name: str, size: int, rounds: int) -> Cell:
    """Measure one program with so many examples."""
    torch.manual_seed(0)
    entry = load().PROGRAMS[name]
    stacks = entry.inputs(size)
    mapped = forall.vmap(entry.func)
    loop = partial(looped, entry.func, stacks)
    wanted = loop()
    first = statistics.median(first_call(name, stacks) for _ in range(FIRST_ROUNDS))
    programs: list[Program | None] = [
        loop,
        partial(mapped, *stacks),
        entry.by_hand and partial(entry.by_hand, *stacks),
        by_jax(entry, stacks),
    ]
    for program in filter(None, programs[1:]):
        found = torch.as_tensor(program())
        if not torch.allclose(found.double(), wanted.double(), atol=1e-4):
            raise Disagreement(f"{name}, {size} examples: {found} instead of {wanted}")
        until_settled(program)
    samples = time_programs(programs, rounds, SAMPLE, torch.device("cpu"))
    allowed = ALLOWED * statistics.median(sample[0] for sample in samples) + SLACK
    warm, hand, jax = (
        statistics.median(ratios(samples, *pair)) for pair in ((1, 0), (1, 2), (1, 3))
    )
    return Cell(warm, first / allowed, hand, jax)


def by_jax(entry: Any, stacks: tuple[torch.Tensor, ...]) -> Program | None:
    """The same by `jax.jit(jax.vmap(..))`, where it is written and JAX is there."""
    if entry.by_jax is None or no_module("jax")() is not None:
        return None
    jax = jax_()
    mapped = jax.jit(jax.vmap(entry.by_jax(jax)))
    arguments = [jax.numpy.asarray(x.numpy()) for x in stacks]
    return lambda: from_jax(jax.block_until_ready(mapped(*arguments)))


def shown(found: Cell) -> str:
    return f"{number(found.warm)} ({number(found.first)})"


def table(names: list[str], cells: dict[tuple[str, int], Cell]) -> list[str]:
    last = SIZES[-1]
    programs = load().PROGRAMS
    rows = [
        [
            f"{programs[name].kind}: {name}",
            *(shown(cells[name, n]) for n in SIZES),
            number(cells[name, last].by_hand),
            number(cells[name, last].by_jax),
        ]
        for name in names
    ]
    each = [[cells[name, n].warm for name in names] for n in SIZES]
    rows.append(
        ["geometric mean", *(number(statistics.geometric_mean(column)) for column in each), "", ""]
    )
    titles = ["program", *(f"{n} examples" for n in SIZES), "to by hand", "to JAX"]
    return lined(titles, rows)


def section(rounds: int, device: torch.device, path: Path | None) -> list[str]:
    if device.type != "cpu":
        return ["", "## Examples that part, against the loop", "", "Only on the CPU."]
    names = [*load().PROGRAMS]
    cells = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before, forall.config.replay = forall.config.replay, True
        try:
            for name in names:
                for size in SIZES:
                    cells[name, size] = cell(name, size, min(rounds, ROUNDS))
                print(name, *(shown(cells[name, n]) for n in SIZES), flush=True)
        finally:
            forall.config.replay = before
    drawn = path and draw(names, cells, path)
    return [
        "",
        "## Examples that part, against the loop",
        "",
        "Forty programs in plain Python: the time of `vmap(f)` divided by that of the loop over",
        f"examples whose results are stacked. In parentheses a first call, divided by {ALLOWED:g}",
        f"times the loop and {1000 * SLACK:g} ms. The last columns: `vmap(f)` with {SIZES[-1]}",
        "examples against a program by hand and `jax.jit(jax.vmap(f))`, where these are written.",
        "",
        *table(names, cells),
        *([drawn] if drawn else []),
    ]


def draw(names: list[str], cells: dict[tuple[str, int], Cell], path: Path) -> str:
    """Draw the means of each kind over the number of examples."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return ""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(load().PROGRAMS[name].kind, []).append(name)
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for kind, members in kinds.items():
        means = [statistics.geometric_mean(cells[m, n].warm for m in members) for n in SIZES]
        axes.plot(SIZES, means, marker="o", label=kind)
    axes.axhline(1, color="black", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(SIZES, [f"{n}" for n in SIZES])
    axes.set_xlabel("examples")
    axes.set_ylabel("time of vmap / time of the loop")
    axes.grid(linewidth=0.5, alpha=0.6)
    figure.legend(loc="outside right center")
    figure.savefig(path, dpi=120)
    return f"\n![Time of vmap over time of the loop, by kind of program]({path.name})"
