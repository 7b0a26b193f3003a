"""A call that is recorded, or watched while it runs, has its side effects as often as any other.

What counts is found by running the same calls with replay off: whatever Python does besides its
result it does in each of the first calls as often as there, and in the same order.
"""

from __future__ import annotations

import os
from typing import ClassVar

import pytest
import torch

import forall
from by_groups import EXPECTED
from draws import make_generator
from forall import grad, hessian, jacfwd, jacrev, jvp, vmap

pytestmark = [
    EXPECTED,
    pytest.mark.counted,
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad"),
]

_CALLS = 9


class Seen:
    n = 0
    words: ClassVar[list] = []


def seen(word="here"):
    Seen.n += 1
    Seen.words.append(word)


def largest(x):
    y = x * max(float(x.mean()), 0.1)
    seen()
    return y.sum()


def smallest(x):
    seen("before")
    y = x * min(float(x.sum()), 0.1, x.mean().item())
    seen()
    return y.sum()


def branch(x):
    if x.sum() > 0:
        seen("yes")
        return (x * 2).sum()
    seen("no")
    return x.sin().sum()


def branch_on_number(x):
    n = x.sum().item()
    y = x.cos() if n > 0.1 else x.sin()
    seen()
    return y.sum()


def negated(x):
    seen("before")
    if not x.sum().item() > 0:
        x = x * 3
    seen()
    return x.sum()


def several_tests(x):
    n = x.mean().item()
    if 0 < n < 0.5 or n > 0.9:
        x = x + 1
    seen()
    return (x * x).sum()


def both_tests(x):
    a, b = x[0].item(), x[1].item()
    if a > 0 and b > 0:
        seen("both")
        x = x * 2
    seen()
    return x.sum()


def loop(x):
    k = 0
    while x.norm() < 8 and k < 6:
        x, k = x * 2, k + 1
        seen("round")
    seen()
    return x.sum()


def loop_over_a_number(x):
    for _ in range(int(x.abs().sum().item()) % 4):
        x = x * 1.1
        seen("round")
    seen()
    return x.sum()


def as_bool(x):
    flag = bool(x[0] > 0)
    seen()
    return (x * flag).sum()


def as_truth_of_number(x):
    n = round(x[0].item())
    seen("before")
    if n:
        x = x * n
    seen()
    return x.sum()


def sorted_numbers(x):
    a, b, c = sorted(x.tolist())
    seen()
    return (x * b).sum() + a - c


def any_and_all(x):
    values = x.tolist()
    y = x * (2.0 if any(v > 0.5 for v in values) else 1.0)
    if all(v < 1 for v in values):
        y = y + 1
    seen()
    return y.sum()


def first_that_fits(x):
    for v in x:
        if v > 0:
            seen("found")
            return v * 2
    seen("none")
    return x.sum()


def picked(x):
    rows = {True: 2.0, False: 3.0}
    y = x * rows[x.sum().item() > 0]
    seen()
    return y.sum()


def clamped(x):
    n = x[0].item()
    n = abs(n) if n < 0 else n
    y = x * max(0.1, min(n, 0.7))
    seen()
    return y.sum()


def tried(x):
    try:
        if x.sum() > 0:
            raise ValueError("positive")
        y = x
    except ValueError:
        seen("caught")
        y = x * 2
    seen()
    return y.sum()


def in_a_helper(x):
    def scaled(v):
        seen("inside")
        return v * 2 if v.sum() > 0 else v

    y = scaled(x) + scaled(-x)
    seen()
    return y.sum()


def masked(x):
    y = x[x > 0]
    seen()
    return y.sum()


def counted_by_shape(x):
    n = int((x > 0).sum())
    seen()
    return x.sum() * n


def agreeing(x):
    y = x * max(float(x.shape[0]), 0.1)
    seen()
    return y.sum()


def asserted(x):
    assert x.isfinite().all()
    seen()
    return x.sum()


_FUNCTIONS = [
    largest, smallest, branch, branch_on_number, negated, several_tests, both_tests, loop,
    loop_over_a_number, as_bool, as_truth_of_number, sorted_numbers, any_and_all, first_that_fits,
    picked, clamped, tried, in_a_helper, masked, counted_by_shape, agreeing, asserted,
]  # fmt: skip

_TRANSFORMS = {
    "vmap": vmap,
    "grad": lambda f: lambda X: grad(f)(X[0]),
    "vmap(grad)": lambda f: vmap(grad(f)),
    "vmap(vmap)": lambda f: lambda X: vmap(vmap(f))(torch.stack([X, -X])),
    "grad(vmap)": lambda f: grad(lambda X: vmap(f)(X).sum()),
    "vmap(jacrev)": lambda f: vmap(jacrev(f)),
    "vmap(jacfwd)": lambda f: vmap(jacfwd(f)),
    "vmap(hessian)": lambda f: vmap(hessian(f)),
    "jvp(vmap)": lambda f: lambda X: jvp(vmap(f), (X,), (X,)),
    "chunks": lambda f: vmap(f, chunk_size=2),
}


def _counts(made, X, replay):
    found = []
    before = forall.config.replay, forall.config.patience
    forall.config.replay, forall.config.patience = replay, 0.0
    try:
        g = made()
        for _ in range(_CALLS):
            Seen.n, Seen.words = 0, []
            result = g(X)
            leaves = result if isinstance(result, (tuple, list)) else [result]
            words = [w for w in Seen.words if isinstance(w, str)]  # of which lanes have some each
            found.append((Seen.n, words, [*leaves]))
    finally:
        forall.config.replay, forall.config.patience = before
    return found


# All functions under vmap, and each other transform with every third of them, from another on.
_CASES = [
    (f, how)
    for i, how in enumerate(_TRANSFORMS)
    for j, f in enumerate(_FUNCTIONS)
    if how == "vmap" or (i + j) % 3 == 0 or os.environ.get("FORALL_ALL_CASES")
]


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("f", "how"), _CASES, ids=lambda x: getattr(x, "__name__", x))
def test_side_effects_of_first_calls_count_as_without_replay(f, how):
    X = torch.randn(3, 3, generator=make_generator(0))
    on = _counts(lambda: _TRANSFORMS[how](f), X, True)
    off = _counts(lambda: _TRANSFORMS[how](f), X, False)
    # The first call that finds examples diverged is undone and begun anew; later ones are not.
    assert [n for n, _, _ in on[1:]] == [n for n, _, _ in off[1:]]
    for (_, words, results), (_, wanted, expected) in zip(on[1:], off[1:], strict=True):
        assert words == wanted
        for a, b in zip(results, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
