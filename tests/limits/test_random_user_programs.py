"""Random programs over users' own kinds of values, in words of transforms, in histories of calls.

Arguments and results are trees, classes with contexts and tensor subclasses; instructions may raise
on numbers; captured tensors and arguments are returned as they are; transforms take any argnums,
and run all at once or in chunks. Each call is the loop's over torch.autograd: numbers, errors,
classes and contexts of results, what outside of the call has a history, and its derivatives.
`FORALL_PROGRAMS` and `FORALL_SEED` as for the other random programs.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from forall import PerformanceWarning, grad, jacfwd, jacrev, jvp, linearize, vjp, vmap
from jit.test_random_programs import jitted, plainly, replay, replayed
from limits import programs as instructions
from limits.programs import NOT_FORWARD, D, Machine, Program
from limits.test_random_programs import direction, many, numbers, outcome, programs
from limits.user_kinds import BOX, FORMS, PAIR, SETTINGS, Settings, described, inside, wrapped
from oracle import difference

B = 3
CALLS = 7  # enough to be replayed, with changes between the last ones

# --- instructions that raise on numbers ---------------------------------------------------------


def raising(machine: Machine, a: int, b: int, c: int) -> None:
    """An operator whose kernel raises for some numbers; what it gives may be used or not."""
    t, s = machine.pick(a), machine.pick(b)
    far = (s.sum() > 1.5).long() * 7 + c % 2  # in range for most
    row = torch.stack([t.sum(), t.mean(), t.sum().sin()])
    kernels: list[Callable[[], Tensor]] = [
        lambda: F.cross_entropy(row, far),
        lambda: F.nll_loss(row[None], far[None]),
        lambda: F.one_hot(far, 3).to(D) * t.mean(),
        lambda: row[far],
        lambda: row.gather(0, far[None]),
        lambda: row.index_select(0, far[None]),
        lambda: F.embedding(far, row[:, None]),
        lambda: torch.zeros(3, dtype=D).scatter(0, far[None], t.mean()[None]),
        lambda: F.binary_cross_entropy(far.to(D).clamp(max=4) * 0.5 + 0 * t.mean(), row[0].sin()),
        lambda: torch.linalg.cholesky(torch.eye(2, dtype=D) * (2 - far) + 0 * t.mean()),
        lambda: torch.linalg.inv(torch.eye(2, dtype=D) * (far - 7).abs().clamp(max=1) + 0 * row[0]),
        lambda: (torch.tensor(5) // (7 - far).clamp(max=3)).to(D) * t.mean(),
    ]
    found = kernels[(b + c) % len(kernels)]()
    if c % 3:
        machine.push(found)


# --- forms of arguments and results -------------------------------------------------------------

pick = st.integers(0, 11)


@dataclass(frozen=True)
class Case:
    """A program, how values come in and go out, and what happens between calls."""

    program: Program
    forms: tuple[int, int]
    result: int
    captured: int  # which captured tensors and arguments are returned as they are
    requires: int  # bits: who of x, v, w and the captured p requires grad outside
    changes: tuple[tuple[int, int], ...]
    chunk: int | None


cases = st.builds(
    Case,
    programs,
    st.tuples(pick, pick),
    pick,
    pick,
    st.integers(0, 15),
    st.lists(st.tuples(pick, pick), min_size=3, max_size=3).map(tuple),
    st.sampled_from([None, None, 1, 2]),
)


class World:
    """What a function and its caller share, and one of them may change."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.p = numbers(2) * 0.5
        self.p.requires_grad_(bool(case.requires >> 3 & 1))
        self.state: dict[str, Any] = {
            "context": {"scale": 0.5},
            "settings": Settings(1.5),
            "sign": 1.0,
            "scale": 0.75,
        }
        self.shift = 0.0
        self.rounding = 0.0  # added to all arguments

    def change(self, n: int, i: int) -> None:
        """One of the things that may change between two calls."""
        new = [2.0, 0.25, -1.0, 3.0][i % 4]
        changes: list[Callable[[], Any]] = [
            lambda: self.state["context"].update(scale=new),
            lambda: self.state.update(context={"scale": new}),
            lambda: self.state.update(context=dict(self.state["context"])),
            lambda: setattr(self.state["settings"], "scale", new),
            lambda: self.state.update(settings=Settings(new)),
            lambda: self.state.update(sign=[1, True, -0.5, 1.0][i % 4]),
            lambda: self.state.update(scale=new),
            lambda: self.p.detach().copy_(numbers(2) * new),
            lambda: setattr(self, "p", (numbers(2) * new).requires_grad_(self.p.requires_grad)),
            lambda: setattr(self, "p", self.p.detach().requires_grad_(not self.p.requires_grad)),
            lambda: setattr(self, "shift", new),
        ]
        if n < len(changes):
            changes[n]()

    def arguments(self, mapped: bool) -> tuple[Any, ...]:
        """x and v in their forms, and w: fresh ones, with or without a derivative outside."""
        program, requires = self.case.program, self.case.requires
        shapes = program.example, (2,)
        x, v = (numbers(B, *shape) if mapped else numbers(*shape) for shape in shapes)
        made = [x + self.shift, v * 0.5, numbers(2) + 0.125]
        made = [t + self.rounding for t in made]
        for bit, t in enumerate(made):
            t.requires_grad_(bool(requires >> bit & 1))
        self.leaves = [t for t in (*made, self.p) if t.requires_grad]
        x, v = (wrapped(f, t, self.state) for f, t in zip(self.case.forms, made[:2], strict=True))
        return x, v, made[2]


def run(world: World, x: Any, v: Any, w: Tensor) -> list[Tensor]:
    forms = world.case.forms
    return world.case.program(inside(forms[0], x), inside(forms[1], v), w + world.p)


def total(results: list[Tensor]) -> Tensor:
    terms = [(i + 1) * r.sum().sin() for i, r in enumerate(results) if r.is_floating_point()]
    return torch.stack(terms).sum()


# --- words of transforms ------------------------------------------------------------------------

argnums = st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True).map(tuple)
WORDS = "grad", "jacrev", "jacfwd", "vjp", "jvp", "linearize"
FORWARD = {"jacfwd", "jvp", "linearize"}
words = st.lists(st.tuples(st.sampled_from(WORDS), argnums), min_size=1, max_size=3).map(tuple)


def along(tree: Any) -> Any:
    return tree_map(direction, tree)


def with_these(f: Callable, args: tuple, places: tuple[int, ...]) -> Callable:
    def of_these(*some: Any) -> Any:
        whole = list(args)
        for place, value in zip(places, some, strict=True):
            whole[place] = value
        return f(*whole)

    return of_these


def by_forall(chunk: int | None, word: str, f: Callable, places: tuple[int, ...]) -> Callable:
    """A derivative of a function that answers with one number."""

    def derived(*args: Any) -> Any:
        some = tuple(args[p] for p in places)
        if word == "grad":
            return grad(f, places)(*args)
        if word in ("jacrev", "jacfwd"):
            jacobian = {"jacrev": jacrev, "jacfwd": jacfwd}[word]
            return jacobian(f, places, chunk_size=chunk)(*args)
        g = with_these(f, args, places)
        if word == "vjp":
            value, pull = vjp(g, *some)
            return pull(torch.ones_like(value))
        if word == "jvp":
            return jvp(g, some, tuple(along(t) for t in some))[1]
        return linearize(g, *some)[1](*(along(t) for t in some))

    return derived


def by_autograd(word: str, f: Callable, places: tuple[int, ...]) -> Callable:
    """The same by torch.autograd; tensors that nobody differentiates outside are detached."""

    def derived(*args: Any) -> Any:
        held, spec = tree_flatten(tuple(args[p] for p in places))
        own = [t.view_as(t) if t.requires_grad else t.detach().requires_grad_() for t in held]
        y = with_these(f, args, places)(*tree_unflatten(own, spec))
        found = [torch.zeros_like(t) for t in own]
        if y.requires_grad:
            found = torch.autograd.grad(y, own, create_graph=True, materialize_grads=True)
        if word in ("jvp", "linearize"):
            return sum((g * direction(t)).sum() for g, t in zip(found, own, strict=True))
        return tree_unflatten(list(found), spec)

    return derived


def word_of(steps: tuple, f: Callable, one: Callable) -> Callable:
    """All the transforms of a word, each of one number that depends on what the last one gave."""
    for n, (word, places) in enumerate(steps):
        inner = f if n == 0 else (lambda *args, f=f: total(tree_leaves(f(*args))))
        f = one(word, inner, places)
    return f


# --- comparing ----------------------------------------------------------------------------------


def reachable_leaves(result: Tensor) -> list[Tensor]:
    """The tensors that a backward pass from a result would give gradients to."""
    if result.requires_grad and result.is_leaf:
        return [result]
    todo, found, seen = [result.grad_fn], [], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        todo += [child for child, _ in node.next_functions]
    return found


def pulled(results: list[Any], leaves: list[Tensor]) -> list[Tensor]:
    """Derivatives that are taken outside of the call, of all that it has given."""
    live = [t for t in results if t.requires_grad]
    if not live or not leaves:
        return [torch.zeros_like(t) for t in leaves]
    cotangents = [t.detach().sin() for t in live]
    return [*torch.autograd.grad(live, leaves, cotangents, materialize_grads=True)]


Told = tuple[list[Tensor], Any, list[Tensor], list[bool]]


def told(world: World, result: Any) -> Told:
    """The numbers of a result, all else about it, derivatives of it, and what has idle history."""
    leaves = [t.as_subclass(Tensor) for t in tree_leaves(result)]
    taken = pulled(leaves, world.leaves)
    for t in taken:
        assert type(t) is Tensor, type(t)
        t.numpy()
    ours = {id(t) for t in world.leaves}
    idle = [
        t.requires_grad and not any(id(leaf) in ours for leaf in reachable_leaves(t))
        for t in leaves
    ]
    return [t.detach() for t in leaves], described(result), taken, idle


def message(found: Any) -> str:
    """What an error says; nothing of results, which are dear to print."""
    return str(found) if isinstance(found, Exception) else ""


def agree(where: str, found: Any, truth: Any, nearby: Callable) -> None:
    """Or else an error; ``nearby`` gives the truth at arguments that are moved by a rounding."""
    if isinstance(truth, Exception):
        assert isinstance(found, Exception), f"{where}: the loop raises {truth!r}, we do not"
        return
    if isinstance(found, Exception):
        raise AssertionError(f"{where}: the loop has an answer") from found
    assert found[1] == truth[1], f"{where}: {found[1]} instead of {truth[1]}"
    for n, what in ((0, "results"), (2, "derivatives of results")):
        wrong = difference(found[n], truth[n])
        if wrong is not None and not is_rounding(found[n], truth[n], nearby()[n]):
            raise AssertionError(f"{where}: {what}: {wrong}")
    kept = [i for i, (a, b) in enumerate(zip(found[3], truth[3], strict=True)) if a and not b]
    assert not kept, f"{where}: results {kept} have a history that nobody outside has asked for"


def is_rounding(found: list[Tensor], truth: list[Tensor], moved: list[Tensor]) -> bool:
    """Whether the truth itself moves as much where its arguments do by a few roundings."""
    if len(found) != len(truth) or any(
        f.shape != t.shape or f.dtype != t.dtype for f, t in zip(found, truth, strict=True)
    ):
        return False
    return farthest(found, truth) <= 100 * farthest(moved, truth)


def farthest(some: list[Tensor], others: list[Tensor]) -> float:
    """The greatest difference between two entries at the same place."""
    pairs = zip(some, others, strict=True)
    return float(max((a.double() - b.double()).abs().max() for a, b in pairs if a.numel()))


def with_the_truths_nans(found: Any, truth: Any) -> Any:
    """The same results, but nan in the place of an infinity where the truth has nan.

    The oracle of a forward derivative sums a gradient times a direction. It adds infinities of two
    signs where forward mode never meets the second one.
    """
    if isinstance(found, Exception) or isinstance(truth, Exception) or found[1] != truth[1]:
        return found

    def adjusted(f: Tensor, t: Tensor) -> Tensor:
        return torch.where(f.isinf() & t.isnan(), t, f) if f.is_floating_point() else f

    results, derivatives = ([*map(adjusted, found[n], truth[n])] for n in (0, 2))
    return results, found[1], derivatives, found[3]


# Errors of values that a derivative needs, and of outputs of `split` that reverse mode refuses.
OF_BOTH = "modified by an inplace operation"
OF_REVERSE = OF_BOTH, "returns multiple views"


def hold(
    case: Case, ours: Callable, loop: Callable, mapped: bool, ways: tuple, steps: tuple = ()
) -> None:
    """Make the same calls of the loop, and of a transform in each of the ways."""
    forward = any(word in FORWARD for word, _ in steps)
    history = [(99, 0)] * (CALLS - len(case.changes)) + [*case.changes]

    def one(world: World, f: Callable, n: int, i: int) -> Told:
        world.change(n, i)
        return told(world, f(*world.arguments(mapped)))

    def of_side(way: Callable) -> tuple[str, World, Callable]:
        world = World(case)
        return way.__name__, world, way(ours(world))[0]

    sides = [of_side(way) for way in ways]
    true_world = World(case)
    true = loop(true_world)

    def nearby() -> Told:
        true_world.rounding = 1e-14
        try:
            return one(true_world, true, 99, 0)
        finally:
            true_world.rounding = 0.0

    for call, (n, i) in enumerate(history):
        truth = outcome(functools.partial(one, true_world, true, n, i))
        for name, world, f in sides:
            found = outcome(functools.partial(one, world, f, n, i))
            errors = message(truth), message(found)
            if "single memory location" in "".join(errors):
                return  # torch's guess about operands that overlap: a stack may answer otherwise
            if forward and (any(s in errors[0] for s in OF_REVERSE) or OF_BOTH in errors[1]):
                return  # the oracle has reverse mode alone; torch's forward mode saves tangents
            if forward:
                found = with_the_truths_nans(found, truth)
            agree(f"{name}, call {call} of {case}", found, truth, nearby)


@pytest.fixture(autouse=True)
def instructions_that_raise(monkeypatch):
    monkeypatch.setattr(instructions, "STEPS", [*instructions.STEPS, *[raising] * 3])
    with warnings.catch_warnings(), replay(on=False):
        warnings.simplefilter("ignore", PerformanceWarning)
        yield


# --- the laws -----------------------------------------------------------------------------------


def answers(world: World, x: Any, v: Any, w: Tensor) -> Any:
    """Registers in a form of the user's, and what was there before as it is."""
    case = world.case
    results = run(world, x, v, w)
    form = case.result % FORMS
    state: dict[str, Any] = {"context": {"scale": 2.0}, "sign": 3, "scale": 0.5}
    state["settings"] = Settings(1.0)
    if form == BOX and case.forms[0] % FORMS == BOX:
        state["context"] = {"scale": x.context["scale"] + 1}
    if form == PAIR and case.forms[1] % FORMS == PAIR:
        state["sign"] = v.sign
    if form == SETTINGS and case.forms[1] % FORMS == SETTINGS:
        state["settings"] = v.context
    p = world.p
    as_they_are = [[], [p], [x], [p, p, w], [p[0]], [v, w]][case.captured % 6]
    return [wrapped(form, results[-1], state), results, as_they_are]


def number(world: World, x: Any, v: Any, w: Tensor) -> Tensor:
    return total(run(world, x, v, w))


def stacked(rows: list[Any]) -> Any:
    """One tree of stacks, with the contexts of the first example's."""
    columns = zip(*(tree_flatten(row)[0] for row in rows), strict=True)
    return tree_unflatten([torch.stack([*c]) for c in columns], tree_flatten(rows[0])[1])


def by_loop(f: Callable) -> Callable:
    def looped(x: Any, v: Any, w: Tensor) -> Any:
        def example(tree: Any, i: int) -> Any:
            return tree_map(lambda t: t[i], tree)

        return stacked([f(example(x, i), example(v, i), w) for i in range(B)])

    return looped


WAYS = plainly, replayed


def on_copies(case: Case, steps: tuple = ()) -> Case:
    """A case that writes into no argument, with as much as its transforms have a meaning for."""
    program = case.program
    if any(word in FORWARD for word, _ in steps):
        # A pass inside frees graphs that the oracle, which has reverse mode alone, needs again.
        program = program.without(*NOT_FORWARD, Machine.inner_backward)
    most = (12, 9, 7, 5)[len(steps)]
    return replace(case, program=Program(program.shape, True, program.instructions[:most]))


@functools.partial(many, programs=100)
@given(cases)
def test_vmap(case):
    hold(
        on_copies(case),
        lambda world: vmap(functools.partial(answers, world), (0, 0, None), chunk_size=case.chunk),
        lambda world: by_loop(functools.partial(answers, world)),
        mapped=True,
        ways=WAYS,
    )


@functools.partial(many, programs=100)
@given(cases, words)
def test_words(case, steps):
    hold(
        on_copies(case, steps),
        lambda world: word_of(
            steps,
            functools.partial(number, world),
            functools.partial(by_forall, case.chunk),
        ),
        lambda world: word_of(steps, functools.partial(number, world), by_autograd),
        mapped=False,
        ways=(*WAYS, jitted),
        steps=steps,
    )


@functools.partial(many, programs=100)
@given(cases, words)
def test_vmap_of_words(case, steps):
    steps = steps[:2]
    hold(
        on_copies(case, steps),
        lambda world: vmap(
            word_of(
                steps,
                functools.partial(number, world),
                functools.partial(by_forall, case.chunk),
            ),
            (0, 0, None),
            chunk_size=case.chunk,
        ),
        lambda world: by_loop(word_of(steps, functools.partial(number, world), by_autograd)),
        mapped=True,
        ways=WAYS,
        steps=steps,
    )
