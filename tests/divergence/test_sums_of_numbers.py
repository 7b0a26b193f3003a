"""`sum` of the numbers of an example, which rounds less than `+` does from Python 3.12 on."""

import functools
import operator
import sys

import pytest
import torch

from forall import vmap
from oracle import same

X = torch.tensor(
    [[1.0, 1e100, 1.0, -1e100], [0.1, 0.2, 0.3, 0.7], [-0.0, 0.0, -0.0, -0.0]], dtype=torch.float64
)
K = torch.tensor([[3, 2**60, -5, 1], [1, 2, 3, 4], [0, 0, 0, 7]])


def of_items(x):
    return sum([v.item() for v in x]) if x.sum() > -1 and x[1] > 0.1 else x[0].item()


def with_start(x):
    return sum([v.item() for v in x], x[1].item() if x[1] > 0.1 else 0.5)


def of_a_generator(x):
    return sum(v.item() for v in x) * 2 if x[1] > 0.1 else sum((v.item() for v in x), 1)


def with_plain_numbers(x):
    a, b, c, d = (v.item() for v in x)
    return sum((1e100, a, 3, b, c, True, d, -1e100)) if x[1] > 0.1 else sum((a, b, 2, c), d)


def of_products(x):
    return sum([v.item() * 0.1 for v in x]) if x[1] > 0.1 else 0.0


def of_integers(x):
    return sum([int(v.item() > 0.15) + 3 for v in x]) if x[1] > 0.1 else 0


def where_none_diverge(x):
    return sum([v.item() for v in x])


def where_none_diverge_with_start(x):
    return sum((v.item() for v in x), 0.5) + sum([v.item() for v in x], start=-0.0)


def where_none_diverge_of_mixed(x):
    a, b, c, d = (v.item() for v in x)
    return sum([3, True, a, 1, b, 2.5, c, False, d, 2**60]) + sum([int(a > 0), b, c, d]) * 2


def two_in_a_loop(x):
    found = 0.0
    for n in range(2):
        found = found + sum([v.item() * 0.1 for v in x]) * sum([v.item() + n for v in x])
    return found


def by_plus(x):
    a, b, c, d = [v.item() for v in x]
    return a + b + c + d + functools.reduce(operator.add, [a, b, c, d], 0)


def of_what_sum_gave(x):
    part = sum([v.item() for v in x])
    return part + x[0].item() - part


F = [
    of_items,
    with_start,
    of_a_generator,
    with_plain_numbers,
    of_products,
    of_integers,
    where_none_diverge,
    where_none_diverge_with_start,
    where_none_diverge_of_mixed,
    two_in_a_loop,
    by_plus,
    of_what_sum_gave,
]


@pytest.mark.parametrize("f", F)
def test_it_is_that_of_each_example(f):
    for _ in range(2):
        found = vmap(f)(X)
        assert same(found, torch.stack([torch.tensor(f(x), dtype=found.dtype) for x in X]))


def test_of_integers_it_is_exact():
    def f(k):
        return sum([v.item() for v in k]) if k[0] > 0 else sum([v.item() for v in k], 1)

    assert same(vmap(f)(K), torch.stack([torch.tensor(f(k)) for k in K]))


def test_of_complex_numbers():
    def parted(z):
        return sum([v.item() for v in z]) if z[0].real > 0.5 else z[1].item()

    def whole(z):
        return sum([v.item() for v in z])

    def mixed(z):
        a, b, c, d = (v.item() for v in z)
        return sum([1, a.real, b.imag, 2, c, True, d, b.real, a, 2**60, b], 0.5)

    z = torch.complex(X, X.flip(1))
    for f in (parted, whole, mixed):
        found = vmap(f)(z)
        assert same(found, torch.stack([torch.tensor(f(e), dtype=found.dtype) for e in z])), f


@pytest.mark.xfail(
    sys.version_info >= (3, 12),
    strict=True,
    reason="the call of sum by another function is not seen, so floats of examples are added by +",
)
def test_of_a_sum_that_another_function_calls():
    def f(x):
        return next(map(sum, [[v.item() for v in x]]))

    found = vmap(f)(X)
    assert same(found, torch.stack([torch.tensor(f(x), dtype=found.dtype) for x in X]))
