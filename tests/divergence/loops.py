"""Acceptance functions: `while`, `for`, their `else`, recursion, comprehensions, generators."""

# ruff: noqa: B007 - each way of writing a loop is a case

from __future__ import annotations

import itertools

import torch

from divergence.cases import array, between, case, digits, integers, positive, scalars


@case(positive)
def while_alone(x):
    while x < 5:
        x = x * 1.7 + 0.1
    return x.log()


@case(scalars)
def while_and_else(x):
    n = 0
    while n < 4:
        x = x * 1.5 + 0.1
        if x > 2.5:
            x = x - 1
            break
        n += 1
    else:
        x = x * 10
    return x + n


@case(scalars)
def while_with_continue(x):
    total = torch.zeros((), dtype=x.dtype)
    n = 0
    while n < 6:
        n += 1
        x = x * 0.8 + 0.05
        if x > 0.5:
            continue
        total = total + x * n
    return total


@case(positive)
def while_true(x):
    steps = 0
    while True:
        if x > 8:
            return x + steps
        x = x * x + 0.5
        steps += 1


@case(positive, between(0.5, 3.0))
def while_of_two_tests(x, y):
    while x < 6 and not y > 9:
        x, y = x + y / 3, y * 1.3 + 0.1
    return x * y


@case(positive)
def while_with_walrus(x):
    total = x * 0
    while (x := x * 0.6) > 0.2:
        total = total + x.sqrt()
    return total


@case(scalars)
def for_with_break(x):
    for k in range(8):
        x = x * 1.3 + 0.11
        if x > 1.4 or x < -3:
            break
    return x * (k + 1)  # pyright: ignore[reportPossiblyUnboundVariable]


@case(scalars)
def for_and_else(x):
    for k in range(5):
        if x > 0.3 * k + 0.9:
            found = x * k
            break
        x = x + 0.15
    else:
        found = -x
    return found


@case(scalars)
def for_with_continue(x):
    total = x * 0
    for k in range(6):
        if (x * k).sin() > 0.3:
            continue
        total = total + x**k / (k + 1)
    return total


@case(scalars)
def return_from_inner_loop(x):
    for i in range(4):
        for j in range(3):
            x = x + 0.1 * j
            if x > i + 0.25:
                return x * (i + 1) - j
    return x


@case(scalars)
def breaks_of_nested_loops(x):
    total = x * 0
    for i in range(4):
        j = 0
        while True:
            total = total + x / (i + j + 1)
            j += 1
            if j > 2 or total > 1.3:
                break
        if total < -1:
            break
    return total + i  # pyright: ignore[reportPossiblyUnboundVariable]


@case(array(5))
def for_over_rows(v):
    last = v[0] * 0
    for e in v:
        if e < -1:
            continue
        if e > 1.2:
            break
        last = last * 0.5 + e
    return last


@case(scalars, integers(0, 6))
def for_over_a_range_of_n(x, n):
    for k in range(n):
        x = x + 0.1 * k
    return x


@case(scalars, integers(1, 4), integers(4, 9))
def for_over_a_range_of_three(x, low, high):
    for k in range(low, high, low):
        x = x * 0.9 + k
    for k in reversed(range(high)):
        x = x - 0.01 * k
    return x


@case(scalars)
def for_over_zip_and_enumerate(x):
    total = x * 0
    for i, (a, b) in enumerate(zip([x, x * 2, x * 3], [1.0, x, 2.0], strict=True)):
        if a * b > 1:
            total = total + i * a
        else:
            total = total - b
    return total


@case(array(4), integers(0, 4))
def for_over_a_list_of_differing_length(v, n):
    rows = list(v)[: int(n)]
    rows.append(v.sum())
    total = v[0] * 0
    for e in rows:
        total = total * 0.5 + e
    return total


@case(between(0.5, 9.0), grads=(0,))
def newton(a):
    x = a.clone()
    while (x * x - a).abs() > 1e-6:
        x = 0.5 * (x + a / x)
    return x


@case(integers(1, 40))
def collatz(n):
    steps = 0
    while n != 1:
        if n % 2 == 0:
            n = n // 2
        else:
            n = 3 * n + 1
        steps = steps + 1
    return steps


@case(between(-1.5, 1.9))
def bisection_with_early_return(c):
    low, high = c * 0 - 2, c * 0 + 2
    for _ in range(11):
        middle = (low + high) / 2
        value = middle**3 + middle - c
        if value.abs() < 1e-3:
            return middle - value / (3 * middle**2 + 1)
        if value > 0:
            high = middle
        else:
            low = middle
    return middle  # pyright: ignore[reportPossiblyUnboundVariable]


def _runge_kutta(field, y, h):
    """A step of Bogacki and Shampine's pair, and the estimate of its error."""
    k1 = field(y)
    k2 = field(y + h * k1 / 2)
    k3 = field(y + h * 3 * k2 / 4)
    new = y + h * (2 * k1 + 3 * k2 + 4 * k3) / 9
    k4 = field(new)
    error = h * (-5 * k1 / 72 + k2 / 12 + k3 / 9 - k4 / 8)
    return new, error.abs().max()


@case(between(0.5, 3.0), array(2))
def adaptive_runge_kutta(rate, y):
    def field(y):
        return torch.stack([rate * y[1], -y[0] - 0.3 * y[1]])

    t, h = 0.0, torch.tensor(0.9, dtype=y.dtype)
    for _ in range(40):
        if t > 0.999:
            break
        if t + h > 1:
            h = 1 - t
        new, error = _runge_kutta(field, y, h)
        if error < 1e-2:
            t, y = t + h, new
        h = h * (0.9 * (1e-2 / (error + 1e-9)) ** 0.3).clamp(0.3, 2.0)
    return y


def _simpson(f, a, b):
    return (b - a) / 6 * (f(a) + 4 * f((a + b) / 2) + f(b))


@case(between(0.5, 6.0))
def recursive_adaptive_quadrature(k):
    def f(t):
        return (k * t).sin() * t

    def integral(a, b, whole, depth):
        middle = (a + b) / 2
        left, right = _simpson(f, a, middle), _simpson(f, middle, b)
        if depth == 0 or (left + right - whole).abs() < 1e-3:
            return left + right
        return integral(a, middle, left, depth - 1) + integral(middle, b, right, depth - 1)

    a, b = torch.tensor(0.0, dtype=k.dtype), torch.tensor(2.0, dtype=k.dtype)
    return integral(a, b, _simpson(f, a, b), 4)


@case(scalars, integers(0, 5))
def recursion_on_a_number(x, n):
    def power(n):
        return x * 0 + 1 if n == 0 else x * power(n - 1)

    return power(n)


@case(integers(1, 60), integers(1, 60))
def greatest_common_divisor(a, b):
    return a if b == 0 else greatest_common_divisor(b, a % b)


@case(scalars)
def two_functions_that_call_each_other(x):
    def even(x):
        return x if x > 1.3 else odd(x + 0.4)

    def odd(x):
        return -x if x > 1.9 else even(x * 0.9 + 0.5)

    return even(x)


@case(array(5))
def filtered_comprehension(v):
    chosen = [e * e for e in v if e > 0.2]
    return sum(chosen, v.sum())


@case(array(4), integers(1, 4))
def comprehensions(v, n):
    squares = [v[k] ** 2 for k in range(n)]
    named = {k: (e if e > 1 else -e) for k, e in enumerate(squares)}
    pairs = [a * b for a in squares for b in v if a > b]
    few = {int(n), 2}
    return torch.stack(squares).sum() + sum(named.values()) + len(pairs) + len(few)


@case(array(4))
def generator_expression(v):
    return sum(e.exp() if e < 0 else e for e in v if e < 1.3) + v.sum()


@case(positive)
def generator(x):
    def halves(x):
        while x > 0.3:
            yield x
            x = x / 2

    total = x * 0
    for n, part in enumerate(halves(x)):
        total = total + part.sin() * (n + 1)
    return total


@case(positive)
def generator_advanced_by_hand(x):
    def steps(x):
        k = yield x
        while k is not None and x < 3:
            x = x + k
            k = yield x

    ways = steps(x)
    y = next(ways)
    while y < 2.5:
        y = ways.send(0.7)
    return y * x


@case(scalars)
def iterators(x):
    total = x * 0
    for k in itertools.count():
        if x * k > 1.1 or k == 6:
            break
        total = total + next(iter([x, 2 * x])) * k
    for a, b in itertools.pairwise([x, total, x * total]):
        total = total + (max(b, a))
    return total


@case(array(3, 3))
def power_iteration(a):
    a = a @ a.T + torch.eye(3, dtype=a.dtype) * 0.1
    v, old = torch.ones(3, dtype=a.dtype), torch.tensor(0.0, dtype=a.dtype)
    for _ in range(30):
        w = a @ v
        value = w.norm()
        v = w / value
        if (value - old).abs() < 1e-2 * value:
            break
        old = value
    return value  # pyright: ignore[reportPossiblyUnboundVariable]


@case(positive)
def a_loop_that_carries_a_list(x):
    seen = [x]
    while seen[-1] < 4 and len(seen) < 6:
        seen.append(seen[-1] * 1.4 + 0.2)
    return seen[-1] + sum(seen) / len(seen)


@case(positive)
def a_finished_lane_is_not_computed_again(x):
    # One step more and the root is of a negative number: NaN, also in the derivative.
    while x > 0.8:
        x = x - (x - 0.5).sqrt()
    return x


@case(scalars)
def an_untaken_branch_that_would_not_end(x):
    if x > 0:
        while x < 3:
            x = x * 1.5
    else:
        while x > -3:
            x = x * 1.5 - 0.1
    return x


@case(digits(6, high=3), scalars)
def a_search_with_a_flag(n, x):
    found = False
    place = 0
    while not found and place < 6:
        if n[place] == 2:
            found = True
        else:
            place += 1
    return x * place if found else -x
