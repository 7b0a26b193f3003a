"""One entry under the words, in an engine and in the plain truth: the verdicts."""

from __future__ import annotations

import random
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from oracle import difference

from .cases import Case, cases_of
from .engines import Engine, worst
from .entries import (
    EXAMPLES,
    NO_FORWARD_MODE,
    STORAGE,
    UNINITIALISED,
    Sample,
    samples_of,
    takes_any_value,
)
from .plain import Plain
from .words import ALONE, DERIVATIVES, WORDS, Task, in_double, slopes_of, truth_of

# From best to worst; an entry is as good as its worst case.
STATUSES = ("no truth", "equal", "loops", "error", "wrong", "timeout", "crash")
PLACES = 2  # how many placements of a sample a word other than vmap is tried at


@dataclass
class Verdict:
    """How an engine does under one word; the cases without a truth are not the engine's."""

    name: str
    dtype: str
    word: str
    engine: str
    status: str = "no truth"
    way: str = ""
    cases: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)  # status -> its first case, described
    empty: int = 0  # how many of the errors and wrong cases are cases without examples
    rounded: int = 0  # how many are equal up to rounding, but not to assert_close's defaults
    seconds: float = 0.0
    counts: Counter = field(default_factory=Counter, repr=False)
    ways: set[str] = field(default_factory=set, repr=False)

    def add(self, case: Case | None, status: str, text: str) -> None:
        self.counts[status] += 1
        self.empty += case is not None and case.size == 0 and status in ("error", "wrong")
        if status != "equal":
            self.first.setdefault(status, f"{case}: {text}" if case else text)

    def done(self) -> Verdict:
        if self.counts["error"]:
            self.ways.add("error")
        self.cases = dict(self.counts)
        self.way = worst(self.ways)
        self.status = max(self.counts, key=STATUSES.index, default="no truth")
        self.seconds = round(self.seconds, 3)
        return self

    def as_dict(self) -> dict[str, Any]:
        return {k: v for k, v in asdict(self).items() if k not in ("counts", "ways")}


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


class Entry:
    """An entry with its samples, looked at once for all words and engines."""

    def __init__(
        self,
        name: str,
        op: Any,
        dtype: torch.dtype,
        samples: int = 6,
        seed: int = 0,
        device: torch.device | None = None,
    ):
        self.name, self.op, self.dtype = name, op, str(dtype).removeprefix("torch.")
        self.why = ""
        try:
            chosen = samples_of(op, dtype, samples, seed)
        except Exception as error:
            chosen, self.why = [], f"no samples: {brief(error)}"
        if device is not None:
            chosen = [s.on(device) for s in chosen]
        natures = [(s, nature_of(s)) for s in chosen]
        self.samples = [(turn, s, n) for turn, (s, n) in enumerate(natures) if n]
        self._slopes: dict[int, Any] = {}

    def tasks(self, word: str) -> list[Task]:
        found = [t for turn, s, n in self.samples for t in self._tasks_of(word, turn, s, n)]
        # Size 0 comes last: where it is the only one to fail, the first failure said so.
        return sorted(found, key=lambda t: t.case.size == 0)

    def _tasks_of(self, word: str, turn: int, sample: Sample, nature: _Nature) -> Iterator[Task]:
        slopes = self._slopes_of(sample, nature.writes) if word in DERIVATIVES else None
        if word in DERIVATIVES and slopes is None:
            return
        if word == "vjp∘vmap" and self.op.name in STORAGE:
            return  # torch's backward reads the storage of a cotangent, here that of all examples
        options = {"randomness": "different"} if nature.draws and word not in ALONE else {}
        every = list(cases_of(sample, turn, self.op.name in STORAGE, takes_any_value(self.op)))
        for case in self._drawn(word, every, sample):
            outer = self._outer(case, every) if word == "vmap∘vmap" else ()
            if word not in DERIVATIVES and not _apart(nature.writes, case.in_dims, outer):
                continue  # else the examples would write over each other
            yield Task(case, slopes, nature.writes, options, outer)

    def _slopes_of(self, sample: Sample, writes: set[int]) -> Any:
        if id(sample) not in self._slopes:
            self._slopes[id(sample)] = slopes_of(sample, writes)
        return self._slopes[id(sample)]

    def _drawn(self, word: str, every: list[Case], sample: Sample) -> list[Case]:
        """All placements under vmap, some under each other word, others for each sample."""
        if word == "vmap":
            return every
        own = [c for c in every if c.sample is sample]
        sized = [c for c in own if c.size != EXAMPLES]
        placed = [c for c in own if c.size == EXAMPLES]
        if word in ALONE:
            return placed[:1]
        draw = random.Random(f"{self.name} {sample.number} {word}")
        return draw.sample(placed, min(PLACES, len(placed))) + sized

    def _outer(self, case: Case, every: list[Case]) -> tuple:
        others = [c.in_dims for c in every if c.sample is case.sample]
        return others[(others.index(case.in_dims) + 1) % len(others)]

    def judge(self, word: str, engines: list[Engine], tell: Any = None) -> list[Verdict]:
        verdicts = {e.name: Verdict(self.name, self.dtype, word, e.name) for e in engines}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tasks = self.tasks(word)
            for task in tasks:
                self._judge(word, task, engines, verdicts, tell or (lambda *_: None))
        for v in verdicts.values():
            if not tasks:
                v.first["no truth"] = self.why or "torch takes no derivative of it, or no call runs"
        return [v.done() for v in verdicts.values()]

    def _judge(self, word: str, task: Task, engines: list, verdicts: dict, tell: Any) -> None:
        name = self.op.name
        try:
            truth = truth_of(word, Plain(name in STORAGE, name in NO_FORWARD_MODE), task)
        except Exception as error:
            for v in verdicts.values():
                v.add(task.case, "no truth", f"without transforms: {brief(error)}")
            return
        draws = bool(task.options) or (word in ALONE and self._draws(task))
        values = not draws and name not in UNINITIALISED
        for engine in engines:
            verdict = verdicts[engine.name]
            tell(word, engine.name, str(task.case))
            started = time.perf_counter()
            status, text = _run(engine, word, task, truth, values, verdict)
            verdict.seconds += time.perf_counter() - started
            verdict.add(task.case, status, text)

    def _draws(self, task: Task) -> bool:
        return any(n.draws for _, s, n in self.samples if s is task.case.sample)


def _apart(writes: set[int], *dims: tuple) -> bool:
    """Whether every level maps all that is written into."""
    return all(writes <= {j for j, d in enumerate(ds) if d is not None} for ds in dims if ds)


def nature_of(sample: Sample) -> _Nature | None:
    args = [x.clone() for x in sample.leaves[0]]
    before = [x.clone() for x in args]
    versions = [x._version for x in args]
    try:
        with warnings.catch_warnings(), _Watch() as watch:
            warnings.simplefilter("ignore")
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


def _run(
    engine: Engine, word: str, task: Task, truth: Any, values: bool, verdict: Verdict
) -> tuple[str, str]:
    """The status of one case and the words that go with it."""
    try:
        result, found = engine.ways(lambda: WORDS[word](engine, task))
    except Exception as error:
        return "error", brief(error)
    verdict.ways |= found
    try:
        wrong = difference(result, truth, values, task.case.sample.working)
        close = not values or _close(result, truth)
    except Exception as error:
        return "wrong", f"value: a result that cannot be compared, {brief(error)}"
    if wrong and not (close and ("value: " in wrong)):
        if _depends_on_strides(word, task, truth):
            return "no truth", "a plain call gives a view another value than a copy of it"
        if not _as_exact(word, task, result, truth):
            return "wrong", wrong
    verdict.rounded += not close
    return ("loops" if "loop" in found else "equal"), ""


def _depends_on_strides(word: str, task: Task, truth: Any) -> bool:
    """Whether torch itself is wrong about views, as where a kernel takes a weight for dense."""
    again = truth_of(word, Plain(own_storage=True), task)
    return difference(again, truth, True, task.case.sample.working) is not None


def _as_exact(word: str, task: Task, result: Any, truth: Any) -> bool:
    """Whether it is as near as the truth is to what double precision gives for these numbers.

    Where terms cancel, what is left is the rounding of one order of summation or the other.
    """
    dtypes = {
        x.dtype for x in task.case.sample.leaves[0] if x.is_floating_point() or x.is_complex()
    }
    if len(dtypes) != 1:
        return False
    try:
        exact = truth_of(word, Plain(), in_double(task, dtypes.pop()))
    except Exception:
        return False
    pairs = zip(tree_leaves(result), tree_leaves(truth), tree_leaves(exact), strict=True)
    return all(_nearly(*(t.detach() for t in ts)) for ts in pairs if isinstance(ts[1], Tensor))


def _nearly(mine: Tensor, theirs: Tensor, exact: Tensor) -> bool:
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype or mine.shape != exact.shape:
        return False
    if not mine.numel() or exact.dtype == mine.dtype:
        return bool(torch.equal(mine, theirs))
    wide = exact.dtype
    ours, loops = (mine.to(wide) - exact).abs(), (theirs.to(wide) - exact).abs()
    room = torch.finfo(mine.dtype).eps * exact.abs().max()
    return bool((ours <= 2 * loops.max() + 4 * room).all())


def _close(result: Any, truth: Any) -> bool:
    """Whether torch's own defaults take the one for the other."""
    mine, theirs = tree_leaves(result), tree_leaves(truth)
    try:
        for x, y in zip(mine, theirs, strict=True):
            if isinstance(y, Tensor):
                torch.testing.assert_close(x.detach(), y.detach(), equal_nan=True)
            elif repr(x) != repr(y):
                return False
    except (AssertionError, ValueError):
        return False
    return True


_HERE = f"{Path(__file__).resolve().parents[2]}/"  # where on this machine is nobody's concern


def brief(error: Exception) -> str:
    text = " ".join(str(error).replace(_HERE, "").split())
    return f"{type(error).__name__}: {text[:300]}"
