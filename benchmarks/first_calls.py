"""What first calls cost: of a program that `forall.jit` records, and of one that replay may record.

Each round makes every program anew, so that nothing of it was seen before; the process is warm.
"""

import contextlib
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

import forall
from forall._auto_replay.policy import AutoReplayCache
from forall._jit import deadline
from measure import Built, repetitions_for, seconds, settled, synchroniser
from registry import FALLBACKS, Contestants, Program
from report import lined, mean, number

ROUNDS = 11
TRIES = 3  # a first call may only set up what the function keeps
CALLS = 24  # in which replay records: some before it is looked at, some seen, the rest in parts
LIMIT = 1.3  # of a call that may be recorded later, against one that may not
PER_CALL, PER_OPERATOR = 5, 1e-3  # what recording may cost: calls of torch.func, seconds


class Round(NamedTuple):
    """Seconds of one round."""

    theirs: float  # a warm call of torch.func
    recorded: float  # the calls of a fresh `jit` until it has a program
    eager: float  # two first calls
    watched: float  # two first calls with `forall.config.replay` on
    warm: float  # a later call
    kept: float  # the calls in which replay records, all together
    longest: float  # the longest of them


class Row(NamedTuple):
    """One workload, as ratios."""

    name: str
    operators: int
    tries: int
    to_theirs: float
    to_allowed: float
    watched: float
    kept: float
    longest: float


class Clock:
    """Times single calls, and torch.func's several at a time."""

    def __init__(self, contestants: Contestants, device: torch.device, target: float) -> None:
        self.synchronise = synchroniser(device)
        self.ours, self.theirs, _ = contestants.programs
        self.replayed = contestants.replayed
        self.made, self.jit = contestants.anew, contestants.jit
        self.often = repetitions_for(self.theirs, target, self.synchronise)

    def once(self, program: Program) -> float:
        return seconds(program, 1, self.synchronise)

    def round(self) -> Round:
        theirs = seconds(self.theirs, self.often, self.synchronise) / self.often
        recorded = until_recorded(self.jit(self.made(forall)), self.once)
        self.first(replayed=False)  # meets the caches that recording left
        first = {False: 0.0, True: 0.0}
        for on in (False, True, True, False):
            first[on] += self.first(replayed=on)
        warm = self.once(self.ours)
        kept = [] if self.replayed is None else self.recording()
        longest = max(kept, default=math.nan)
        total = sum(kept) or math.nan
        return Round(theirs, sum(recorded), first[False], first[True], warm, total, longest)

    def first(self, *, replayed: bool) -> float:
        program = self.made(forall)  # with replay off, so that its calls are counted anew
        with replay(replayed, forall.config.patience):
            return self.once(program)

    def recording(self) -> list[float]:
        """The calls in which something is recorded for replay, of those until all is."""
        program, found = self.made(forall), []
        with replay(True, 0), noted() as notes:
            for _ in range(CALLS):
                before = len(notes)
                elapsed = self.once(program)
                if len(notes) > before:
                    found.append(elapsed)
        return found


def until_recorded(jitted: Any, once: Any) -> list[float]:
    """The times of its calls until it has a program."""
    elapsed = []
    while not jitted.cache_info().currsize and len(elapsed) < TRIES:
        elapsed.append(once(jitted))
    return elapsed


@contextlib.contextmanager
def replay(on: bool, patience: float) -> Iterator[None]:
    given = forall.config
    before = given.replay, given.patience
    given.replay, given.patience = on, patience
    try:
        yield
    finally:
        given.replay, given.patience = before


@contextlib.contextmanager
def noted() -> Iterator[list]:
    """A note for each time that replay records, or goes on with what was recorded."""
    notes: list = []
    names = "_try_recording", "take_one_step"
    originals = {name: getattr(AutoReplayCache, name) for name in names}

    def noting(original: Any) -> Any:
        def run(self: AutoReplayCache, *args: Any) -> Any:
            notes.append(self)
            return original(self, *args)

        return run

    try:
        for name, original in originals.items():
            setattr(AutoReplayCache, name, noting(original))
        yield notes
    finally:
        for name, original in originals.items():
            setattr(AutoReplayCache, name, original)


def measured(name: str, contestants: Contestants, rounds: int, device: torch.device) -> Row:
    clock = Clock(contestants, device, 0.005)
    jitted = contestants.jit(contestants.anew(forall))
    tries = len(until_recorded(jitted, clock.once))
    operators = sum(kind.operators for kind in jitted.kinds())
    with settled():
        samples = [clock.round() for _ in range(rounds + 1)][1:]

    def median(ratio: Any) -> float:
        return statistics.median(map(ratio, samples))

    return Row(
        name,
        operators,
        tries,
        median(lambda s: s.recorded / s.theirs),
        median(lambda s: s.recorded / (PER_CALL * s.theirs + PER_OPERATOR * operators)),
        median(lambda s: s.watched / s.eager),
        median(lambda s: s.kept / s.warm),
        median(
            lambda s: s.longest / (deadline.EAGER_CALLS_ALLOWED * s.warm + deadline.SECONDS_ALLOWED)
        ),
    )


def cells(row: Row) -> list[str]:
    within = "yes" if row.to_allowed <= 1 else "**no**"
    ratios = [row.to_theirs, row.to_allowed, row.watched, row.kept, row.longest]
    return [row.name, f"{row.operators}", f"{row.tries}", *map(number, ratios), within]


def summed(name: str, rows: Sequence[Row]) -> list[str]:
    """Several rows as one: geometric means, and how many are within."""
    ratios = [mean(row[i] for row in rows) for i in range(3, 8)]
    within = sum(row.to_allowed <= 1 for row in rows)
    most = max(row.tries for row in rows)
    return [name, "-", f"at most {most}", *ratios, f"{within} of {len(rows)}"]


def table(rows: Sequence[Row]) -> list[str]:
    """Of the many rows that torch.func maps by a loop those alone that are not within."""
    titles = [
        "workload",
        "operators",
        "calls until recorded",
        "jit's first call / torch.func",
        "jit's first call / allowed (<= 1)",
        f"replay on: first call / off (<= {LIMIT})",
        "replay on: all calls that record / eager call",
        "replay on: the longest of them / allowed (<= 1)",
        "within",
    ]
    loops = [row for row in rows if row.name.startswith(FALLBACKS)]
    shown = [row for row in rows if row not in loops or row.to_allowed > 1 or row.watched > LIMIT]
    lines = [*map(cells, shown)]
    if loops:
        lines.append(summed(f"all {len(loops)} rows `{FALLBACKS}*`, geometric means", loops))
    lines.append(summed(f"all {len(rows)} rows, geometric means", rows))
    return lined(titles, lines, said=1)


def section(built: Built, rounds: int, device: torch.device) -> list[str]:
    rows = []
    for workload, contestants in built:
        timed = workload.quantity == "time" and contestants.transformed is not None
        if timed and contestants.jitted is not None:
            rows.append(measured(workload.name, contestants, min(rounds, ROUNDS), device))
            print(lined(cells(rows[-1]), [])[0], flush=True)
    if not rows:
        return []
    return [
        "",
        "## First calls",
        "",
        "A first call of `forall.jit` records, cleans and compiles; it is divided by a warm call",
        f"of torch.func. Allowed are {PER_CALL} calls of torch.func and {1e3 * PER_OPERATOR:g} ms",
        "for each operator of the program. With `forall.config.replay` on, a first call is only",
        "timed, and later ones record: both are divided by calls with replay off. The longest of",
        (
            f"these may take {deadline.EAGER_CALLS_ALLOWED:g} calls as they are and "
            f"{1e3 * deadline.SECONDS_ALLOWED:g} ms."
        ),
        "",
        *table(rows),
    ]
