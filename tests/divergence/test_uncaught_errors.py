"""An error that nobody catches is the one that the loop raises first, and names the example."""

from __future__ import annotations

import pytest
import torch

from divergence.cases import D
from forall import grad, vmap


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


def adds_a_text_to_a_number(x):
    return x * (x.item() + "one") if x > 1 else x


def adds_a_number_to_a_text(x):
    return x * len("one" + int(x * 4)) if x < -1 else x  # pyright: ignore[reportOperatorIssue]


def asks_a_tensor_what_it_cannot(x):
    return round(x) if x > 1 else x


def repeats_a_list_by_a_float(x):
    return x * len([1.0] * x.item()) if x > 1 else x


FUNCTIONS = (
    raises,
    adds_a_text_to_a_number,
    adds_a_number_to_a_text,
    asks_a_tensor_what_it_cannot,
    repeats_a_list_by_a_float,
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


def test_types_are_named_as_in_the_loop_where_all_examples_fail():
    def f(x):
        return x * (x.item() + "one")

    xs = torch.tensor([0.5, 1.5], dtype=D)
    found = first_error(f, xs)
    assert found is not None
    with pytest.raises(TypeError) as caught:
        vmap(f)(xs)
    assert str(caught.value) == str(found[1])


def test_no_other_way_that_was_tried_is_told_of():
    def f(x):
        return x * (x.item() + "one") if x > 1 else x

    for _ in range(3):
        with pytest.raises(TypeError) as caught:
            vmap(f)(torch.tensor([0.5, 1.5], dtype=D))
        assert caught.value.__context__ is None


def test_example_of_each_level_is_named():
    xs = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.2, 1.3]], dtype=D)
    with pytest.raises(ValueError, match="above one") as caught:
        vmap(vmap(raises))(xs)
    notes = "\n".join(caught.value.__notes__)
    assert "example 1 of 2" in notes
    assert "example 2 of 3" in notes
