"""What an operator answers with may be a tensor of before: what is written into it is seen there.

The loop is the function as Python has it, each operator by its law.
"""

from __future__ import annotations

import pytest
import torch

from by_groups import EXPECTED
from forall import cond, fori_loop, grad, jvp, scan, switch, vmap, while_loop
from forall._compat import pytree
from oracle import difference, loop

D = torch.float64
XS = torch.tensor([[3.0, 1.0, 1.0], [1.0, -3.0, 1.5], [1.0, 2.0, 3.0], [-1.0, -2.0, 3.5]], dtype=D)


def of_two(x):
    a, b = x * 1, x * 2
    cond(x.sum() > 0, lambda: a, lambda: b).add_(1)
    return a, b


def by_the_other_name(x):
    a, b = x * 1, x * 2
    u = cond(x.sum() > 0, lambda: a, lambda: b)
    a.mul_(3)
    b[0].add_(5)
    return a, b, u


def of_a_part(x):
    a, b = torch.outer(x, x), x * 2
    u = cond(x[0] > 0, lambda: a[1], lambda: b)
    u[1:].mul_(4)
    a[0].add_(1)
    a[1].add_(2)
    return a, b, u


def of_an_operand(x):
    a = x * 1
    u = cond(x.sum() > 0, lambda v: v, lambda v: v + 1, a)
    u.mul_(2)
    return a, u


def in_a_tree(x):
    held = {"a": x * 1, "b": x * 2}
    u, v = cond(x[0] > 1, lambda h: (h["a"], h["b"]), lambda h: (h["b"], h["a"]), held)
    u[0].add_(10)
    v.neg_()
    return held


def of_three(x):
    rows = torch.outer(x, x + 1)
    i = (x > 0).sum() - 1
    switch(i, [lambda: rows[0], lambda: rows[1], lambda: rows[2]]).add_(7)
    return rows


def of_a_cond_in_a_cond(x):
    a, b, c = x * 1, x * 2, x * 3

    def inner():
        return cond(x[1] > 0, lambda: a, lambda: b)

    cond(x[0] > 0, inner, lambda: c)[:2].add_(7)
    return a, b, c


def in_a_branch(x):
    a, b = x * 1, x * 2
    u = cond(x.sum() > 0, lambda: a, lambda: b)
    cond(x[0] > 0, lambda: u.add_(3), lambda: u.mul_(3))
    return a, b, u


def in_a_branch_of_python(x):
    a, b = x * 1, x * 2
    u = cond(x.sum() > 0, lambda: a, lambda: b)
    if x[0] > 0:
        u += 3
    return a, b, u


def after_no_step(x):
    a = x * 1
    u = while_loop(lambda v: v.sum() < 3, lambda v: v + 1, a)
    u.mul_(2)
    return a, u


def after_steps_in_place(x):
    a = x * 1
    u = while_loop(lambda v: v.sum() < 6, lambda v: v.add_(1), a)
    u.mul_(2)
    return a, u


def by_the_name_of_before(x):
    a = x * 1
    u = while_loop(lambda v: v.sum() < 3, lambda v: v * 2 + 1, a)
    a.mul_(2)
    return a, u


def swapped_some_times(x):
    a, b = x * 1, x * 2
    n = (x > 0).sum()
    u, v = fori_loop(0, n, lambda _, uv: (uv[1], uv[0]), (a, b))
    u.add_(10)
    v[0].mul_(5)
    return a, b


def of_what_the_body_captures(x):
    a, b = x * 1, x * 2
    _, u = while_loop(
        lambda iv: x[0] > iv[0], lambda iv: (iv[0] + 1, b), (torch.zeros((), dtype=D), a)
    )
    u.add_(1)
    return a, b


def carried_by_a_scan(x):
    a = x * 1

    def step(c, e):
        return (cond(e > 0, lambda: c, lambda: c + e), e)

    u, _ = scan(step, a, x)
    u.mul_(2)
    return a, u


CASES = [
    of_two,
    by_the_other_name,
    of_a_part,
    of_an_operand,
    in_a_tree,
    of_three,
    of_a_cond_in_a_cond,
    in_a_branch,
    in_a_branch_of_python,
    after_no_step,
    after_steps_in_place,
    by_the_name_of_before,
    swapped_some_times,
    of_what_the_body_captures,
    carried_by_a_scan,
]


def check(f, xs=XS):
    """Several calls: from the second on they are replayed."""
    for k in range(3):
        told = difference(vmap(f)(xs + 0.1 * k), loop(f)(xs + 0.1 * k))
        assert told is None, told


@pytest.mark.parametrize("f", CASES)
def test_it_is_seen(f):
    check(f)


@pytest.mark.parametrize("f", CASES)
@EXPECTED
def test_in_both_of_two_levels(f):
    check(vmap(f), torch.stack([XS, XS.flip(0) - 0.5]))


@pytest.mark.parametrize("f", CASES)
@EXPECTED
def test_two_levels_against_two_loops(f):
    xs = torch.stack([XS, XS.flip(0) - 0.5])
    told = difference(vmap(vmap(f))(xs), loop(loop(f))(xs))
    assert told is None, told


def total(f):
    def summed(x):
        return sum((v * v).sum() for v in pytree.get_leaves(f(x)))

    return summed


@pytest.mark.parametrize("f", CASES)
def test_with_its_history(f):
    check(grad(total(f)))


@pytest.mark.parametrize("f", CASES)
def test_with_its_tangent(f):
    check(lambda x: jvp(f, (x,), (torch.ones_like(x),)))


@pytest.mark.parametrize("f", CASES)
def test_outside_of_all_examples(f):
    (found,) = torch.autograd.grad(total(vmap(f))(xs := XS.clone().requires_grad_()), xs)
    (expected,) = torch.autograd.grad(total(loop(f))(xs := XS.clone().requires_grad_()), xs)
    torch.testing.assert_close(found, expected)
