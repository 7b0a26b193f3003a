"""Numbers where the lanes really part: values and derivatives are the loop's."""

import pytest
import torch

from forall import vmap
from forall._divergence import scalar_factories  # noqa: F401 - enters torch.tensor and its like
from forall._divergence.batched_scalar import read_scalar
from oracle import loop

XS = torch.tensor([1.0, 3.0, 2.0, 3.0, 0.5])


def repeated(x, item):
    total = x
    for _ in range(int(item(x))):
        total = total * item(x) + 1
    return total


def looked_up(x, item):
    return x * {0: 10.0, 1: 20.0, 2: 0.5, 3: 2.0}[int(item(x))]


def branched(x, item):
    n, m = item(x), item(x * x)
    y = 2.0 if n > 1.5 else 3.0 * n
    return x * (y + m) ** 2 / (1 + n)


def read_before_and_after(x, item):
    n = item(x)
    y = x * n
    if n > 2:
        y = y + n // 2 + round(n, 1)
    return y + 7 % n


def sized(x, item):
    return torch.arange(int(item(x))).sum() + x


def of_mixed_types(x, item):
    k = item(x.long()) - 1
    v = 2**k
    return x * v + (v if k >= 0 else 0)


def guarded(x, item):
    n = item(x)
    return x / 0.25 if n == 3 else x * (1 / (n - 3))


def tensored(x, item):
    n = item(x)
    if n > 2:
        return torch.tensor([n, 2.0]) * x + torch.full((2,), n)
    return torch.stack([x * n, x])


def caught(x, item):
    try:
        return x * (1 / (item(x) - 3))
    except ZeroDivisionError:
        return x * 100


FUNCTIONS = [
    caught,
    repeated,
    looked_up,
    branched,
    read_before_and_after,
    sized,
    of_mixed_types,
    guarded,
    tensored,
]


@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_values_and_gradients_are_the_loops(f):
    got_at, want_at = XS.clone().requires_grad_(), XS.clone().requires_grad_()
    got = vmap(lambda x: f(x, read_scalar))(got_at)
    want = loop(lambda x: f(x, lambda t: t.item()))(want_at)
    torch.testing.assert_close(got, want)
    got.sum().backward()
    want.sum().backward()
    torch.testing.assert_close(got_at.grad, want_at.grad)


@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_under_a_second_vmap(f):
    xs = torch.stack([XS, XS.flip(0) + 0.25])
    got = vmap(vmap(lambda x: f(x, read_scalar)))(xs)
    want = loop(loop(lambda x: f(x, lambda t: t.item())))(xs)
    torch.testing.assert_close(got, want)
