"""Programs of other libraries, run with torch.func and with forall in its place.

Each is a file ``of_NAME.py``. Its ``make()`` returns a function without arguments, which gives
the same tensors with each call. Where torch.func cannot run that, ``WHY_LOOP`` says why, and the
function of ``make_loop()``, which computes the same by a loop, is compared with in its place.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

import forall
from forall._api.torch_func_patch import OURS

HERE = Path(__file__).parent
# The name that pip knows each library by, where it is another.
DISTRIBUTIONS = {
    "curvlinops": "curvlinops-for-pytorch",
    "laplace": "laplace-torch",
}
NAMES = sorted(path.stem.removeprefix("of_") for path in HERE.glob("of_*.py"))
SECONDS, ROUNDS = 0.03, 11  # that a round takes of each at least, and how many there are
WARM, LONGEST = 100, 5.0  # calls before these, and seconds that they may take

Run = Callable[[], Any]


@dataclass
class Found:
    """What came of one library."""

    what: str  # of its docstring
    transforms: list[str]  # that were called
    why_loop: str  # is compared with, and not torch.func
    difference: float  # the largest one, in units of the largest entry
    theirs: float  # seconds of a processor
    ours: float


def load(name: str) -> Any:
    """The file of a library, as a module."""
    spec = importlib.util.spec_from_file_location(f"of_{name}", HERE / f"of_{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_both(module: Any) -> tuple[Run, Run, list[str]]:
    """Their program and ours, made alike; which transforms ours calls."""
    torch.manual_seed(0)
    theirs = module.make_loop() if hasattr(module, "make_loop") else module.make()
    with forall.installed():
        with transforms_called() as called:
            module.make()()
        torch.manual_seed(0)
        ours = module.make()
    return theirs, ours, sorted(called)


@contextlib.contextmanager
def transforms_called() -> Iterator[set[str]]:
    """The names of forall's transforms that are called in a block."""
    codes = {inspect.unwrap(ours).__code__: ours.__name__ for ours in OURS}
    called = set()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in codes:
            called.add(codes[frame.f_code])

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield called
    finally:
        sys.setprofile(before)


def run_ours(ours: Run) -> Any:
    with forall.installed():
        return ours()


def difference(ours: Any, theirs: Any) -> float:
    """The largest difference, in units of the largest entry; raises where it is not rounding."""
    found, spec = pytree.tree_flatten(ours)
    expected, other = pytree.tree_flatten(theirs)
    assert spec == other, "results have other trees"
    largest = 0.0
    for a, b in zip(map(_tensor, found), map(_tensor, expected), strict=True):
        torch.testing.assert_close(a, b)
        if a.numel() and a.dtype.is_floating_point:
            scale = b.abs().max().item()
            largest = max(largest, (a - b).abs().max().item() / scale if scale else 0.0)
    return largest


def _tensor(value: Any) -> torch.Tensor:
    value = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
    return value.detach()


def compare(name: str) -> Found:
    """Both results, and how long both take: medians of rounds that alternate."""
    module = load(name)
    theirs, ours, called = make_both(module)
    assert called, f"{name}: no transform is called"
    expected = theirs()
    largest = difference(run_ours(ours), expected)
    calls = max(1, round(SECONDS / _time(theirs, 3)))
    with forall.installed():
        start, warm = time.process_time(), 0
        while warm < WARM and time.process_time() - start < LONGEST:
            ours()  # what can be replayed is, from now on
            warm += 1
    times = []
    for _ in range(ROUNDS):
        before = _time(theirs, calls)
        with forall.installed():
            times.append((before, _time(ours, calls)))
    largest = max(largest, difference(run_ours(ours), expected))
    what = (module.__doc__ or "").splitlines()[0].partition(": ")[2]
    why_loop = getattr(module, "WHY_LOOP", "")
    return Found(what, called, why_loop, largest, *map(median, zip(*times, strict=True)))


def _time(run: Run, calls: int) -> float:
    start = time.process_time()  # other processes may be at work
    for _ in range(calls):
        run()
    return (time.process_time() - start) / calls
