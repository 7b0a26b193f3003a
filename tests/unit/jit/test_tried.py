"""Operands that lie otherwise, and sums within products, where they are found to keep each bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forall import hessian, jacfwd, jit, vmap
from forall._jit.graph import (
    Layout,
    OpNode,
    Ref,
    Value,
)
from forall._jit.passes.bitwise_check import have_same_bits

aten = torch.ops.aten
SLOPE = aten.tanh_backward.default


def values(*tensors: Tensor) -> list[Value]:
    return [Value(Layout.from_tensor(t), n) for n, t in enumerate(tensors)]


def product(a: int, b: int, out: int) -> OpNode:
    return OpNode(aten.mm.default, (Ref(a), Ref(b)), {}, out)


def chain(dtype=torch.float32, k=40):
    """Values a, b, c; a @ b, (a @ b) @ c, b @ c, a @ (b @ c)."""
    a, b, c = (torch.ones(*shape, dtype=dtype) for shape in ((20, k), (k, k), (k, 30)))
    made = values(a, b, c, a @ b, a @ b @ c, b @ c, a @ (b @ c))
    return made, [product(0, 1, 3), product(3, 2, 4)], [product(1, 2, 5), product(0, 5, 6)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_another_order_of_products_has_other_bits(dtype):
    made, left, right = chain(dtype)
    assert have_same_bits(made, left, left)
    assert not have_same_bits(made, left, right)


def test_of_sums_that_are_rounded_at_the_end_nothing_is_said():
    made, left, right = chain(torch.bfloat16)
    assert not have_same_bits(made, left, left)
    assert not have_same_bits(made, left, right)


def test_of_few_entries_nothing_is_said():
    x = torch.ones(2, 3)
    made = values(x, x.T, x @ x.T)
    assert not have_same_bits(made, [product(0, 1, 2)], [product(0, 1, 2)])
    slope = torch.ones(1, 3)
    many = values(torch.ones(400, 3), slope, torch.ones(400, 3))
    node = OpNode(SLOPE, (Ref(0), Ref(1)), {}, 2)
    assert not have_same_bits(many, [node], [node])


def test_of_much_nothing_is_tried():
    a = torch.ones(1000, 1000)
    made = values(a, a, a)
    assert not have_same_bits(made, [product(0, 1, 2)], [product(0, 1, 2)])


def test_trying_draws_from_nobodys_generator():
    made, left, right = chain()
    before = torch.get_rng_state()
    have_same_bits(made, left, right)
    assert torch.equal(torch.get_rng_state(), before)


# Shapes at which kernels sum in other ways, or have their last entries one by one.
SIZES = st.sampled_from([1, 2, 3, 5, 7, 8, 16, 17, 31, 32, 33, 48, 64, 65, 100])
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])


FUNCTIONS = {
    "slopes of a copy": lambda v, w, x, b: SLOPE(v.t().contiguous().t(), x) @ w.t(),
    "slopes of a transpose": lambda v, w, x, b: SLOPE(torch.t_copy(v), x[:1]).t() @ w.t(),
    "scaled": lambda v, w, x, b: (v.t().contiguous().t() * (1 - x * x)) @ w.t(),
    "sigmoid": lambda v, w, x, b: aten.sigmoid_backward(v.contiguous(), x) @ w.t() + b,
    "a bias": lambda v, w, x, b: v @ w.t() + b,
    "a bias in front, of a vector": lambda v, w, x, b: (b + w @ x).tanh(),
    "jacfwd": lambda v, w, x, b: jacfwd(lambda x: w @ torch.tanh(v[0] * x))(x),
    "hessian": lambda v, w, x, b: vmap(hessian(lambda x: torch.tanh(w @ x + b).sum()))(v[:3]),
}


def numbers(random: torch.Generator, odd: bool, *shapes, dtype) -> list[Tensor]:
    found = [torch.randn(s, generator=random, dtype=torch.float64).to(dtype) for s in shapes]
    for t in found if odd else []:
        at = torch.rand(t.shape, generator=random)
        for low, number in ((0.0, torch.inf), (0.05, torch.nan), (0.1, -0.0), (0.2, 0.0)):
            t[(at >= low) & (at < low + 0.05)] = number
    return found


@pytest.mark.parametrize("name", FUNCTIONS)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(rows=SIZES, inner=SIZES, columns=SIZES, dtype=DTYPES, lies=st.booleans())
def test_each_bit_is_that_of_the_function(name, rows, inner, columns, dtype, lies):
    f = FUNCTIONS[name]
    g, random = jit(f), torch.Generator().manual_seed(rows + 100 * inner)
    for odd in (False, False, False, True):
        v, w, x, b = numbers(
            random, odd, (rows, inner), (columns, inner), (inner,), (columns,), dtype=dtype
        )
        w = w.t().contiguous().t() if lies else w
        found, wanted = g(v, w, x, b), f(v, w, x, b)
        assert found.stride() == wanted.stride()
        assert equal(found, wanted)


def equal(found: Tensor, wanted: Tensor) -> bool:
    """In each bit, but for what kind of a nan a nan is."""
    nans = [t.isnan() for t in (found, wanted)]
    numbers = [t.nan_to_num(0.0, torch.inf, -torch.inf) for t in (found, wanted)]
    signs = [t.signbit() for t in numbers]
    return torch.equal(*nans) and torch.equal(*numbers) and torch.equal(*signs)


def operators(f, *args) -> list[str]:
    g = jit(f)
    g(*args)
    lines = str(g.kinds()[0]).split("\n")
    return [line.split(" = ")[1].split("(")[0] for line in lines if " = " in line]


def test_what_is_gained():
    w, u, bias = torch.randn(64, 64), torch.randn(64, 64), torch.randn(64)
    made = operators(jacfwd(lambda x: u @ torch.tanh(w @ x + bias)), torch.randn(64))
    # The weights are multiplied as they lie, and no Jacobian of the first layer is copied.
    assert "t_copy.default" not in made
    assert "clone.default" not in made
