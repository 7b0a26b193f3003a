"""Functions that take functions, where examples diverge: `functools.partial`, `map`, `reduce`."""

import functools
from typing import Any

import pytest
import torch

from forall import explain, grad, vmap
from oracle import same

OPEN: Any = getattr(functools, "Placeholder", None)  # a place that a partial leaves open
X = torch.tensor([[1.0, 2.0, -3.0], [1.0, -2.0, 3.0], [0.25, 0.5, 0.125]], dtype=torch.float64)
of_314 = pytest.mark.skipif(OPEN is None, reason="new in Python 3.14")


def choose(a, b, c=2.0, d=0.0):
    return a - c * b + d if a > 0.5 else b


def partial_of_first(x):
    return functools.partial(choose, x[0])(x[1]) + functools.partial(choose, c=x[2])(x[1], x[0])


def partial_of_last(x):
    return functools.partial(choose, OPEN, x[1])(x[0])


def partial_of_every_other(x):
    return functools.partial(choose, OPEN, x[1], OPEN, x[0])(x[2], 2.0)


def partial_of_partial(x):
    some = functools.partial(choose, OPEN, OPEN, x[2])
    return functools.partial(some, x[1])(x[0]) + functools.partial(some, OPEN, x[1])(x[0])


def partial_with_too_few(x):
    some = functools.partial(choose, OPEN, x[1])
    try:
        return some() if x[0] > 0.5 else x[1]
    except TypeError as error:
        return x[2] * len(str(error))


def mapped(x):
    return sum(map(choose, x, x.flip(0)))


def mapped_strictly(x):
    return sum(map(choose, x, x.flip(0), strict=True))  # type: ignore[call-arg]


def mapped_strictly_and_too_short(x):
    try:
        return sum(map(choose, x, [x[0]], strict=True))  # type: ignore[call-arg]
    except ValueError:
        return x[1] if x[0] > 0.5 else x[2]


def reduced(x):
    return functools.reduce(choose, [*x], x[2])


def reduced_from_a_keyword(x):
    return functools.reduce(choose, [*x], initial=x[2])  # type: ignore[call-arg]


F = [
    partial_of_first,
    mapped,
    reduced,
    *(
        pytest.param(f, marks=of_314)
        for f in (
            partial_of_last,
            partial_of_every_other,
            partial_of_partial,
            partial_with_too_few,
            mapped_strictly,
            mapped_strictly_and_too_short,
            reduced_from_a_keyword,
        )
    ),
]


@pytest.mark.parametrize("f", F)
def test_it_is_the_loop_and_no_group_runs_apart(f):
    for _ in range(3):
        assert same(vmap(f)(X), torch.stack([f(x) for x in X]))
        assert same(vmap(grad(f))(X), torch.stack([grad(f)(x) for x in X]))
    assert "groups of 1 examples" not in str(explain(vmap(f))(X))


@of_314
def test_a_partial_with_an_open_place_is_replayed():
    for n in range(24):
        f = functools.partial(lambda a, b, c: a * c - b, OPEN, float(n))
        assert same(vmap(lambda x, f=f: f(x, 3.0).sum())(X), (X * 3 - n).sum(1))
        assert same(grad(functools.partial(lambda a, b: (a * b).sum(), OPEN, X))(X), X)
