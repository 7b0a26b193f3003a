"""A name that some examples have not bound: to read it raises, whatever becomes of its value."""

# That the names may have no value is what is tested.
# pyright: reportPossiblyUnboundVariable=false, reportUnusedExpression=false

import pytest
import torch

import forall


def copied(x):
    if x > 0:
        i = 1
    g = i
    g = 2
    return x * g


def left_unused(x):
    for i in range(int(x)):  # noqa: B007
        pass
    g = i  # noqa: F841
    return x * 2


def in_a_list(x):
    if x > 0:
        i = 1
    pair = [i, 2]
    return x * pair[1]


def alone(x):
    if x > 0:
        i = 1
    i  # noqa: B018
    return x * 2


def deleted(x):
    if x > 0:
        i = 1
    del i
    return x * 2


def first(a, b):
    return a


def given_to_a_function(x):
    if x > 0:
        i = x * 2
    return first(x, i)


def after_a_loop_over_numbers(x):
    a = x.item()
    for i in range(int(a)):  # noqa: B007
        a = a * 0.5
    g = i
    for i in (1, 2):
        g = i
    return x * a * g


FUNCTIONS = [
    copied, left_unused, in_a_list, alone, deleted, given_to_a_function, after_a_loop_over_numbers,
]  # fmt: skip


@pytest.mark.parametrize("strategy", ["together", "loop", "measured"])
@pytest.mark.parametrize("func", FUNCTIONS)
@pytest.mark.parametrize("xs", [[2.0, -0.5, 3.0], [-0.5, 2.0, 3.0]], ids=["later", "first"])
def test_raises_as_in_the_loop(func, xs, strategy, monkeypatch):
    monkeypatch.setattr(forall.config, "strategy", strategy)
    for _ in range(3):
        with pytest.raises(UnboundLocalError):
            forall.vmap(func)(torch.tensor(xs))


@pytest.mark.parametrize("func", FUNCTIONS)
def test_all_have_bound_it(func):
    xs = torch.tensor([2.0, 1.5, 3.0])
    torch.testing.assert_close(forall.vmap(func)(xs), torch.stack([func(x) for x in xs]))


def test_a_name_that_is_bound_on_every_way_that_reads_it():
    def func(x):
        if x > 0:
            i = 1
        y = x * 2
        if x > 0:
            y = y + i
        return y

    xs = torch.tensor([2.0, -0.5, 3.0])
    torch.testing.assert_close(forall.vmap(func)(xs), torch.stack([func(x) for x in xs]))
