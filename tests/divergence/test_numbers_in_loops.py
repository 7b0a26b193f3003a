"""Loops over Python numbers run converted, all examples at once, and give the loop's numbers."""

import math
import warnings

import pytest
import torch

import forall
from divergence.test_random_programs import obstacles
from forall import vmap

XS = torch.linspace(0.1, 30, 24, dtype=torch.float64)


def step_of_least(x):
    t, h = 0.0, 0.1
    while t < 1.0:
        h = min(h, 1.0 - t)
        e = (h * x).abs().item()
        if e < 1:
            t = t + h
        h = h * min(5.0, max(0.2, 0.9 * (e + 1e-12) ** (-1 / 3)))
    return x * t


def number_set_by_some(x):
    t, h = 0.0, 0.1
    while t < 1.0:
        e = (h * x).abs().item()
        if e < 1:
            t = t + h
        h = h * 0.8
        if h < 0.01:
            h = 0.2
    return x * t


def chosen_by_comparison(x):
    t, h = 0.0, 0.1
    while t < 1.0:
        h = min(1.0 - t, h)
        e = (h * x).abs().item()
        t, h = (t + h, h * 2) if e < 1 else (t, h * 0.3)
    return x * t


def least_of_two(x):
    h = x.item()
    for _ in range(3):
        h = min(h, 1.0)
    return x * h


def math_of_each(x):
    e = x.item()
    h = math.sin(e) + math.log(e) ** 2 if e > 1 else math.exp(-e)
    return x * h


def text_of_each(x):
    k = int(x.item())
    t = f"{k}{k > 3:d}" if k > 1 else f"{x.item():.1f}"
    return x * len(t)


def list_of_its_own_part(x):
    e = x.item()
    s = [e, 0.5]
    if e < 3:
        return x * s[0]
    s = [v * 0.9 for v in s]
    if e < 9:
        s[0] = 2.0
    return x * s[0]


PROGRAMS = [
    step_of_least,
    number_set_by_some,
    chosen_by_comparison,
    least_of_two,
    math_of_each,
    text_of_each,
    list_of_its_own_part,
]
WAYS = {
    "called": lambda f: vmap(f),
    "explained": lambda f: lambda x: forall.explain(vmap(f))(x).result,
    "limited": lambda f: vmap(f, max_steps=1000),
    "in chunks": lambda f: vmap(f, chunk_size=5),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_loop_over_numbers_is_converted_and_the_loops(f, way):
    with obstacles() as met:
        got = WAYS[way](f)(XS)
    assert torch.equal(got, torch.stack([f(x) for x in XS]))
    assert met == []


def _doubled_for_some(x):
    n = x.item()
    y = x * n if x > 3 else x
    return {"y": y, "n": n, "sums": [n + 1, [n]]}


def _used_in_steps_of_its_own(x):
    size = 0.5 + x.item()
    for _ in range(int(x.item())):
        x = x + size
    return x, size


@pytest.mark.parametrize("f", [_doubled_for_some, _used_in_steps_of_its_own])
def test_a_number_that_only_some_examples_used_is_a_result_of_all(f):
    with obstacles() as met:
        got = forall.explain(vmap(f))(XS)
    assert met == []
    assert got.ways[-1] == "converted, all examples in one run"
    leaves, form = torch.utils._pytree.tree_flatten(got.result)
    of_each = [f(x) for x in XS]
    assert form == torch.utils._pytree.tree_structure(of_each[0])
    columns = zip(*map(torch.utils._pytree.tree_leaves, of_each), strict=True)
    for found, column in zip(leaves, columns, strict=True):
        assert torch.equal(found, torch.stack([torch.as_tensor(n) for n in column]))


def test_bounds_asked_of_some_examples_are_not_those_of_all():
    def f(x):
        n, y = x.item(), 0.0
        if x > 0:
            y = 1 / n
        return y + 1 / n

    with pytest.raises(ZeroDivisionError):
        vmap(f)(torch.tensor([0.0, 1.0, 2.0]))


def generated(x):
    for k in range(3):
        if x > k:
            yield x * k
        else:
            yield x


def test_groups_for_want_of_conversion_warn_once_with_line_and_reason():
    def f(x):
        return sum(generated(x))

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for _ in range(3):
            vmap(f)(XS)
    (warning,) = told
    assert issubclass(warning.category, forall.PerformanceWarning)
    assert "if x > k" in str(warning.message)
    assert "reason" in str(warning.message)


def _with_a_generator(x):
    positive = (y for y in (x, -x) if y > 0)
    return next(positive, x)


def _with_try(x):
    try:
        return torch.linalg.cholesky(x.reshape(1, 1))
    except torch.linalg.LinAlgError:
        return x.reshape(1, 1)


TOLD = {  # what a warning of groups says, and the cure
    (lambda x: {"y": [x, x if x > 1 else 2]}): (
        "reason   results of several kinds: result['y'][1] is float64[] or int",
        "Return one kind of value from all branches",
    ),
    (lambda x: 1 if x > 1 else 2.5): (
        "reason   results of several kinds: float or int",
        "Return one kind of value from all branches",
    ),
    _with_a_generator: ("reason   a generator expression", "Make a list instead"),
    _with_try: ("reason   try .. except", "torch.linalg.cholesky_ex"),
}


@pytest.mark.parametrize("f", TOLD)
def test_groups_tell_the_reason_and_the_cure_once(f):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for n in (0, 5, 10):
            vmap(f)(XS[n:] - 1)
    (warning,) = told
    for part in TOLD[f]:
        assert part in str(warning.message)


def test_a_place_in_a_warning_is_a_line_of_the_users():
    def f(x):
        steps = [n for n in range(4) if x > n]
        for n in steps:
            steps[0] = n
            x = x + n
        return x

    with obstacles() as met:
        vmap(f)(XS)
    assert [why.place.text() for why in met] == ["for n in steps:"]


def test_groups_for_an_examples_error_do_not_warn():
    def f(x):
        if x > 5:
            raise ValueError("too large")
        return x

    with pytest.raises(ValueError, match="too large"):
        vmap(f)(XS)
