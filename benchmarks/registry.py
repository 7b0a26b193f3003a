"""What a workload is, and the list of all of them."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.func
from torch.utils._pytree import tree_map

import forall
from forall._auto_replay.policy import AutoReplayCache

Program = Callable[[], Any]
Quantity = Literal["time", "peak memory"]
Limits = dict[tuple[int, int], float]

JIT, REPLAYED = 3, 4  # the places of the recorded programs, after those that every workload has
MORE = ("jit", "replayed")
NAMES = ("forall", "torch.func", "hand-written")
# Where examples diverge torch.func refuses, and the loop over examples takes its place.
DIVERGING = ("forall", "loop", "hand-written")
# What the names of the many rows begin with that torch.func maps by a loop.
FALLBACKS = "fallback-"


@dataclass(frozen=True)
class Contestants:
    """Three programs computing the same values, and their checker.

    Attributes:
        times: by how much the measurement of each is multiplied: a loop over a sample of the
            examples stands for the loop over all of them.
        jitted: the first one under `forall.jit`, None where that cannot record it.
        fastmath: whether that may take sums and products in another order.
        replayed: the first one with `forall.config.replay`, None where nothing of it is replayed.
        transformed: what `contest` was given: each call makes a program that was never called.
        by_jax: `by_jax(jax)` gives the same as a function for `jax.jit`, and its arguments as
            tensors of torch's.
        by_opacus: a model, and the sum over examples of its loss, a function of the model.
    """

    programs: tuple[Program, Program, Program]
    check: Callable[[Any, Any], None]
    times: tuple[float, float, float] = (1.0, 1.0, 1.0)
    jitted: Program | None = None
    fastmath: bool = False
    replayed: Program | None = None
    transformed: Callable[[Any], Program] | None = None
    by_jax: Callable[[Any], tuple[Callable, tuple]] | None = None
    by_opacus: tuple[torch.nn.Module, Callable[[torch.nn.Module], torch.Tensor]] | None = None

    @property
    def all(self) -> list[tuple[Program | None, float]]:
        """Each program, and by how much its measurement is multiplied."""
        more = [(program, self.times[0]) for program in (self.jitted, self.replayed)]
        return [*zip(self.programs, self.times, strict=True), *more]

    def jit(self, program: Program) -> Any:
        return forall.jit(program, fastmath=self.fastmath)

    def anew(self, api: Any) -> Program:
        """A program that was never called."""
        if self.transformed is None:
            raise ValueError("only what `contest` made can be made anew")
        return self.transformed(api)


@dataclass(frozen=True)
class Workload:
    """How to build one comparison, and how to report it.

    Attributes:
        names: what the three programs are called; the recorded one has the place after them.
        limits: the ratios that are wanted, by the places of the two in `names`.
    """

    name: str
    summary: str
    quantity: Quantity
    build: Callable[[torch.device], Contestants]
    names: tuple[str, str, str] = NAMES
    limits: Limits = field(default_factory=dict)


WORKLOADS: dict[str, Workload] = {}


def workload(
    name: str,
    summary: str,
    quantity: Quantity = "time",
    names: tuple[str, str, str] = NAMES,
    limits: Limits | None = None,
):
    """Register the decorated builder under `name`."""

    def register(build: Callable[[torch.device], Contestants]):
        if name in WORKLOADS:
            raise ValueError(f"two workloads are called {name}")
        WORKLOADS[name] = Workload(name, summary, quantity, build, names, limits or {})
        return build

    return register


def leaves(tree: Any, path: str = "result") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of nested dictionaries, lists and tuples, each with where it stands."""
    if isinstance(tree, dict):
        tree = tree.items()
    elif isinstance(tree, (list, tuple)):
        tree = enumerate(tree)
    else:
        yield path, tree
        return
    for key, branch in tree:
        yield from leaves(branch, f"{path}[{key!r}]")


def assert_agree(actual: Any, expected: Any, tolerance: float) -> None:
    """Compare two results tensor by tensor, each relative to the largest value in it.

    A result has to be a plain tensor without a graph: a subclass could put off the work that is
    being timed, and a graph would hold memory that the other contestants do not hold.
    """
    given, wanted = dict(leaves(actual)), dict(leaves(expected))
    if given.keys() != wanted.keys():
        raise AssertionError(f"has {sorted(given)} instead of {sorted(wanted)}")
    for path, value in given.items():
        if type(value) is not torch.Tensor:
            raise AssertionError(f"{path} is a {type(value).__name__}, not a plain tensor")
        if value.requires_grad:
            raise AssertionError(f"{path} requires grad")
        scale = wanted[path].abs().max().item()
        torch.testing.assert_close(
            value,
            wanted[path],
            rtol=tolerance,
            atol=tolerance * scale,
            msg=lambda text, path=path: f"{path}: {text}",
        )


def contest(
    transformed: Callable[[Any], Program],
    handwritten: Program,
    *,
    tolerance: float = 1e-4,
    **more: Any,
) -> Contestants:
    """Give `transformed` to both libraries, so that they run the same source text.

    `transformed(api)` returns the program written with `api.vmap`, `api.grad` and so on. What
    else there is goes into `Contestants` as it is: the same by other libraries.
    """

    def check(actual: Any, expected: Any) -> None:
        assert_agree(actual, expected, tolerance)

    programs = (transformed(forall), transformed(torch.func), handwritten)
    return Contestants(programs, check, transformed=transformed, **more)


def with_jit(contestants: Contestants) -> Contestants:
    """The same, and beside them the first one recorded, where that goes without a warning."""
    recorded = contestants.jit(contestants.programs[0])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            recorded()
    if any("not recorded" in str(warning.message) for warning in told):
        return contestants
    return replace(contestants, jitted=recorded)


def with_replay(contestants: Contestants) -> Contestants:
    """The same, and beside them the first one replayed without being asked, where anything is."""
    program = contestants.programs[0]
    # Set without the checks of values, which take a few microseconds: calls are timed, not these.
    settings = vars(forall.config)
    on = {"replay": True, "patience": 0}

    def replayed() -> Any:
        before = settings["replay"], settings["patience"]
        settings.update(on)
        try:
            return program()
        finally:
            settings["replay"], settings["patience"] = before

    hits = []
    original = AutoReplayCache.replay_entry

    def counted(self: AutoReplayCache, *args: Any) -> Any:
        hits.append(self)
        return original(self, *args)

    AutoReplayCache.replay_entry = counted
    try:
        for _ in range(6):  # two before it is looked at, one that is seen, one that is recorded
            replayed()
    finally:
        AutoReplayCache.replay_entry = original
    return replace(contestants, replayed=replayed) if hits else contestants


def looped(f: Callable, stacks: Sequence[torch.Tensor], chosen: Sequence[int]) -> Program:
    """The plain loop over the chosen examples, results stacked."""

    def stacked(results: Sequence[Any]) -> Any:
        if isinstance(results[0], torch.Tensor):
            return torch.stack(list(results))
        if isinstance(results[0], tuple):
            return tuple(stacked(column) for column in zip(*results, strict=True))
        return torch.tensor(results)

    return lambda: stacked([f(*(stack[i] for stack in stacks)) for i in chosen])


def loop_contest(
    f: Callable,
    stacks: Sequence[torch.Tensor],
    handwritten: Program,
    *,
    chosen: Sequence[int] | None = None,
    tolerance: float = 1e-8,
) -> Contestants:
    """`f` under forall.vmap, in a loop over examples, and a program for all of them by hand.

    The loop runs over the `chosen` examples, by default all; its time is scaled to all.
    """
    size = len(stacks[0])
    chosen = range(size) if chosen is None else chosen

    def check(actual: Any, expected: Any) -> None:
        if all(len(value) == len(chosen) for _, value in leaves(actual)):
            expected = tree_map(lambda value: value[list(chosen)], expected)
        assert_agree(actual, expected, tolerance)

    mapped = forall.vmap(f)
    programs = (lambda: mapped(*stacks), looped(f, stacks, chosen), handwritten)
    return Contestants(programs, check, (1.0, size / len(chosen), 1.0))
