"""Random programs in random histories of calls: as they are, by jit, and replayed, all at once.

Between two calls anything may change: shapes, dtypes, layouts, who requires grad, which arguments
are one tensor, what is captured and how, the modes of torch. Each call has to be the function's:
results, derivatives, what is left in the arguments and in what is captured, the draws.
`FORALL_PROGRAMS` and `FORALL_SEED` as for the other random programs.
"""

from __future__ import annotations

import functools
import operator
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from types import CellType, FunctionType
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import forall
from draws import get_default_generator, make_generator
from forall import PerformanceWarning, grad, jacfwd, jit, jvp, vmap
from forall._api.execution.transform_decorator import describe_replay, replay_transform
from forall._auto_replay.replayed_calls import Calls, get_transform_calls
from forall._compat import pytree
from limits import programs as instructions
from limits.programs import NOT_FORWARD, SHAPES, D, Machine, Program
from limits.test_random_programs import many, outcome, programs
from oracle import difference

pick = st.integers(0, 11)
WEIGHT = torch.zeros(2)  # each side has its own
PROGRAM: Any = None  # and here too


@dataclass(frozen=True)
class Kind:
    """Of what a call is made, and under which mode."""

    shape: int
    layout: int
    requires: int
    alias: int
    mode: int
    size: int


# Few kinds, one like the other but for one thing, met again and again, and now and then a change:
# else nothing would be replayed, or nothing mistaken for another.
kind = st.builds(Kind, pick, pick, pick, pick, pick, pick)
one_thing = st.tuples(st.sampled_from([f.name for f in fields(Kind)]), pick)
kinds = st.builds(
    lambda first, others: [first, *(replace(first, **{name: n}) for name, n in others)],
    kind,
    st.lists(one_thing, max_size=2),
)
steps = st.lists(st.tuples(pick, st.integers(0, 79)), min_size=5, max_size=9)


class Home:
    """What a function captures by attributes."""

    def __init__(self) -> None:
        self.w = torch.tensor([0.3, -0.7], dtype=D)
        self.sums = torch.zeros(2, dtype=D)
        self.scale: Any = 2.0
        self.rows = [1.0]
        self.bend = torch.sin
        self.draws = self.adds = False


def made(program: Program, home: Home) -> tuple[FunctionType, dict[str, Any], CellType]:
    """The program as a function that captures in all ways; its globals, a cell of its closure."""
    inner = torch.tensor([0.5, 0.25], dtype=D)

    def f(x: Tensor, v: Tensor) -> list[Tensor]:
        w = home.w * home.scale + home.rows[0] + home.bend(inner) * WEIGHT
        if home.draws:
            w = w + torch.rand(2, dtype=D)
        if home.adds:
            home.sums.add_(v.detach().sum())
        if x.dim() == 2:  # what autocast makes coarser
            w = w + (x @ x.mT).sum()
        return program(x, v, w)

    names = {**globals(), "WEIGHT": torch.tensor([-0.4, 0.9], dtype=D)}
    cells = dict(zip(f.__code__.co_freevars, f.__closure__ or (), strict=True))
    return FunctionType(f.__code__, names, "f", None, f.__closure__), names, cells["inner"]


HELD = "w", "scale", "rows", "bend", "sums", "draws", "adds"


def holding(w, scale, rows, bend, sums, draws, adds, inner):
    """The same, as a function that holds what there is now: one of many, of a call each."""

    def f(x: Tensor, v: Tensor) -> list[Tensor]:
        weight = w * scale + rows[0] + bend(inner) * WEIGHT
        if draws:
            weight = weight + torch.rand(2, dtype=D)
        if adds:
            sums.add_(v.detach().sum())
        if x.dim() == 2:
            weight = weight + (x @ x.mT).sum()
        return PROGRAM(x, v, weight)

    return f


@dataclass
class Captured:
    """All that a function captures, for who changes it."""

    home: Home
    names: dict[str, Any]
    cell: CellType

    def tensors(self) -> list[Tensor]:
        found = self.home.w, self.cell.cell_contents, self.names["WEIGHT"]
        return [*found]


def change(captured: Captured, n: int, i: int) -> None:
    """Nothing, or one of the things that may change between two calls."""
    home, names, cell = captured.home, captured.names, captured.cell
    new = numbers(i, 2)
    changes: list[Callable[[], Any]] = [
        lambda: home.w.detach().copy_(new),
        lambda: setattr(home, "w", new),
        lambda: setattr(home, "w", torch.nn.Parameter(new)),
        lambda: setattr(home, "w", numbers(i, 4)[::2]),
        lambda: setattr(home, "w", new.float()),
        lambda: setattr(home.w, "data", new.to(home.w.dtype)),
        lambda: setattr(home, "scale", [2.0, 2, -0.0, 0.0, True, 3.0][i % 6]),
        lambda: home.rows.__setitem__(0, float(i)),
        lambda: setattr(home, "rows", [float(i)]),
        lambda: setattr(home, "draws", not home.draws),
        lambda: setattr(home, "adds", not home.adds),
        lambda: home.w.requires_grad_() if home.w.is_leaf else None,
        lambda: setattr(home, "bend", [torch.sin, torch.cos, torch.Tensor.tanh][i % 3]),
        lambda: setattr(cell, "cell_contents", new),
        lambda: setattr(cell, "cell_contents", home.w),
        lambda: cell.cell_contents.detach().copy_(new),
        lambda: names.update(WEIGHT=new),
        lambda: names.update(WEIGHT=cell.cell_contents),
        lambda: names["WEIGHT"].detach().copy_(new),
    ]
    if n < len(changes):
        changes[n]()


def numbers(i: int, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=D, generator=make_generator(7 * i + len(shape)))


def laid_out(t: Tensor, layout: int) -> Tensor:
    """The same numbers in another dtype, or elsewhere in memory."""
    layouts: list[Callable[[], Tensor]] = [
        lambda: t.float(),
        lambda: t.mT.contiguous().mT if t.dim() == 2 else t,
        lambda: torch.stack([t, t, t])[1],
        lambda: torch.stack([t, t], -1)[..., 0],
        lambda: t.half(),
        lambda: t.float(),
    ]
    return layouts[layout]() if layout < len(layouts) else t


def arguments(program: Program, kind: Kind, own: list[Tensor], i: int) -> tuple[Tensor, Tensor]:
    shape = SHAPES[kind.shape % len(SHAPES)] if kind.shape < 5 else program.example
    x, v = laid_out(numbers(i, *shape), kind.layout), numbers(i + 5, 2)
    if shape == (2,) and kind.alias < 3:
        x, v = [(x, x), (own[0], v), (x, x.detach())][kind.alias]
    elif kind.alias < 5:
        v = [*own, own[0][:], own[0]][kind.alias]
    elif kind.alias == 5 and shape == (3, 2):
        v = x[1]
    for bit, t in ((1, x), (2, v)):
        if kind.requires & bit and t.is_leaf and all(t is not w for w in own):
            t.requires_grad_()
    return x, v


@contextmanager
def default_dtype(dtype: torch.dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic(*, warn_only: bool):
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def mode(n: int) -> AbstractContextManager[Any]:
    modes: list[Callable[[], AbstractContextManager[Any]]] = [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.autocast("cpu", torch.float16),
        lambda: default_dtype(D),
        lambda: torch.autocast("cpu", torch.bfloat16, enabled=False),
        lambda: deterministic(warn_only=False),
        lambda: deterministic(warn_only=True),
    ]
    return modes[n]() if n < len(modes) else nullcontext()


# --- transforms ---------------------------------------------------------------------------------


def number(f: Callable) -> Callable[[Tensor, Tensor], Tensor]:
    """One number that depends on every result."""
    return lambda x, v: torch.stack([r.sum().sin().to(D) for r in f(x, v)]).sum()


def mapped(f: Callable) -> Callable:
    g = vmap(f, randomness="different")
    return lambda x, v, size: g(*(torch.stack([t, 2 * t, 3 * t][:size]) for t in (x, v)))


def alone(f: Callable) -> Callable:
    return lambda x, v, size: f(x, v)


def pushed(f: Callable) -> Callable:
    return lambda x, v: jvp(f, (x, v), (x.cos() + 0.5, v.cos() + 0.5))


TRANSFORMS: dict[str, Callable[[Callable], Callable]] = {
    "as it is": alone,
    "grad": lambda f: alone(grad(number(f), (0, 1))),
    "vmap": mapped,
    "vmap of grad": lambda f: mapped(grad(number(f), (0, 1))),
    "jvp": lambda f: alone(pushed(f)),
    "vmap of jacfwd": lambda f: mapped(jacfwd(number(f))),
}
FORWARD = ("jvp", "vmap of jacfwd")
VALUES = ("as it is", "vmap")
# In one program of four; replay leaves alone whoever can reach these.
UNRECORDED = (Machine.inner_backward, Machine.optimised)


# --- calls --------------------------------------------------------------------------------------


class Side:
    """The function, or its recorded form, in a home of its own."""

    def __init__(self, program: Program, transform: str, way: Way) -> None:
        self.program = program
        home = Home()
        f, names, cell = made(program, home)
        self.captured = Captured(home, names, cell)
        if way is anew:
            self.f, self.hits = anew(partial(self.made_anew, TRANSFORMS[transform]))
        else:
            self.f, self.hits = way(TRANSFORMS[transform](f))

    def made_anew(self, transform: Callable) -> Callable:
        """The transformed function, of another one that holds what is captured by now."""
        names, inner = self.captured.names, self.captured.cell.cell_contents
        names["PROGRAM"] = self.program
        make = FunctionType(holding.__code__, names)
        home = self.captured.home
        return transform(make(*(getattr(home, name) for name in HELD), inner))

    def call(self, kind: Kind, n: int, i: int) -> tuple[list[Any], list[Any], list[Any]]:
        """What a call gives, what it leaves, and derivatives taken outside."""
        change(self.captured, n, i)
        own = self.captured.tensors()
        x, v = arguments(self.program, kind, own, i)
        get_default_generator().manual_seed(i)  # that of all devices keeps each call
        with mode(kind.mode):
            found = pytree.get_leaves(self.f(x, v, 1 + kind.size % 3))
        seen = [x, v, *own]
        left = [*found, *seen, self.captured.home.sums]
        told = [t.detach().clone() for t in left]
        facts = [(t.requires_grad, t.is_inference(), tuple(t.stride())) for t in left]
        moved = [t for t in found if t.requires_grad and t.is_floating_point()]
        leaves = [*{id(t): t for t in seen if t.requires_grad and t.is_leaf}.values()]
        pulled: list[Any] = []
        if moved and leaves:
            moved = [*{id(t): t for t in moved}.values()]
            pulled = [
                *torch.autograd.grad(
                    moved, leaves, [t.detach().sin() for t in moved], allow_unused=True
                )
            ]
        results, left = told[: len(found)], told[len(found) :]
        return results, [*left, str(facts), get_default_generator().get_state()], pulled


@contextmanager
def replay(*, on: bool):
    before = forall.config.replay, forall.config.patience
    forall.config.replay, forall.config.patience = on, 0
    try:
        yield
    finally:
        forall.config.replay, forall.config.patience = before


def asked(machine: Machine, a: int, b: int, c: int) -> None:
    """What Python is told, and goes by."""
    t, s = machine.pick(a), machine.pick(b)
    tests: list[Callable[[], Tensor]] = [
        lambda: (t > 0).any(),
        lambda: (t.abs() < 2).all(),
        lambda: torch.isfinite(t).all(),
        lambda: t.sum() > s.sum(),
    ]
    if tests[c % len(tests)]():
        machine.push(t * 2)
    else:
        machine.push(s - 1)


@contextmanager
def steps_without(some: Iterable[Callable]):
    """Programs of the other instructions alone, so that nothing leads to these; and of ours."""
    before = instructions.STEPS
    instructions.STEPS = [*(step for step in before if step not in some), asked, asked, asked]
    try:
        yield
    finally:
        instructions.STEPS = before


Way = Callable[[Callable], tuple[Callable, Callable[[], int]]]  # with how many calls were replayed


def plainly(f: Callable) -> tuple[Callable, Callable[[], int]]:
    return f, lambda: 0


def jitted(f: Callable, **how: Any) -> tuple[Callable, Callable[[], int]]:
    g = jit(f, **how)
    return g, lambda: g.cache_info().hits


def compiled(f: Callable) -> tuple[Callable, Callable[[], int]]:
    return jitted(f, backend="inductor")


def replayed(f: Callable) -> tuple[Callable, Callable[[], int]]:
    """A function of which nobody has said that it is pure, recorded as soon as it can be."""
    g = replay_transform(f)(operator.call)
    calls = get_transform_calls(g)
    describe_replay(g)  # which looks at it

    def called(*args: Any) -> Any:
        with replay(on=True):
            return g(*args)

    return called, lambda: calls.replays.hits


def anew(make: Callable[[], Callable]) -> tuple[Callable, Callable[[], int]]:
    """A function that is another with each call, and is recorded for all."""
    seen: dict[int, Calls] = {}

    def called(*args: Any) -> Any:
        with replay(on=True):
            g = replay_transform(make())(operator.call)
            calls = get_transform_calls(g)
            describe_replay(g)  # which looks at it
            seen[id(calls)] = calls
            return g(*args)

    return called, lambda: sum(c.replays.hits for c in seen.values() if c.replays)


def agree(
    program: Program, transform: str, kinds: list[Kind], steps: list, ways: Iterable[Way]
) -> list[Side]:
    """Make the calls of a history as they are, and in other ways; the sides of these."""
    if transform in FORWARD:
        program = program.without(*NOT_FORWARD)
        program = replace(program, instructions=program.instructions[:6])  # they take longest
    history = [(kinds[k % len(kinds)], n) for k, n in steps]
    plain, *sides = (Side(program, transform, way) for way in (plainly, *ways))
    for i, (kind, n) in enumerate(history):
        truth = outcome(functools.partial(plain.call, kind, n, i))
        for way, side in zip(ways, sides, strict=True):
            found = outcome(functools.partial(side.call, kind, n, i))
            where = f"{transform} of {program}, {way.__name__}, call {i} of {history}"
            if isinstance(truth, Exception):
                assert isinstance(found, Exception), f"{where}: raises {truth!r}, we do not"
            elif isinstance(found, Exception):
                raise AssertionError(f"{where}: has an answer") from found
            else:
                told = difference(found, truth)
                assert told is None, f"{where}: {told}"
                # Of derivatives not each bit: outside they meet in another order where an argument
                # is given twice, and that of prod has two formulas in torch.
                for k in (0, 1) if transform in VALUES else (1,):
                    exact = all(map(bit_for_bit, found[k], truth[k]))
                    assert exact, f"{where}: {found[k]} and not {truth[k]}"
    return sides


def bit_for_bit(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return a == b
    return torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.signbit(), b.signbit())


def all_agree(programs_: int, *ways: Way) -> Counter[str]:
    """On so many programs; how many calls there were, and in each way replayed ones."""
    count: Counter[str] = Counter()

    @functools.partial(many, programs=programs_)
    @given(programs, st.sampled_from([*TRANSFORMS]), kinds, steps)
    def each(program: Program, transform: str, kinds: list[Kind], steps: list) -> None:
        with warnings.catch_warnings(), replay(on=False):
            warnings.simplefilter("ignore", PerformanceWarning)
            with steps_without(() if kinds[0].size < 3 else UNRECORDED):
                sides = agree(program, transform, kinds, steps, ways)
        count.update(calls=len(steps))
        for way, side in zip(ways, sides, strict=True):
            count[way.__name__] += side.hits()

    each()
    print(dict(count))
    return count


def test_histories():
    count = all_agree(200, jitted, replayed, anew)
    assert 5 * count["jitted"] > count["calls"], count
    assert 10 * count["replayed"] > count["calls"], count
    assert 20 * count["anew"] > count["calls"], count


def test_histories_of_compiled_calls(stand_in):
    count = all_agree(50, compiled)
    assert 5 * count["compiled"] > count["calls"], count
