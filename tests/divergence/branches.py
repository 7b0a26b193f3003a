"""Acceptance functions: `if` in all its forms, tests, boolean operators, `match`, `assert`."""

# ruff: noqa: RET505, PLR5501 - each way of writing a branch is a case

from __future__ import annotations

import torch

from divergence.cases import array, between, case, digits, flags, integers, positive, scalars


@case(scalars)
def if_else(x):
    if x > 0:
        y = x.exp()
    else:
        y = x * x - 1
    return y + x


@case(scalars)
def if_alone(x):
    y = x.sin()
    if x < 0.3:
        y = y * x
    return y


@case(scalars)
def elif_chain(x):
    if x < -1.1:
        return x * x
    elif x < 0.1:
        y = x.exp()
    elif x < 1.1:
        y = x.sin() * 3
    else:
        y = x**3
    return y - x


@case(scalars, scalars)
def nested_if(x, y):
    if x > 0:
        if y > 0:
            z = x * y
        else:
            z = x - y
            if x > 1:
                z = z * 2
    else:
        if y > x:
            z = y.cos()
        else:
            z = x.cos() * y
    return z + 1


@case(scalars)
def early_return(x):
    if x > 0.7:
        return x.sqrt()
    x = x * 2 + 1
    if x > 0.4:
        return x**2
    y = x.sin()
    return y - x


@case(scalars, scalars)
def return_in_both_branches(x, y):
    if x > y:
        if x > 1:
            return x
        return x * y
    return y - x


@case(scalars)
def ternary(x):
    return x.exp() if x > 0.2 else x - 1


@case(scalars)
def ternary_in_ternary(x):
    y = x * 2 if x > 1 else (x * 3 if x > 0 else (x * 5 if x > -1 else x * x))
    return y + (1 if x > 0.5 else 2)


@case(scalars, scalars)
def and_or(x, y):
    if x > 0 and y > 0:
        return x * y
    if x > 1 or y < -1:
        return x + 2 * y
    return x - y


@case(scalars)
def and_guards_its_right_side(x):
    # Where x is negative, the right side would be NaN, and its derivative with it.
    if x > 0 and x.sqrt() < 1:
        return x.sqrt()
    return x


@case(scalars, scalars)
def or_gives_an_operand(x, y):
    z = (x > 0 and y) or x * 2
    return z * 3


@case(scalars, scalars)
def negation(x, y):
    if not x > 0:
        return y
    if not (x > 1 or not y > 0):
        return x * y
    return x


@case(scalars)
def chained_compare(x):
    if -1 < x < 0.5:
        return x * 10
    if 0.5 <= x < 1.2 < x + 1:
        return x.exp()
    return -x


@case(scalars)
def walrus(x):
    if (y := x * x - 1) > 0:
        return y.sqrt()
    return (z := y.exp()) + z * y


@case(integers(0, 5), scalars)
def match_on_values(n, x):
    match int(n):
        case 0:
            return x
        case 1 | 2:
            return x * x
        case k if k > 3:
            return x.exp() + k
        case _:
            return x.sin()


@case(scalars, scalars)
def match_on_structure(x, y):
    point = ("above", x, y) if x > y else ("below", x)
    match point:
        case ("above", a, b):
            return a - b
        case ("below", a) if a > -1:
            return a * a
        case _:
            return x + y


@case(positive)
def assertion_that_holds(x):
    assert x > 0, "logarithm"
    y = x.log()
    assert not y.isnan()
    if y > 0:
        assert x > 1
        return y
    return -y


@case(array(4), array(4, low=0.1))
def tests_of_whole_arrays(v, w):
    if (v > 0).all():
        return v.log()
    if (v > 1).any():
        return v * w
    if v.sum() < w.mean():
        return v - w
    return w


@case(array(3))
def any_and_all_of_python(v):
    if any(a > 1.2 for a in v):
        return v * 2
    if all(a < 0.4 for a in v):
        return v.exp()
    return v - 1


@case(scalars, scalars)
def min_and_max_of_python(x, y):
    low, high = min(x, y), max(x, y, x * y)
    return low * 2 + high.sin(), abs(x) + sum([x, y, low])


@case(array(4))
def sorted_by_python(v):
    a, b, c, d = sorted(v, key=lambda e: (e - 0.2).abs())
    return a + 2 * b + 3 * c + 4 * d.sin()


@case(scalars)
def a_name_of_one_branch(x):
    if x > 0.1:
        root = x.sqrt()
    y = x * 2
    if x > 0.6:
        y = y + root  # pyright: ignore[reportPossiblyUnboundVariable]
    return y


@case(scalars)
def a_name_is_deleted(x):
    y = x * 3
    if x > 0:
        del y
        z = x
    else:
        z = y
    try:
        return y + z  # pyright: ignore[reportPossiblyUnboundVariable]
    except UnboundLocalError:
        return z.exp()


@case(scalars)
def none_in_one_branch(x):
    found = None
    if x > 0.4:
        found = x * 3
    if found is None:
        return x
    return found * x


@case(digits(5, high=3), array(5))
def a_helper_that_answers_none(mask, v):
    def usable(m):
        return None if (m > 0).sum() > 3 else m

    m = usable(mask)
    return v if m is None else v * m


@case(scalars, scalars)
def swap(x, y):
    if x > y:
        x, y = y, x
    if y > 1:
        x, y = y * x, x
    return x - 2 * y


@case(scalars, scalars)
def augmented(x, y):
    x = x.clone()
    y = y * 1
    if x > 0:
        x += y
        y *= 3
    else:
        x -= 1
    y /= 2 if y > 1 else 4
    return x, y


@case(scalars)
def ten_ifs(x):
    y = x
    for k in range(10):
        if (y * (k + 1.7)).sin() > 0.1:
            y = y * 1.1 + 0.03
        else:
            y = y - 0.2
    return y


@case(flags, scalars)
def a_flag(flag, x):
    if flag:
        return x.exp()
    return x


@case(digits(3), array(3))
def equal_and_allclose(n, v):
    if torch.equal(n, torch.tensor([0, 1, 2])) or n[0] == n[1]:
        return v
    if torch.allclose(v[1:], v[:-1], atol=0.9):
        return v * v
    return v.exp()


@case(scalars, between(1.0, 3.0))
def agree_then_part(x, y):
    if y > 0:
        x = x + y
    if x > 1:
        x = x * y
    if y < 5:
        x = x - 1
    return x


@case(scalars)
def a_test_between_uses(x):
    before = x.sin()
    if x > 0:
        inside = before * x
    else:
        inside = before - x
    return before + inside, before * 2, inside


@case(array(3), array(2))
def shapes_differ_inside(v, w):
    y = v if v.sum() > 0 else w
    if w[0] > 0:
        y = torch.cat([y, w])
    return (y * y).sum() / len(y)


@case(scalars)
def dtypes_differ_inside(x):
    y = x.long() if x > 0 else x
    return y * 2.5


@case(scalars)
def a_branch_that_only_fails_elsewhere(x):
    table = {"low": 2.0}
    if x < 0:
        return x * table["low"]
    return x + len(table)


@case(scalars)
def a_nan_guard(x):
    y = (x - 0.3).sqrt()
    if y.isnan():
        return x
    return y


@case(scalars, scalars)
def tests_joined_as_tensors(x, y):
    if torch.logical_or(x > 1, y > 1) & ~(x < 0):
        return x * y
    return x + y
