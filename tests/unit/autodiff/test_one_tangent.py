"""Sums, products, quotients and maxima of which one operand has a tangent, by the rule for both."""

import itertools
import operator
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from draws import make_generator
from forall import grad, hessian, jacfwd, jacrev, jvp, linearize, vmap

OPS = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "add alpha": lambda x, y: torch.add(x, y, alpha=3),
    "sub alpha": lambda x, y: torch.sub(x, y, alpha=-2),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
}
SHAPES = [
    ((), ()),
    ((3,), (3,)),
    ((2, 3), (3,)),
    ((3,), (2, 3)),
    ((), (3,)),
    ((3,), ()),
    ((0,), ()),
]
DTYPES = [
    (torch.float64, torch.float64),
    (torch.float32, torch.float64),
    (torch.float64, torch.float32),
    (torch.float64, torch.int64),
    (torch.float64, torch.complex128),
    (torch.complex128, torch.float64),
]


def draw(shape, dtype, seed):
    found = torch.randn(shape, dtype=torch.float64, generator=make_generator(seed))
    return (3 * found + 5).to(dtype)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: f"{d[0]}, {d[1]}".replace("torch.", ""))
def test_a_tangent_is_that_of_both_with_zeros_for_the_other(name, side, dtypes):
    op = OPS[name] if side == "left" else lambda x, c: OPS[name](c, x)
    if name in ("maximum", "minimum") and any(d.is_complex for d in dtypes):
        pytest.skip("complex numbers have no order")
    for shape, other in SHAPES:
        x, t, c = (
            draw(shape, dtypes[0], 0),
            draw(shape, dtypes[0], 1),
            draw(other, dtypes[1], 2),
        )
        value, tangent = jvp(lambda x, c=c: op(x, c), (x,), (t,))
        assert tangent.shape == value.shape
        assert tangent.dtype == value.dtype == op(x, c).dtype
        if not c.dtype.is_floating_point and not c.dtype.is_complex:
            c = c.double()
        wanted = jvp(op, (x, c), (t, torch.zeros_like(c)))[1]
        torch.testing.assert_close(tangent, wanted, check_dtype=False)


@pytest.mark.parametrize("name", [n for n in OPS if "imum" not in n])
def test_a_number_keeps_the_dtype(name):
    for shape, dtype in itertools.product([(), (3,)], [torch.float32, torch.float64]):
        x, t = draw(shape, dtype, 0), draw(shape, dtype, 1)
        for f in (lambda x: OPS[name](x, 2.5), lambda x: OPS[name](x, 2)):
            _, tangent = jvp(f, (x,), (t,))
            assert tangent.dtype == dtype
            step = 1e-3
            slope = (f(x.double() + step * t) - f(x.double() - step * t)) / (2 * step)
            torch.testing.assert_close(tangent.double(), slope, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("op", [torch.maximum, torch.minimum])
def test_equal_operands_have_half_of_the_derivative_each(op):
    x, c = torch.tensor([1.0, 2.0, float("nan")]), torch.tensor([1.0, 1.0, 1.0])
    ones = torch.ones(3)
    for f in (lambda x: op(x, c), lambda x: op(c, x)):
        found = jvp(f, (x,), (ones,))[1]
        torch.testing.assert_close(found[:2], grad(lambda x, f=f: f(x)[:2].sum())(x)[:2])
        assert found[0] == 0.5


@pytest.mark.parametrize("name", ["mul", "div", "add", "sub"])
def test_what_does_not_move_may_be_infinite(name):
    c = torch.tensor([float("inf"), 2.0])
    for f in (lambda x: OPS[name](x, c), lambda x: OPS[name](c, x)):
        x = torch.tensor([2.0, 3.0])
        found = jvp(f, (x,), (torch.ones(2),))[1]
        torch.testing.assert_close(found, grad(lambda x, f=f: f(x).sum())(x), equal_nan=True)


@pytest.mark.parametrize("name", ["mul", "div", "add", "sub"])
def test_a_write_into_the_result_leaves_the_operand(name):
    def f(x):
        y = OPS[name](x, 2.0)
        y.mul_(3.0)
        return x, y

    x, t = draw((3,), torch.float64, 0), draw((3,), torch.float64, 1)
    _, (same, written) = jvp(f, (x,), (t,))
    torch.testing.assert_close(same, t)
    torch.testing.assert_close(written, jvp(lambda x: OPS[name](x, 2.0) * 3.0, (x,), (t,))[1])


def test_derivatives_of_tangents():
    c = draw((3,), torch.float64, 2)

    def f(x):
        return ((c - x / c) * (2 / x) + 3 * x - c).sin().sum()

    x, v = draw((3,), torch.float64, 0), draw((3,), torch.float64, 1)
    by_reverse: Any = torch.autograd.functional.hessian(f, x)
    torch.testing.assert_close(hessian(f)(x), by_reverse)
    torch.testing.assert_close(linearize(grad(f), x)[1](v), by_reverse @ v)
    torch.testing.assert_close(
        jvp(lambda x: jvp(f, (x,), (v,))[1], (x,), (v,))[1], v @ by_reverse @ v
    )
    leaf = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(jvp(f, (leaf,), (v,))[1], leaf)
    torch.testing.assert_close(slope, by_reverse @ v)


def test_examples_with_and_without_a_tangent():
    xs, cs = draw((4, 3), torch.float64, 0), draw((4, 3), torch.float64, 1)

    def one(x, c):
        return jvp(lambda x: (x * c - c / x + x) / 2, (x,), (torch.ones(3, dtype=x.dtype),))[1]

    wanted = torch.stack([one(x, c) for x, c in zip(xs, cs, strict=True)])
    torch.testing.assert_close(vmap(one)(xs, cs), wanted)
    torch.testing.assert_close(wanted, (cs + cs / xs**2 + 1) / 2)


NESTED_OPS = {
    **{name: op for name, op in OPS.items() if "imum" not in name},
    "mv": lambda x, c: (x.outer(x) + 5 * torch.eye(3)).mv(c) / c,
    "mm": lambda x, c: (x.outer(x).mm(c.outer(c)) / 100).sin().sum(0),
    "addmv": lambda x, c: torch.addmv(x, c.outer(c), x, alpha=2) / 10,
}


@pytest.mark.parametrize("name", NESTED_OPS)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("recorded", [False, True])
def test_all_directions_at_once_and_further_derivatives(name, side, recorded):
    c = draw((3,), torch.float64, 2).requires_grad_(recorded)

    def f(x):
        op = NESTED_OPS[name]
        return (op(x, c) if side == "left" else op(c, x)).sin().prod()

    xs = draw((2, 3), torch.float64, 0)
    by_reverse: Any = torch.autograd.functional.hessian
    torch.testing.assert_close(jacfwd(f)(xs[0]), grad(f)(xs[0]))
    torch.testing.assert_close(hessian(f)(xs[0]), by_reverse(f, xs[0]))
    loop = torch.stack([by_reverse(f, x) for x in xs])
    torch.testing.assert_close(vmap(hessian(f))(xs), loop)
    torch.testing.assert_close(vmap(jacfwd(jacfwd(f)))(xs), loop)
    third = jacrev(by_reverse_of(f))(xs[0])
    torch.testing.assert_close(jacfwd(hessian(f))(xs[0]), third)
    torch.testing.assert_close(jacrev(hessian(f))(xs[0]), third)
    if recorded:  # the graph that is kept holds no tangent of a level that has ended
        found = torch.autograd.grad(vmap(hessian(f))(xs).sum(), c)
        torch.testing.assert_close(found, torch.autograd.grad(vmap(by_reverse_of(f))(xs).sum(), c))


def by_reverse_of(f):
    return jacrev(jacrev(f))


def test_tangents_of_examples_that_diverge():
    c = draw((3,), torch.float64, 2)

    def f(x):
        y = x * c
        y = y * c if x[0] > 5 else y / c
        return (y - x * c + c / x).sin().sum()

    xs = draw((4, 3), torch.float64, 0)
    assert len({bool(x[0] > 5) for x in xs}) == 2
    torch.testing.assert_close(vmap(hessian(f))(xs), torch.stack([hessian(f)(x) for x in xs]))
    torch.testing.assert_close(vmap(jacfwd(f))(xs), torch.stack([grad(f)(x) for x in xs]))


class _Kernels(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_a_product_with_a_constant_runs_no_more_than_its_tangent():
    x, c = draw((3,), torch.float64, 0), draw((3,), torch.float64, 1)
    counts = []
    for n in (1, 5):

        def f(x, n=n):
            for _ in range(n):
                x = x * c
            return x

        with _Kernels() as kernels:
            jacfwd(f)(x)
        counts.append(kernels.found)
    assert counts[1] - counts[0] == Counter({"mul": 8})


@pytest.mark.parametrize(
    "view", [torch.Tensor.diagonal, torch.t, lambda y: y[0], torch.Tensor.detach]
)
def test_a_view_of_a_tensor_that_gets_its_tangent_later(view):
    c = draw((3,), torch.float64, 2)

    def f(x):
        base = torch.zeros(3, 3, dtype=x.dtype)
        part = view(base)
        base.add_(x)
        return (part * c - c / (part + 2)).sin()

    xs = draw((2, 3), torch.float64, 0)
    if view is torch.Tensor.detach:
        assert not jacfwd(f)(xs[0]).any()
        return
    torch.testing.assert_close(jacfwd(f)(xs[0]), jacrev(f)(xs[0]))
    loop = torch.stack([jacrev(jacrev(f))(x) for x in xs])
    torch.testing.assert_close(vmap(jacfwd(jacfwd(f)))(xs), loop)
    torch.testing.assert_close(vmap(hessian(f))(xs), loop)
