"""``jit(fastmath=True)``: the same numbers to rounding, in the same layout, in fewer steps."""

from __future__ import annotations

import random
import re
from itertools import combinations
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from draws import make_generator
from forall import grad, hessian, jacfwd, jacrev, jit, jvp, vmap
from forall._jit.passes import matmul_order
from oracle import difference, same


def given_of(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=make_generator(seed), dtype=dtype)


W1, B1, W2 = given_of(32, 16) / 4, given_of(32, seed=1), given_of(8, 32, seed=2) / 5
SECOND = given_of(32, seed=3)


def network(x: Tensor) -> Tensor:
    return W2 @ torch.tanh(W1 @ x + B1)


def energy(x: Tensor) -> Tensor:
    return SECOND @ torch.tanh(W1 @ x + B1)


def laplacian(x: Tensor) -> Tensor:
    return hessian(energy)(x).diagonal().sum()


def loss(w: Tensor, x: Tensor) -> Tensor:
    return (W2 @ torch.sigmoid(w @ x)).square().sum()


def curved(f):
    return lambda x, t: jvp(grad(f), (x,), (t,))[1]


def clipped(w: Tensor, x: Tensor) -> Tensor:
    g = grad(loss)(w, x)
    return g / g.square().sum().sqrt().clamp(min=1)


POINT, POINTS = given_of(16), given_of(64, 16)
CASES = {
    "jacfwd": (jacfwd(network), (POINT,)),
    "jacrev": (jacrev(network), (POINT,)),
    "jacfwd of each": (vmap(jacfwd(network)), (POINTS,)),
    "jacrev of each": (vmap(jacrev(network)), (POINTS,)),
    "jacfwd, examples last": (vmap(jacfwd(network), in_dims=1, out_dims=2), (given_of(16, 64),)),
    "hessian": (hessian(energy), (POINT,)),
    "hessian of each": (vmap(hessian(energy)), (POINTS,)),
    "hessian of each, doubles": (vmap(hessian(lambda x: x.sin().sum() ** 2)), (POINTS.double(),)),
    "hessian of one": (vmap(hessian(energy)), (POINTS[:1],)),
    "hessian of vectors": (vmap(hessian(network)), (POINTS,)),
    "laplacian of each": (vmap(laplacian), (POINTS,)),
    "third derivatives": (vmap(jacfwd(hessian(energy))), (POINTS[:9],)),
    "per-example gradients": (vmap(grad(loss), (None, 0)), (W1, POINTS)),
    "clipped gradients": (
        lambda w, xs: vmap(clipped, (None, 0))(w, xs).sum(0),
        (W1, POINTS),
    ),
    "norms of gradients": (
        lambda w, xs: vmap(grad(loss), (None, 0))(w, xs).square().sum((1, 2)).sqrt(),
        (W1, POINTS),
    ),
    "product with a hessian": (vmap(curved(energy)), (POINTS, POINTS.flip(0))),
    "scaled": (
        lambda s, v, w: (s.unsqueeze(-1) * v) @ w.T,
        (given_of(50, 12), given_of(12), W1[:, :12]),
    ),
    "scaled twice": (
        lambda s, v, w: ((s[:, None] * v).div(2.5) * -v).flatten(0, 1) @ w,
        (given_of(40, 12), given_of(5, 12), given_of(12, 6)),
    ),
    "in batches": (
        lambda s, v, w: torch.bmm(s[:, None] * v, w),
        (given_of(7, 12), given_of(5, 12), given_of(7, 12, 6)),
    ),
    "one batch for all": (
        lambda s, v, w: torch.bmm((s[:, None] * v), w.expand(7, 12, 6)),
        (given_of(7, 12), given_of(50, 12), given_of(12, 6)),
    ),
    "one thing to sum": (lambda x, y: (x[:, None] * 3) @ (y * x)[None], (given_of(5), given_of(5))),
    "a sum of products": (
        lambda x, y: (x[:, :, None] * y[:, None]).sum(0),
        (given_of(50, 6), given_of(50, 7)),
    ),
    "a sum, dims kept": (
        lambda x, y: (x[:, :, None] * y[:, None]).sum((0, -2), keepdim=True),
        (given_of(50, 6), given_of(50, 7)),
    ),
    "a sum of all": (lambda x, y: (x * y * 2).sum(), (given_of(50, 6), given_of(50, 6))),
    "a sum over batches": (lambda x, y: (x * y).sum(-1), (given_of(5, 400), given_of(5, 400))),
    "a product that is summed twice": (
        lambda x, y: (z := x[:, :, None] * y[:, None]).sum(0) * z.sum() + z.sum(1)[0],
        (given_of(50, 6), given_of(50, 7)),
    ),
    "a sum of squares": (
        lambda x, y: (x[:, :, None] * y[:, None]).pow(2).sum((1, 2)),
        (given_of(50, 6), given_of(50, 7)),
    ),
    "a sum of squares, dims kept": (
        lambda x, y: (x[:, :, None] * y[:, None]).square().sum((1, -1), keepdim=True),
        (given_of(50, 6), given_of(50, 7)),
    ),
    "a sum of complex squares": (
        lambda x, y: (x[:, :, None] * y[:, None]).square().sum((1, 2)),
        (given_of(50, 6) + 1j, given_of(50, 7) + 0j),
    ),
    "a sum of all squares": (
        lambda x, y: (x[:, None] * y).square().sum(),
        (given_of(50), given_of(70)),
    ),
    "squares of one": (lambda x: (x * x.square()).sum(0), (given_of(5, 4),)),
    "a sum of one": (lambda x: (x * 3).sum(1), (given_of(5, 4),)),
    "a sum of a number": (lambda x: (x * 3).sum(), (given_of(),)),
    "a bias": (lambda x, w, b: x @ w + b, (given_of(5, 6), given_of(6, 7), given_of(7))),
    "a bias in front": (
        lambda x, w, b: b + x @ w,
        (given_of(5, 6), given_of(6, 7), given_of(5, 1)),
    ),
    "a wide bias": (lambda x, w, b: b + x @ w, (given_of(5, 6), given_of(6, 7), given_of(3, 5, 7))),
    "a bias of another dtype": (
        lambda x, w, b: b + x @ w,
        (given_of(5, 6), given_of(6, 7), given_of(7, dtype=torch.float64)),
    ),
    "a product and a product": (lambda x, w: x @ w + w.T @ x.T, (given_of(5, 5), given_of(5, 5))),
    "a product twice": (lambda x, w: (y := x @ w) + y, (given_of(5, 5), given_of(5, 5))),
    "the same rows": (lambda x, w: (x.expand(5, 4) * 2) @ w, (given_of(4), given_of(4, 3))),
    "the same rows and columns": (
        lambda x, w: (x.expand(5, 4) * 2) @ (w[:, None] * 3).expand(4, 6),
        (given_of(4), given_of(4)),
    ),
    "sums of the same": (
        lambda x, w: (x[:, None] * 2).expand(4, 6) @ (w * 3).expand(6, 5),
        (given_of(4), given_of(5)),
    ),
    "turned": (lambda x, w: x.t().contiguous() @ w, (given_of(40, 30), given_of(40, 20))),
    "complex": (lambda x, w: (x * 2j) @ w.conj(), (given_of(4, 3) + 0j, given_of(3, 2) + 1j)),
    "whole numbers": (lambda x: (x[:, None] * x) @ x, (torch.arange(5),)),
    "nothing": (lambda x, w: (x * 2) @ w, (given_of(0, 3), given_of(3, 2))),
    "nothing summed": (lambda x, w: (x * 2) @ w, (given_of(4, 0), given_of(0, 2))),
    "attention": (
        vmap(lambda q, k, v: F.softmax(q @ k.T / 4, -1) @ v),
        (given_of(9, 5, 16), given_of(9, 6, 16), given_of(9, 6, 16)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_eager(name):
    f, args = CASES[name]
    f(*args)  # the first call may be another than those that follow
    fast = jit(f, fastmath=True)
    for scale in (1, 1, -2):
        args = tuple(a * scale for a in args)
        ours, truth = fast(*args), f(*args)
        assert difference(ours, truth) is None
        assert ours.stride() == truth.stride()
    assert fast.cache_info().hits == 2


@pytest.mark.parametrize("name", ["jacfwd of each", "hessian of each", "per-example gradients"])
def test_a_derivative_outside(name):
    f, args = CASES[name]

    def pulled(g):
        given = [a.clone().requires_grad_() for a in args]
        out = g(*given)
        return out, torch.autograd.grad(out.sin().sum(), given)

    fast = jit(f, fastmath=True)
    for _ in range(3):
        assert same(pulled(fast), pulled(f))
    assert fast.cache_info().hits == 2


def shapes(jitted) -> set[str]:
    """What the recorded program makes, largest first."""
    (kind,) = jitted.kinds()
    return set(re.findall(r"float32\[([\d, ]*)\]", str(kind)))


def test_no_stack_of_scaled_weights():
    """Of (points, inputs, hidden units) none is made: one product of all points is."""
    plain, fast = jit(vmap(hessian(energy))), jit(vmap(hessian(energy)), fastmath=True)
    for f in (plain, fast):
        f(POINTS)
    assert "64, 16, 32" in shapes(plain)
    assert not {"64, 16, 32", "1024, 32"} & shapes(fast)
    assert "64, 256" in shapes(fast)


def test_few_points_stay_as_they_are():
    """To multiply all weights with each other costs more than to scale them once or twice."""
    fast = jit(vmap(hessian(energy)), fastmath=True)
    fast(POINTS[:2])
    assert "32, 256" not in shapes(fast)


def test_no_turned_copy_and_one_operator_for_product_and_bias():
    fast = jit(jacfwd(network), fastmath=True)
    fast(POINT)
    assert "t_copy" not in str(fast.kinds()[0])
    assert "addmv" in str(fast.kinds()[0])


def test_products_that_are_summed_are_a_product_of_matrices():
    fast = jit(CASES["a sum of products"][0], fastmath=True)
    fast(given_of(50, 6), given_of(50, 7))
    assert "50, 6, 7" not in shapes(fast)


@pytest.mark.parametrize("name", ["clipped gradients", "norms of gradients"])
def test_clipped_gradients_are_not_made_for_each_example(name):
    fast = jit(CASES[name][0], fastmath=True)
    fast(W1, POINTS)
    assert "64, 32, 16" not in shapes(fast)


@pytest.mark.parametrize("name", ["a sum of all", "a sum over batches"])
def test_torchs_sum_rounds_less_than_an_inner_product(name):
    f, args = CASES[name]
    fast = jit(f, fastmath=True)
    for _ in range(2):
        assert torch.equal(fast(*args), f(*args))


def test_what_is_handed_out_too_is_made_once():
    def f(s, v, w):
        scaled = s[:, None] * v
        return scaled, scaled @ w

    fast, args = jit(f, fastmath=True), (given_of(50, 12), given_of(12), given_of(12, 3))
    for _ in range(2):
        assert same(fast(*args), f(*args))
    assert str(fast.kinds()[0]).count("mul") == 1


def test_what_is_written_into_stays():
    def f(s, v, w):
        v = v.clone()
        scaled = s.unsqueeze(-1) * v
        v.mul_(3)
        return scaled.flatten(0, 1) @ w + v.sum()

    fast, args = jit(f, fastmath=True), (given_of(50, 12), given_of(12, 12), given_of(12, 3))
    for _ in range(2):
        assert same(fast(*args), f(*args))


def test_a_result_that_is_written_into():
    def f(s, v, w):
        out = (s[:, None] * v).flatten(0, 1) @ w
        out[0] = 1
        return out.view(50, 1, 3).mul_(2), out

    fast, args = jit(f, fastmath=True), (given_of(50, 12), given_of(1, 12), given_of(12, 3))
    for _ in range(2):
        assert same(fast(*args), f(*args))


def test_a_name_for_what_is_captured():
    """The transpose of a transpose is what there was, and no operator made it."""
    w = given_of(12, 3)

    def f(s):
        turned = w.t().t()
        return (s[:, None] * turned[:, 0]) @ turned + turned.t().t()[0]

    fast, s = jit(f, fastmath=True), given_of(50)
    for _ in range(2):
        assert same(fast(s), f(s))


# --- what a product is made of, at random --------------------------------------------------------

step = st.tuples(
    st.sampled_from(["mul", "number", "slope", "neg", "turn", "copy", "fold"]), st.integers(0, 9)
)


def random_operand(steps, x: Tensor, others: list[Tensor]) -> Tensor:
    """Views, copies and operators that are linear in x, all of the same number of entries."""
    for name, n in steps:
        if name == "mul":
            other = others[n % len(others)]
            x = x * other.reshape(-1)[: x.shape[-1]] if n % 2 else x * other.reshape(-1)[0]
        elif name == "number":
            x = x / (n + 1) if n % 2 else x * (n - 3)
        elif name == "slope":
            x = torch.ops.aten.tanh_backward(x, others[n % len(others)].reshape(-1)[: x.shape[-1]])
        elif name == "neg":
            x = -x
        elif name == "turn":
            x = x.movedim(n % x.dim(), -1)
        elif name == "copy":
            x = x.contiguous() if n % 2 else x.clone()
        elif x.dim() > 1:
            x = (
                x.flatten(0, 1)
                if n % 2
                else x.reshape(-1, 2, x.shape[-1] // 2 or 1)
                if x.shape[-1] % 2 == 0
                else x
            )
    return x


@settings(deadline=None)  # the first call of a device, or on a busy machine, takes long
@given(
    st.lists(step, max_size=6),
    st.lists(step, max_size=6),
    st.sampled_from([(4, 6), (2, 3, 4), (6, 2, 2), (4, 1, 6), (24,)]),
    st.sampled_from([(4, 6), (2, 3, 4), (6, 2, 2), (24,)]),
    st.integers(0, 3),
    st.integers(0, 99),
)
def test_random_products_in_random_orders(left, right, first, second, batches, seed):
    others = [given_of(24, seed=9), given_of(24, seed=8), given_of(1, 24, seed=7)]

    def f(x, y, *others):
        x, y = random_operand(left, x, others), random_operand(right, y, others)
        x, y = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
        deep = min(x.shape[1], y.shape[1])
        x, y = x[:, :deep], y[:, :deep]
        if batches:
            scaled = others[0][: batches + 3].reshape(-1, 1, 1) * x
            if batches == 1:
                return torch.bmm(scaled, y.t().expand(len(scaled), -1, -1))
            return scaled.flatten(0, 1) @ y.t()
        return x @ y.t()

    args = given_of(*first), given_of(*second, seed=1), *others
    truth = f(*args)
    costs = random.Random(seed)
    with mock.patch.multiple(matmul_order, _GAIN=1e9, _estimate_cost=lambda *_: costs.random()):
        fast = jit(f, fastmath=True)
        for _ in range(2):
            ours = fast(*args)
            assert difference(ours, truth) is None
            assert ours.stride() == truth.stride()
    assert fast.cache_info().hits == 1


LETTERS = {"b": 4, "i": 3, "j": 2, "k": 5}
factor = st.tuples(
    st.sampled_from(["".join(c) for n in (1, 2, 3) for c in combinations(LETTERS, n)]),
    st.sampled_from(["mul", "square", "div", "slope", "neg", "number"]),
)


@settings(deadline=None)
@given(
    st.lists(factor, min_size=1, max_size=4),
    st.lists(st.sampled_from([*LETTERS]), min_size=1, max_size=4, unique=True),
    st.booleans(),
    st.integers(0, 99),
)
def test_random_sums_of_products(factors, summed, keepdim, seed):
    """A product of factors with some of four dims each, which is summed several times."""
    given = [
        given_of(*(n if c in dims else 1 for c, n in LETTERS.items()), seed=i)
        for i, (dims, _) in enumerate(factors)
    ]

    def f(*given):
        z = given[0]
        for x, (_, step) in zip(given, factors, strict=True):
            if step == "square":
                z = (z * x).square()
            elif step == "div":
                z = z / (2 + x.square())
            elif step == "slope":
                z = torch.ops.aten.tanh_backward(*torch.broadcast_tensors(z, x))
            else:
                z = z * (-x if step == "neg" else x / 3 if step == "number" else x)
        over = [[*LETTERS].index(c) for c in summed]
        return z.sum(over, keepdim=keepdim), z.square().sum(0), z.sum(-1)

    truth = f(*given)
    costs = random.Random(seed)
    with mock.patch.multiple(matmul_order, _GAIN=1e9, _estimate_cost=lambda *_: costs.random()):
        fast = jit(f, fastmath=True)
        for _ in range(2):
            for one, want in zip(fast(*given), truth, strict=True):
                torch.testing.assert_close(one, want, rtol=1e-4, atol=1e-4)
                assert one.stride() == want.stride()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", CASES)
def test_every_order_is_right(name):
    f, args = CASES[name]
    truth = f(*args)
    for seed in range(20):
        costs = random.Random(seed)
        cost = lambda *_, c=costs: c.random()  # noqa: E731
        with mock.patch.multiple(matmul_order, _GAIN=1e9, _estimate_cost=cost):
            fast = jit(f, fastmath=True)
            for _ in range(2):
                ours = fast(*args)
                assert difference(ours, truth) is None
                assert ours.stride() == truth.stride()
