"""An error that nobody catches is the one that the loop raises first, and names the example."""

from __future__ import annotations

import pytest
import torch

from forall import grad, vmap
from parting.cases import D


def raises(x):
    if x > 1:
        raise ValueError("above one")
    if x < -1:
        raise KeyError("below")
    return x


def asserts(x):
    y = x * 2 if x > 0 else x
    if not y < 2:  # not `assert`, whose message pytest rewrites
        raise AssertionError("too large")
    return y


def fails_in_a_loop(x):
    while x < 3:
        x = x + 1
        if 2.25 < x < 2.45:
            raise ArithmeticError("in the loop")
    return x


def fails_at_different_operators(x):
    if x > 1:
        return torch.linalg.cholesky(-x.reshape(1, 1))
    y = torch.linalg.inv((x * 0).reshape(1, 1)) if x < -1 else x.reshape(1, 1)
    return y


def index_of_a_list(x):
    return x * [1.0, 2.0][int(x.abs() * 2)]


def key_of_a_dict(x):
    return x * {0: 1.0, 1: 5.0}[int(x.abs() * 2)]


def raises_another_in_except(x):
    try:
        if x > 0.5:
            raise KeyError("first")
    except KeyError as error:
        raise RuntimeError("second") from error
    return x


def a_name_never_set(x):
    if x < 1:
        y = x
    return y  # pyright: ignore[reportPossiblyUnboundVariable]


def second_half_fails(x):
    y = x.exp()
    if y > 2:
        y = y + y.reshape(1, 1) @ torch.ones(2, 1 if y < 3 else 2, dtype=D)
    return y


FUNCTIONS = (
    raises,
    asserts,
    fails_in_a_loop,
    fails_at_different_operators,
    index_of_a_list,
    key_of_a_dict,
    raises_another_in_except,
    a_name_never_set,
    second_half_fails,
)
ORDERS = {
    "the first fails": [1.3, 0.2, -1.4, 1.7],
    "one in the middle": [0.2, -0.3, 1.3, 0.4, -1.4],
    "the last fails": [0.3, -0.2, 0.1, -0.4, 1.2],
    "below before above": [0.1, -1.3, 1.4, 0.3],
    "two of each": [0.2, -0.3, 0.1, -1.2, 1.6, 1.2, -1.7],
}


def first_error(f, xs):
    for i, x in enumerate(xs):
        try:
            f(x)
        except Exception as error:
            return i, error
    return None


@pytest.mark.parametrize("derive", [lambda f: f, lambda f: grad(lambda x: f(x).sum())])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_it_is_the_loops_first_and_names_the_example(f, order, derive):
    xs = torch.tensor(ORDERS[order], dtype=D)
    number, truth = first_error(f, xs) or pytest.skip("no example fails in this order")
    with pytest.raises(type(truth)) as caught:
        vmap(derive(f))(xs)
    assert str(caught.value) == str(truth)
    notes = "\n".join(getattr(caught.value, "__notes__", []))
    assert f"example {number} of {len(xs)}" in notes


@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_caught_outside_nothing_stays_behind(f):
    xs = torch.tensor(ORDERS["two of each"], dtype=D)
    found = first_error(f, xs)
    assert found is not None
    with pytest.raises(type(found[1])):
        vmap(f)(xs)
    assert torch.equal(vmap(lambda x: x * 2 if x > 0 else x)(xs), torch.where(xs > 0, xs * 2, xs))


def test_example_of_each_level_is_named():
    xs = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.2, 1.3]], dtype=D)
    with pytest.raises(ValueError, match="above one") as caught:
        vmap(vmap(raises))(xs)
    notes = "\n".join(caught.value.__notes__)
    assert "example 1 of 2" in notes
    assert "example 2 of 3" in notes
