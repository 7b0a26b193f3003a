"""Random Python code in random histories of changes: each call is the function's, however made.

What a function goes by is found in its code and in what that leads to; here the code is random.
`FORALL_PROGRAMS` and `FORALL_SEED` as for the random programs.
"""

from __future__ import annotations

import functools
import linecache
import sys
import warnings
from collections import Counter
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forall import grad, jit, vmap
from forall._api.execution.transform_decorator import describe_replay
from jit.test_random_programs import replay
from limits.test_random_programs import many, outcome
from oracle import same
from replay.random_code import PRELUDE, Change, Code

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.usefixtures("at_once")

CALLS = 9  # enough to be replayed
pick = st.integers(0, 999)
change = st.builds(Change, pick, pick, pick)
codes = st.builds(
    Code,
    pick,
    pick,
    pick,
    st.lists(st.tuples(pick, pick), min_size=1, max_size=3).map(tuple),
    st.lists(pick, min_size=1, max_size=3).map(tuple),
    pick,
    st.sampled_from([None] * 5 + [1]).flatmap(lambda own: change if own else st.none()),
    st.lists(change, min_size=3, max_size=3).map(tuple),
)
TRANSFORMS: dict[str, Callable[[ModuleType], Callable]] = {
    "vmap": lambda m: vmap(m.f),
    "vmap of another": lambda m: vmap(lambda x: m.f(x)),
    "grad": lambda m: grad(lambda x: m.f(x).sum()),
    "vmap of grad": lambda m: vmap(grad(lambda x: m.f(x).sum())),
}


@contextmanager
def module(source: str) -> Iterator[ModuleType]:
    """A module of its own, that is found under its name as others are."""
    made = ModuleType("random_code")
    sys.modules[made.__name__] = made
    linecache.cache[made.__name__] = len(source), None, source.splitlines(True), made.__name__
    try:
        exec(compile(source, made.__name__, "exec", dont_inherit=True), vars(made))  # noqa: S102
        yield made
    finally:
        del sys.modules[made.__name__], linecache.cache[made.__name__]


def history(code: Code, transform: str, way: Callable, calls: int) -> tuple[list[Any], bool]:
    """What each call gives, and whether calls were replayed."""
    xs = torch.arange(1.0, 13.0).reshape(4, 3) / 4
    x = xs[0] if transform == "grad" else xs
    with module(f"{PRELUDE}\n{code.source}") as m:
        f, was_replayed = way(TRANSFORMS[transform](m))
        found = [outcome(lambda: f(x)) for _ in range(calls)]
        replayed = was_replayed()
        for statement in code.statements:
            found.append(outcome(lambda text=statement: exec(text, vars(m))))  # noqa: S102
            found += [outcome(lambda: f(x)) for _ in range(2)]
    return found, replayed


def plainly(f: Callable) -> tuple[Callable, Callable[[], bool]]:
    def called(x: torch.Tensor) -> Any:
        with replay(on=False):
            return f(x)

    return called, lambda: False


def replayed(f: Callable) -> tuple[Callable, Callable[[], bool]]:
    return f, lambda: "calls so far" in describe_replay(f)


def jitted(f: Callable) -> tuple[Callable, Callable[[], bool]]:
    g = jit(f)
    return g, lambda: g.cache_info().hits > 0


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, Exception) or isinstance(other, Exception):
        return isinstance(one, Exception) and isinstance(other, Exception)
    return same(one, other)


@pytest.mark.parametrize(("way", "programs", "calls"), [(replayed, 300, CALLS), (jitted, 150, 3)])
def test_each_call_is_the_function_s(way, programs, calls):
    count: Counter[str] = Counter()

    @functools.partial(many, programs=programs)
    @given(codes, st.sampled_from([*TRANSFORMS]))
    def each(code: Code, transform: str) -> None:
        if way is jitted and code.own is not None:  # jit is told that there is nothing of the kind
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                wanted, _ = history(code, transform, plainly, calls)
            except Exception:  # there is no such module
                return
            found, was_replayed = history(code, transform, way, calls)
        story = "\n".join([code.source, *(f"> {text}" for text in code.statements)])
        for i, (one, other) in enumerate(zip(found, wanted, strict=True)):
            assert alike(one, other), f"{transform} of\n{story}\nstep {i}: {one}, not {other}"
        count.update(all=1, replayed=was_replayed)

    each()
    print(dict(count))
    assert 4 * count["replayed"] > count["all"], count
