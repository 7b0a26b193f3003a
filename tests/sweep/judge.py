"""One entry through the engine and through the loop: the verdict."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from oracle import difference, empty_truth, loop

from .cases import Case, cases_of
from .engines import Engine, worst
from .entries import EXAMPLES, STORAGE, UNINITIALISED, Sample, samples_of, takes_any_value

# From best to worst; an entry is as good as its worst case.
STATUSES = ("no case", "equal", "loops", "error", "wrong", "timeout", "crash")


@dataclass
class Verdict:
    name: str
    dtype: str
    status: str = "no case"
    way: str = ""
    cases: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)  # status -> its first case, described
    empty: int = 0  # how many of the errors and wrong cases are cases without examples
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class _Watch(TorchDispatchMode):
    """Notes whether anything that draws random numbers was called."""

    draws = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.draws |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


@dataclass
class _Nature:
    """What a plain call of a sample shows about it."""

    draws: bool
    writes: set[int]  # the tensor arguments that it writes into


def judge(
    engine: Engine, name: str, op: Any, dtype: torch.dtype, samples: int = 4, seed: int = 0
) -> Verdict:
    verdict = Verdict(name, str(dtype).removeprefix("torch."))
    started = time.perf_counter()
    counts: Counter[str] = Counter()
    ways: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case, status, text in _outcomes(engine, op, dtype, samples, seed, ways):
            counts[status] += 1
            verdict.empty += case is not None and case.size == 0 and status in ("error", "wrong")
            if status != "equal":
                verdict.first.setdefault(status, f"{case}: {text}" if case else text)
    if counts["error"]:
        ways.add("error")
    verdict.cases = dict(counts)
    verdict.way = worst(ways)
    verdict.status = max((s for s in counts if counts[s]), key=STATUSES.index, default="no case")
    verdict.seconds = round(time.perf_counter() - started, 2)
    return verdict


def _outcomes(engine, op, dtype, samples, seed, ways):
    try:
        chosen = samples_of(op, dtype, samples, seed)
    except Exception as error:
        yield None, "no case", f"no samples: {_brief(error)}"
        return
    found = []
    for turn, sample in enumerate(chosen):
        nature = _nature(sample)
        if nature:
            cases = cases_of(sample, turn, op.name in STORAGE, takes_any_value(op))
            found += [(case, nature) for case in cases]
    # Size 0 comes last: where it is the only one to fail, the first failure said so.
    for case, nature in sorted(found, key=lambda pair: pair[0].size == 0):
        mapped = {j for j, d in enumerate(case.in_dims) if d is not None}
        if nature.writes <= mapped:  # else the examples would write over each other
            yield case, *_run(engine, op.name, case, nature.draws, ways)


def _nature(sample: Sample) -> _Nature | None:
    args = [x.clone() for x in sample.leaves[0]]
    before = [x.clone() for x in args]
    versions = [x._version for x in args]
    try:
        with _Watch() as watch:
            sample.call(*args)
        # Not everything that writes says so (batch_norm's running statistics), so look as well.
        writes = {
            j
            for j, x in enumerate(args)
            if x._version != versions[j] or difference(x, before[j]) is not None
        }
    except Exception:
        return None
    return _Nature(watch.draws, writes)


def _run(engine: Engine, name: str, case: Case, draws: bool, ways: set[str]) -> tuple[str, str]:
    """The status of one case and the words that go with it."""
    try:
        truth = _truth(case, own_storage=name in STORAGE)
    except Exception as error:
        return "no case", f"the loop raises {_brief(error)}"
    args = case.args()
    options = {"randomness": "different"} if draws else {}

    def mapped() -> Any:
        return engine.vmap(case.call, in_dims=case.in_dims, **options)(*args)

    try:
        result, found = engine.ways(mapped)
    except Exception as error:
        return "error", _brief(error)
    ways |= found
    wrong = _compare((result, args), truth, not draws and name not in UNINITIALISED, case)
    if wrong:
        return "wrong", wrong
    return ("loops" if "loop" in found else "equal"), ""


def _compare(mine: tuple, truth: tuple, values: bool, case: Case) -> str | None:
    try:
        wrong = difference(mine[0], truth[0], values, case.sample.working)
        left = difference(mine[1], truth[1], values, case.sample.working)
    except Exception as error:
        return f"value: a result that cannot be compared, {_brief(error)}"
    return wrong or (f"in the arguments afterwards, {left}" if left else None)


def _truth(case: Case, own_storage: bool) -> tuple[Any, tuple[Tensor, ...]]:
    """What the loop gives, and what it leaves in its arguments."""
    # No examples: as many as usual are run and cut off, so that shapes that depend on values,
    # which have no one truth, show.
    args = case.args(case.size or EXAMPLES)
    result = loop(case.call, case.in_dims, own_storage=own_storage)(*args)
    return (result, args) if case.size else (empty_truth(result), case.args())


def _brief(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"
