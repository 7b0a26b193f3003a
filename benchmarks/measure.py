"""Measuring the contestants of one workload side by side."""

import contextlib
import ctypes
import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from memory import peak_bytes
from registry import MORE, Contestants, Program, Workload, with_jit, with_replay

# The allocator's figures hardly vary: a few rounds show whether they do.
MEMORY_ROUNDS = 3


Built = Sequence[tuple[Workload, Contestants]]


class Disagreement(Exception):
    """A contestant failed, or computed other values than the hand-written program."""


def keep_memory() -> None:
    """Let the C library keep what is freed, where it can be told so.

    Otherwise it hands large blocks back to the system whenever they come to lie last on its heap,
    and takes them anew, page by page: that doubles the time of whichever contestant it befalls.
    """
    trim_threshold, mmap_max = -1, -4
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(trim_threshold, 1 << 30)
        library.mallopt(mmap_max, 0)


def synchroniser(device: torch.device) -> Callable[[], None]:
    """What has to be called before reading the clock: kernels on a GPU run asynchronously."""
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None


def check(workload: Workload, contestants: Contestants) -> None:
    """Compare every contestant with the hand-written program.

    Each is called twice, since a library may take another path once it has seen a program.
    """
    expected = contestants.programs[-1]()
    for name, (program, _) in zip((*workload.names, *MORE), contestants.all, strict=True):
        if program is None:
            continue
        for call in ("first", "second"):
            try:
                contestants.check(program(), expected)
            except Exception as error:
                message = f"{name}, {call} call: {type(error).__name__}: {error}"
                raise Disagreement(message) from error


def make(workload: Workload, device: torch.device) -> Contestants:
    """The contestants of one workload; they agree."""
    torch.manual_seed(0)
    contestants = with_replay(with_jit(workload.build(device)))
    check(workload, contestants)
    return contestants


def seconds(program: Program, repetitions: int, synchronise: Callable[[], None]) -> float:
    """Wall-clock time of `repetitions` calls, without garbage collections in between."""
    gc.collect()
    gc.disable()
    try:
        synchronise()
        start = time.perf_counter()
        for _ in range(repetitions):
            program()
        synchronise()
        return time.perf_counter() - start
    finally:
        gc.enable()


def repetitions_for(program: Program, target: float, synchronise: Callable[[], None]) -> int:
    """How many calls make one sample last about `target` seconds; warms the program up too."""
    repetitions = 1
    while True:
        elapsed = seconds(program, repetitions, synchronise)
        if elapsed >= target / 4:
            break
        repetitions *= 2
    # The last measurement is a warm one; a first slow call must not leave a sample too short.
    warm = seconds(program, repetitions, synchronise) / repetitions
    return max(1, math.ceil(target / warm))


def time_programs(
    programs: Sequence[Program | None], rounds: int, target: float, device: torch.device
) -> list[tuple[float, ...]]:
    """Seconds per call of each program, one tuple per round; nan where there is none.

    All programs run in every round, so that a slow phase of the machine meets all of them; the
    order rotates, so that none always inherits the caches of the same predecessor.
    """
    synchronise = synchroniser(device)
    repetitions = [p and repetitions_for(p, target, synchronise) for p in programs]
    measured = []
    with settled():
        for turn in range(rounds):
            sample = [math.nan] * len(programs)
            for step in range(len(programs)):
                which = (turn + step) % len(programs)
                program, count = programs[which], repetitions[which]
                if program is not None and count is not None:
                    sample[which] = seconds(program, count, synchronise) / count
            measured.append(tuple(sample))
    return measured


@contextlib.contextmanager
def settled() -> Iterator[None]:
    """What exists by now stays out of the collections before every sample, keeping them short."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def time_rounds(
    contestants: Contestants, rounds: int, target: float, device: torch.device
) -> list[tuple[float, ...]]:
    """Seconds per call of each contestant, for all of its examples."""
    programs = [program for program, _ in contestants.all]
    factors = [factor for _, factor in contestants.all]
    return [
        tuple(t * factor for t, factor in zip(sample, factors, strict=True))
        for sample in time_programs(programs, rounds, target, device)
    ]


def memory_rounds(
    contestants: Contestants, rounds: int, device: torch.device
) -> list[tuple[float, ...]]:
    """Peak bytes of each contestant, one tuple per round."""
    programs = [program for program, _ in contestants.all]
    for program in filter(None, programs):
        program()
    return [
        tuple(float(peak_bytes(p, device)) if p else math.nan for p in programs)
        for _ in range(rounds)
    ]


def measure(
    workload: Workload,
    contestants: Contestants,
    rounds: int,
    target: float,
    device: torch.device,
) -> list[tuple[float, ...]]:
    if workload.quantity == "peak memory":
        return memory_rounds(contestants, min(rounds, MEMORY_ROUNDS), device)
    return time_rounds(contestants, rounds, target, device)
