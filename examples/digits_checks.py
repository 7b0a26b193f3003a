"""Comparisons of forall with the plain loop: of the numbers, and of the time taken.

This is the one place that imports torch.func, and only to time it beside forall: `Comparison`
runs the same code with either library, handed over as a module.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.func
from torch import Tensor
from tqdm import tqdm

import forall

FLOAT32_TOLERANCE = 1e-4
FLOAT64_TOLERANCE = 1e-9


class WrongNumberError(Exception):
    """A number disagrees with the plain loop, or misses its target."""


def require(condition: bool, message: str) -> None:
    """End the program with `message` unless `condition` holds."""
    if not condition:
        raise WrongNumberError(message)


def progress(steps: Iterable, label: str) -> tqdm:
    """A progress bar over `steps`, drawn on standard error."""
    return tqdm(steps, desc=f"  {label}", ncols=88, leave=False)


def relative_error(what: str, actual: Tensor, expected: Tensor) -> float:
    """The largest absolute difference, relative to the largest expected magnitude."""
    require(
        actual.shape == expected.shape and actual.dtype == expected.dtype,
        f"{what}: {tuple(actual.shape)} of {actual.dtype}, where the reference is "
        f"{tuple(expected.shape)} of {expected.dtype}",
    )
    actual, expected = actual.detach(), expected.detach()
    scale = expected.abs().max().clamp_min(torch.finfo(expected.dtype).tiny)
    return ((actual - expected).abs().max() / scale).item()


def check_close(what: str, actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Check a tensor against its reference, and print the error."""
    check_all_close(what, {what: actual}, {what: expected}, tolerance)


def check_all_close(
    what: str, actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float
) -> None:
    """Check each of several tensors against its own reference, and print the worst error."""
    require(actual.keys() == expected.keys(), f"{what}: {sorted(actual)} != {sorted(expected)}")
    errors = [relative_error(f"{what}, {name}", actual[name], expected[name]) for name in expected]
    # `all <=` rather than `not any >`, so that a NaN fails too.
    require(
        all(error <= tolerance for error in errors),
        f"{what}: relative error {max(errors):.1e} exceeds the tolerance {tolerance:.0e}",
    )
    print(f"  ok  {what:<62} {max(errors):.1e} <= {tolerance:.0e}")


@dataclass(frozen=True)
class Comparison:
    """Seconds per round of the same work done by the loop, by torch.func and by forall."""

    work: str
    seconds: dict[str, list[float]]

    def median(self, contender: str) -> float:
        """The median time of one contender, in seconds."""
        return statistics.median(self.seconds[contender])

    def ratio(self, numerator: str, denominator: str) -> float:
        """The median over rounds of the quotient of two times taken in the same round.

        A quotient within a round suffers less from a machine whose speed drifts than a quotient
        of two medians does.
        """
        pairs = zip(self.seconds[numerator], self.seconds[denominator], strict=True)
        return statistics.median(first / second for first, second in pairs)


def compare_times(
    work: str,
    loop: Callable[[], object],
    transformed: Callable[[ModuleType], Callable[[], object]],
    rounds: int,
) -> Comparison:
    """Time the loop against `transformed(torch.func)` and `transformed(forall)`.

    Each contender runs twice beforehand, unmeasured. The rounds are interleaved, and the order
    rotates from round to round, so that no contender always runs in another's wake.
    """
    contenders = {
        "loop": loop,
        "torch.func": transformed(torch.func),
        "forall": transformed(forall),
    }
    for contender in contenders.values():
        contender()
        contender()
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for round_number in progress(range(rounds), f"timing: {work}"):
        shift = round_number % len(names)
        for name in names[shift:] + names[:shift]:
            start = time.perf_counter()
            contenders[name]()
            seconds[name].append(time.perf_counter() - start)
    return Comparison(work, seconds)
