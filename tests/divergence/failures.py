"""Acceptance functions: `try`, `except`, `else`, `finally`, `raise`, with only some failing."""

from __future__ import annotations

import torch

from divergence.cases import array, case, digits, integers, scalars


class _RefusedError(Exception):
    def __init__(self, value):
        super().__init__("refused")
        self.value = value


@case(scalars)
def try_where_some_fail(x):
    try:
        if x > 0.5:
            raise ValueError("large")
        y = x * 2
    except ValueError:
        y = x.exp()
    return y + x


@case(scalars)
def try_where_none_fails(x):
    try:
        y = x.sin()
        if x > 0:
            y = y * 2
    except RuntimeError:
        y = x
    return y


@case(scalars)
def try_else_finally(x):
    count = 0
    try:
        if x < -0.8:
            raise KeyError("low")
        if x > 1:
            raise ValueError("high")
    except KeyError:
        y = x * 3
    except (ValueError, TypeError) as error:
        y = x.sin() + len(str(error))
    else:
        y = x * x
    finally:
        count += 2
    return y * count


@case(scalars)
def an_error_that_carries_a_value(x):
    def guarded(x):
        if x > 0:
            raise _RefusedError(x * 2)
        return x - 1

    try:
        return guarded(x) * guarded(x - 1.1)
    except _RefusedError as refused:
        return refused.value.exp()


@case(scalars)
def errors_within_errors(x):
    try:
        try:
            if x > 0.2:
                raise _RefusedError(x)
            y = x
        except _RefusedError:
            if x > 1.1:
                raise
            y = x * 5
        y = y + 1
    except Exception:
        y = -x
    return y


@case(scalars, integers(-1, 3))
def errors_of_python(x, n):
    k = int(n)
    try:
        y = x * [1.0, 2.0][k]
    except IndexError:
        y = x * 10
    try:
        y = y + {0: 1, 1: 3}[k]
    except KeyError:
        y = y - 1
    try:
        y = y + 6 / k
    except ZeroDivisionError:
        y = y * 7
    return y


@case(scalars)
def assertion_caught(x):
    try:
        assert x > 0, "negative"
        return x.log()
    except AssertionError:
        return x * 2


@case(array(2, 2), grads=(0,))
def factorisation_of_some(a):
    b = a @ a.T + torch.eye(2, dtype=a.dtype) * (a[0, 0] - 0.3)
    try:
        return torch.linalg.cholesky(b)
    except torch.linalg.LinAlgError:
        return torch.full_like(b, 0.25) * a


@case(digits(4, high=3), array(4))
def inverse_of_some(n, v):
    a = torch.diag(n.to(v.dtype))
    try:
        return torch.linalg.inv(a) @ v
    except torch.linalg.LinAlgError:
        return v * 3


@case(scalars)
def a_retried_step(x):
    step = 1.0
    for _ in range(6):
        try:
            y = x - step
            if y < -1.5:
                raise ArithmeticError("too far")
            break
        except ArithmeticError:
            step = step / 2
    else:
        y = x * 0
    return y * 2 + step


@case(scalars)
def finally_returns_to_the_loop(x):
    seen = []
    for k in range(4):
        try:
            if x * k > 1:
                break
            if x * k < -2:
                return x * len(seen)
            x = x + 0.05
        finally:
            seen.append(k)
    return x + len(seen)


@case(scalars)
def stop_iteration(x):
    parts = iter([x, x * 2, x * 3] if x > 0 else [x])
    total = next(parts)
    try:
        total = total + next(parts) * 2
        total = total + next(parts) * 3
    except StopIteration:
        total = total - 1
    return total + next(parts, 4.0)
