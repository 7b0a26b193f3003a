"""Acceptance functions: functions, and sides of an `if`, that do nothing but compute; or nearly."""

from __future__ import annotations

import torch

from divergence.cases import array, case, integers, scalars

WEIGHTS = ((0.5, 2.0), (1.5,), (-1.0, 0.25, 3.0))
FACTOR = 1.5
OFFSET = torch.tensor(0.75, dtype=torch.float64)
SEEN: list = []
pair = array(2)
rows = array(2, 3)


def spring(k, y):
    p, v = y.unbind(-1)
    return torch.stack([v, k * (1 - p * p) * v - p], -1)


def weighed(k, y):
    """Loops over constants, lists of its own, and calls of another such function."""
    slopes = [spring(k, y)]
    new = y
    for row in WEIGHTS:
        new = y + 0.1 * sum(a * s for a, s in zip(row, slopes, strict=False) if a != 2.0)
        slopes.append(spring(k, new))
    return new, (slopes[0] - slopes[-1]).abs().amax(-1)


@case(scalars, pair)
def steps_of_a_method(k, y):
    total = k * 0
    for _ in range(4):
        new, error = weighed(k, y)
        if error < 0.4:
            y = new
            total = total + error
        else:
            y = 0.5 * y
    return y, total


def of_ranks(a, m):
    return (a * m - a).sum(-1) * a, torch.cat([m, a * m], 0)[..., 0], m[1].mean(0, keepdim=True)


@case(scalars, rows)
def ranks_that_differ(a, m):
    if a > 0:
        x, y, z = of_ranks(a, m)
    else:
        y, x, z = of_ranks(2 * a, m * a)[1], of_ranks(a, m)[0], m[0].mean(0, keepdim=True)
    return x, y, z


def itself(x, y=None):
    return x if y is None else y


@case(scalars)
def what_is_returned_as_it_is(x):
    y = itself(x * 2)
    z = itself(y)
    if x > 0:
        z.add_(1)
    return y, z is y


def twice(x):
    double = x * 2
    return double, [double, x]


@case(scalars)
def one_tensor_twice_in_a_result(x):
    if x > 0:
        a, b = twice(x)
    else:
        a, b = twice(-x)
    if x > 0.5:
        a.add_(1)
    return a, b[0], b[1]


def first_row(m):
    return m[0], m[1]


@case(rows, scalars)
def a_view_in_a_result(m, x):
    m = m * 1
    a, b = first_row(m)
    if x > 0:
        a.add_(1)
        b.mul_(2)
    return m


def adds(x, y):
    x += y
    return x * 2


@case(scalars, scalars)
def an_argument_written_into(x, y):
    z = x * 1
    if x > 0:
        w = adds(z, y)
    else:
        w = adds(z, -y)
    return z, w


def noted(x):
    SEEN.append(1)
    return x * 2


@case(scalars)
def what_can_be_seen_is_done_once(x):
    SEEN.clear()
    if x > -9:
        x = noted(x)
    if x > 0:
        x = x + 1
    return x


def with_default(x, scale=2.0, offset=OFFSET):
    return x * scale * FACTOR + offset


@case(scalars)
def defaults_and_globals(x):
    if x > 0:
        x = with_default(x)
    else:
        x = with_default(x, 3)
    return x + (OFFSET if x > 1 else 0)


@case(scalars, scalars)
def a_name_that_a_comprehension_hides(x, y):
    def all_of(a):
        FACTOR_ = [a * y for a in (1.0, 2.0)]
        return sum(FACTOR_) + a

    if x > 0:
        x = all_of(x)
    return x + all_of(y)


@case(scalars, scalars)
def swapped(x, y):
    if x > y:
        x, y = y, x
    return x, y


@case(scalars)
def a_second_name_in_one_side(x):
    y = x * 1
    z = y
    if x > 0:
        y = y * 2
    y += 1
    return y, z


@case(scalars)
def second_names_joined_again(x):
    y = x * 1
    if x > 0:
        z = y * 2
    else:
        z = y
    if x < 0.7:
        w = z
    else:
        w = x * 3
    w.add_(10)
    return y, z, w


@case(scalars)
def one_new_tensor_under_two_names(x):
    if x > 0:
        a = b = x * 2
    else:
        a, b = x * 3, x * 4
    a += 1
    return a, b


@case(scalars, scalars)
def the_same_for_both_sides(x, y):
    z = y * 1
    if x > 0:
        a = z
    else:
        a = z
    a += 1
    return a, z


@case(scalars)
def numbers_and_none_in_a_side(x):
    y = x * 2
    if x > 0:
        y, k, n = x, 2, None
    else:
        k, n = 3, 1.5
    return y * k + (0 if n is None else n)


@case(scalars)
def a_name_that_one_side_binds(x):
    if x > 0:
        y = x * 2
    z = x
    if x > 0:
        z = y + 1  # pyright: ignore[reportPossiblyUnboundVariable]
    return z


@case(scalars)
def a_name_of_its_own_in_a_side(x):
    if x > 0:
        h = x * 2
        y = h * h
    else:
        y = x
    return y


@case(integers(1, 20), scalars)
def whole_numbers(n, x):
    for _ in range(5):
        if n % 2 == 0:
            n = n // 2
        else:
            n = 3 * n + 1
        if n > 6:
            x = x * 0.5
    return n, x


@case(scalars, rows)
def shapes_of_sides_that_differ(x, m):
    if x > 0:
        y = m.sum(-1)
    else:
        y = m.sum(-1, keepdim=True)
    return y.sum()


@case(scalars)
def dtypes_of_sides_that_differ(x):
    if x > 0:
        y = x > 1
    else:
        y = x * 2
    return y * 1.0


@case(scalars)
def sides_that_would_fail_for_others(x):
    if x > 0:
        y = x.sqrt().log()
    else:
        y = (-x).sqrt()
    return y


@case(scalars, rows)
def a_test_with_names_of_modules(x, m):
    while torch.amax(m, -1).sum() < 8:
        if torch.sin(x) + torch.nn.functional.relu(x) > 0.2:
            m = torch.clamp(m, min=-1.0) + x.abs()
        else:
            m = m.transpose(0, 1).unsqueeze(0).sum(0).transpose(-1, -2) + 1
    return m
