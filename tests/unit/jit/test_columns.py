"""A log-softmax of many rows of few entries, taken along the rows: the same bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from forall import grad, jit, vmap


def clear(x, y):
    return F.log_softmax(x, -1).mul(y).sum()


FUNCTIONS = {
    "value": lambda x, y: F.log_softmax(x, -1),
    "value and more": lambda x, y: (F.log_softmax(x, -1) * 2, x + 1),
    "slope": grad(clear),
    "slope of each": vmap(grad(clear)),
    "written to": lambda x, y: F.log_softmax(x, -1).mul_(y),
    "twice": lambda x, y: F.log_softmax(F.log_softmax(x, -1) + y, -1),
    "slope of what is written to": grad(lambda x, y: F.log_softmax(x * y, -1).mul(2).sin_().sum()),
}


def numbers(random, odd, *shape, dtype):
    x = 3 * torch.randn(shape, generator=random, dtype=dtype)
    if odd:
        at = torch.rand(shape, generator=random)
        for low, number in ((0.0, -torch.inf), (0.2, torch.inf), (0.25, torch.nan), (0.3, 0.0)):
            x[(at >= low) & (at < low + 0.01)] = number
    return x


@pytest.mark.parametrize("name", FUNCTIONS)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    entries=st.integers(1, 17),
    rows=st.sampled_from([(64,), (128,), (640,), (4, 16, 4), (2, 64), (100,), (8, 128), (3000,)]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    threads=st.sampled_from([1, 2]),
)
def test_each_bit_is_that_of_the_function(name, entries, rows, dtype, threads):
    f, before = FUNCTIONS[name], torch.get_num_threads()
    g, random = jit(f), torch.Generator().manual_seed(entries)
    torch.set_num_threads(threads)
    try:
        for odd in (False, False, True):
            x, y = (numbers(random, odd, *rows, entries, dtype=dtype) for _ in range(2))
            for a, b in zip(many(g(x, y)), many(f(x, y)), strict=True):
                assert a.stride() == b.stride()
                assert torch.equal(a.isnan(), b.isnan())
                assert torch.equal(a.nan_to_num(0, 1, 2), b.nan_to_num(0, 1, 2))
    finally:
        torch.set_num_threads(before)


def many(result):
    return result if isinstance(result, tuple) else (result,)


def test_a_derivative_outside():
    x = torch.randn(64, 32, 5, requires_grad=True)
    f = vmap(lambda x: F.log_softmax(x, -1)[..., 0].sum())
    g = jit(f)
    for _ in range(3):
        found, wanted = (torch.autograd.grad(h(x).sin().sum(), x)[0] for h in (g, f))
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("shape", [(3, 0), (0, 5), (64, 0, 2), (7,), ()])
def test_shapes_without_rows(shape):
    x = torch.zeros(shape)
    g = jit(lambda x: F.log_softmax(x, -1))
    for _ in range(2):
        assert torch.equal(g(x), F.log_softmax(x, -1))


def test_arguments_by_name():
    x = torch.randn(640, 5)
    g = jit(lambda x: torch.ops.aten._log_softmax(x, dim=1, half_to_float=False))
    for _ in range(2):
        assert torch.equal(g(x), F.log_softmax(x, -1))


def test_few_rows_and_many_entries_stay_as_they_are():
    for shape in ((8, 5), (4096, 100), (65, 32)):
        g = jit(lambda x: F.log_softmax(x, -1))
        g(torch.randn(shape))
        assert g.kinds()[0].operators == 1
