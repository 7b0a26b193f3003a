"""Expressions in converted code: one function of their operands, with the loop's values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from forall import grad, jacfwd, vmap
from oracle import loop

D = torch.float64
XS = torch.tensor([0.3, -1.2, 0.7, 1.5, -0.4, 2.0], dtype=D)


def apart(x: Tensor) -> Tensor:
    """What makes the examples diverge, so that the code that follows runs converted."""
    return x + 1 if x > 0 else x - 1


def writes(x: Tensor) -> Tensor:
    x.mul_(3)
    return x * 1


def order_of_writes(x: Tensor) -> Tensor:
    y = apart(x).clone()
    return y * 2 + writes(y) - y


def call_comes_first(x: Tensor) -> Tensor:
    y = apart(x).clone()
    return y + writes(y) * 2 - y


def rebound(x: Tensor) -> Tensor:
    y = apart(x)

    def other() -> Tensor:
        nonlocal y
        y = y * 5
        return y

    return y + other() * y - y


def walrus(x: Tensor) -> Tensor:
    return (y := apart(x)) * 2 + y * y


def dtypes(x: Tensor) -> Tensor:
    n = (10 * apart(x)).long()
    return n * 0.5 + n // 3 - n % 4 + (n > 2) * 7 + n.float() * x + 2 * True


def ranks(x: Tensor) -> Tensor:
    y = apart(x)
    v = torch.stack([y, x, y * x])
    m = torch.stack([v, -v], -1)
    return (v.unsqueeze(-1) * m - y * 2 + m.unbind(-1)[0].unsqueeze(-1) / 3).sum(-1)


def stacked(x: Tensor) -> Tensor:
    v = torch.stack((apart(x), x))
    return torch.stack([v, v * 2, -v], -2) + torch.stack([v, v, v], dim=0)


def python_numbers(x: Tensor) -> Tensor:
    k = 3
    if x > 0:
        k = 5
    names = ["a"] * 2 + ["b"]
    return x * (k * 2 - 1) + len(names) ** 2 - 7 // 2 + (k - 0.5) * x


def lists(x: Tensor) -> Tensor:
    some = [x]
    if x > 0.5:
        some.append(2 * x)
    return sum(some + [x * x] * 2) + sum([y * y for y in some if y > 0], x) + sum([1, 2])


def methods(x: Tensor) -> Tensor:
    y = apart(x)
    return ((y * x).abs() + (1 - y).sin() * 2).sqrt() * (-y).exp() - (y / x).tanh() / 3


def reversed_operators(x: Tensor) -> Tensor:
    y = apart(x)
    return 1 - y * 2 / (3 - x) + 2.0 / y - 2**y / 3 + (7 - y) % 3


def comparisons(x: Tensor) -> Tensor:
    y = apart(x)
    return ((y * 2 > x) == (x + y < 1)).long() + (y != x * 1) + (2 * y >= 1) * (x - 1 <= y)


class Unit:
    """A class with operators of its own."""

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def __add__(self, other: Unit) -> Unit:
        return Unit(self.value + other.value)

    def __rmul__(self, factor: Any) -> Unit:
        return Unit(factor * self.value)

    def abs(self) -> Tensor:
        return self.value.abs()


def users_class(x: Tensor) -> Tensor:
    y = apart(x)
    one = Unit(y)
    return (one + y.item() * one).abs() + y * 2


FUNCTIONS = [
    order_of_writes, call_comes_first, rebound, walrus, dtypes, ranks, stacked, python_numbers,
    lists, methods, reversed_operators, comparisons, users_class,
]  # fmt: skip


@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("xs", [XS, XS[1:2]], ids=["all", "one"])
def test_values_are_the_loops(f, xs):
    assert_equal(vmap(f)(xs.clone()), loop(f)(xs.clone()))


@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_values_of_a_vmap_in_a_vmap(f):
    xs = torch.stack([XS, XS.flip(0)])
    assert_equal(vmap(vmap(f))(xs.clone()), loop(loop(f))(xs.clone()))


@pytest.mark.parametrize("f", [methods, reversed_operators, ranks, lists, walrus])
@pytest.mark.parametrize("derivative", [grad, jacfwd])
def test_derivatives_are_the_loops(f, derivative):
    def total(x: Tensor) -> Tensor:
        return f(x).sum()

    assert_equal(vmap(derivative(total))(XS), loop(derivative(total))(XS))
    outside = derivative(lambda xs: vmap(total)(xs).sum())
    assert_equal(outside(XS), derivative(lambda xs: loop(total)(xs).sum())(XS))


def assert_equal(mine: Tensor, theirs: Tensor) -> None:
    assert mine.dtype == theirs.dtype
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12, equal_nan=True)


def test_the_error_is_the_examples_own():
    def f(x: Tensor) -> Tensor:
        n = apart(x).long() - 2
        return 6 // n * 2 + n

    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        vmap(f)(torch.tensor([-1.0, 2.0, 1.0, 3.0, -2.0]))


@pytest.mark.parametrize("dim", [1, -2, -3])
@pytest.mark.parametrize("split", [False, True], ids=["as it is", "converted"])
def test_a_dim_that_is_none_is_refused(dim, split):
    def f(x: Tensor) -> Tensor:
        y = apart(x) if split else x
        return torch.stack([y, y], dim)

    with pytest.raises(IndexError, match="Dimension out of range"):
        vmap(f)(XS)
