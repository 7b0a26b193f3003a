"""Calls that a rule answers before the dispatcher is asked: vmap equals the loop."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from forall import grad, jvp, vmap
from forall._vmap import function_mode
from forall._vmap.fast_path import api_calls
from oracle import check_vmap

G = torch.Generator().manual_seed(0)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=G, dtype=torch.float64)


def placed(x: Tensor, dim: int | None) -> Tensor:
    """(B, *S) with the examples at ``dim``, or its first example."""
    return x[0] if dim is None else x.movedim(0, dim)


def is_direct(f, *args: Tensor, in_dims=0) -> bool:
    """Whether every call in ``f`` is answered at once."""
    answered = []

    def answer(*call):
        out = api_calls.answer_call(*call)
        answered.append(out is not None)
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(function_mode, "answer_call", answer)
        vmap(f, in_dims)(*args)
    return all(answered)


@pytest.mark.parametrize("columns", [1, 3, 31, 32, 40])
@pytest.mark.parametrize("rows", [(), (1,), (4,), (2, 3), (0,)])
@pytest.mark.parametrize("size", [1, 3])
def test_linear(rows, columns, size):
    x, w, b = randn(size, *rows, 5), randn(size, columns, 5), randn(size, columns)
    for dims in itertools.product((0, -1, None), (0, 1, 2, None), (0, 1, None, "no")):
        args = [placed(a, d) for a, d in zip((x, w, b), dims, strict=True) if d != "no"]
        in_dims = tuple(d for d in dims if d != "no")
        if any(d is not None for d in in_dims):
            check_vmap(F.linear, tuple(args), in_dims)


def test_linear_without_examples():
    for dims in itertools.product((0, None), (0, None), (0, None)):
        shapes = zip(dims, ((4, 5), (3, 5), (3,)), strict=True)
        args = [randn(*s) if d is None else randn(0, *s) for d, s in shapes]
        if any(d is not None for d in dims):
            assert vmap(F.linear, dims)(*args).shape == (0, 4, 3)


MATRICES = [
    (torch.mm, (4, 5), (5, 3)),
    (torch.mm, (4, 5), (5, 40)),
    (torch.mm, (1, 5), (5, 1)),
    (torch.mm, (3, 1), (1, 4)),
    (torch.bmm, (2, 4, 5), (2, 5, 3)),
    (torch.mv, (4, 5), (5,)),
    (torch.dot, (5,), (5,)),
    (torch.matmul, (4, 5), (5, 3)),
    (torch.matmul, (4, 5), (5,)),
    (torch.matmul, (5,), (5,)),
    (torch.matmul, (5,), (5, 3)),
    (torch.matmul, (2, 4, 5), (5, 3)),
    (Tensor.__matmul__, (4, 5), (5, 40)),
]


@pytest.mark.parametrize(("f", "s", "t"), MATRICES)
def test_products(f, s, t):
    x, y = randn(3, *s), randn(3, *t)
    for dims in itertools.product((*range(len(s) + 1), None), (*range(len(t) + 1), None)):
        if dims != (None, None):
            check_vmap(f, tuple(placed(a, d) for a, d in zip((x, y), dims, strict=True)), dims)


def test_products_of_transposed_examples():
    """To fold these would be a copy, so they stay batched."""
    x, y = randn(3, 5, 4), randn(5, 6)
    check_vmap(lambda x: x.t() @ y, (x,))
    check_vmap(lambda x: y.t() @ x, (x,))
    check_vmap(lambda x: x.t() @ y[:, :1], (x,))


@pytest.mark.parametrize("name", ["sum", "mean"])
@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (0, 3)])
@pytest.mark.parametrize("home", [torch, Tensor])
def test_reductions(name, shape, home):
    f, x = getattr(home, name), randn(3, *shape)
    for axis in range(len(shape) + 1):
        given = (placed(x, axis),)
        check_vmap(f, given, axis)
        check_vmap(lambda x: f(x, dtype=torch.float32), given, axis)
        for dim in (0, -1, (), [0], (-1,), None):
            check_vmap(lambda x, dim=dim: f(x, dim), given, axis)
            check_vmap(lambda x, dim=dim: f(x, dim, True), given, axis)
            check_vmap(lambda x, dim=dim: f(x, dim=dim, keepdim=True), given, axis)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.sum(0, 1),
        lambda x: torch.sum(x, True),
        lambda x: x.sum(keepdim=True),
        lambda x: x.sum(5),
        lambda x: x.mean(dtype=torch.int64),
        lambda x: x.sum(0, True, None, None),
        lambda x: torch.mm(x, torch.ones(4, 4, dtype=x.dtype)),
        lambda x: torch.mm(x[:, :1], x.t()[:2]),
        lambda x: F.linear(x, torch.ones(2, 2, dtype=x.dtype)),
        lambda x: F.linear(x, x, torch.ones(7, dtype=x.dtype)),
        lambda x: F.linear(x, x.to(torch.float32)),
        lambda x: F.linear(x, x, input=x),
        lambda x: torch.matmul(x, 3),
    ],
)
def test_what_fails_in_the_loop_fails_alike(f):
    x = randn(2, 2, 3)
    with pytest.raises(Exception) as alone:
        f(x[0])
    with pytest.raises(type(alone.value)):
        vmap(f)(x)


@pytest.mark.counted
@pytest.mark.parametrize(
    "f",
    [
        F.relu,
        lambda x: F.relu(x, inplace=False),
        lambda x: F.leaky_relu(x, negative_slope=0.3),
        lambda x: F.gelu(x, approximate="tanh"),
        lambda x: torch.div(x, x + 1, rounding_mode="floor"),
        lambda x: F.linear(x, x, bias=None),
        lambda x: x @ x,
        lambda x: x.sum(-1, keepdim=True),
    ],
)
def test_words_do_not_stand_in_the_way(f):
    check_vmap(f, (randn(4, 4, 4),), 1)
    assert is_direct(f, randn(3, 4, 4))


def test_inplace_writes():
    x = randn(3, 4)
    vmap(lambda x: F.relu(x, inplace=True))(x)
    assert (x >= 0).all()


def test_a_captured_operand_that_requires_grad():
    x, w = randn(3, 4, 5), randn(2, 5).requires_grad_()
    vmap(lambda x: F.linear(x, w))(x).square().sum().backward()
    mine, w.grad = w.grad, None
    sum(F.linear(e, w).square().sum() for e in x).backward()
    torch.testing.assert_close(mine, w.grad)


def test_derivatives_go_the_long_way():
    x, w = randn(3, 4), randn(2, 4)
    check_vmap(grad(lambda x: F.linear(x, w).sin().sum()), (x,))
    check_vmap(lambda x: jvp(lambda x: F.linear(x, w), (x,), (x,))[1], (x,))
    out, t = jvp(vmap(lambda x: F.linear(x, w)), (x,), (x,))
    torch.testing.assert_close(t, out)


def test_the_level_learns_what_was_read():
    x, w, b = randn(3, 4), randn(2, 4), torch.zeros(2, 4, dtype=torch.float64)

    def reads_then_writes(x):
        y = F.linear(x, b)
        b.add_(w)
        return y

    def writes_then_reads(x):
        b.add_(w)
        return F.linear(x, b)

    for f in (reads_then_writes, writes_then_reads):
        with pytest.raises(RuntimeError, match="from before the call"):
            vmap(f)(x)
        assert not b.any()


def test_autocast_casts():
    x, w = torch.randn(3, 4, 5), torch.randn(2, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert vmap(lambda x: F.linear(x, w))(x).dtype == torch.bfloat16
        assert vmap(lambda x: x @ w.t())(x).dtype == torch.bfloat16


def test_a_users_mode_sees_the_call():
    seen = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    w = randn(2, 5)
    with Mode():
        vmap(lambda x: F.linear(x, w))(randn(3, 4, 5))
    assert F.linear in seen


def test_inside_a_transform_of_torch():
    x, w = randn(3, 4, 5), randn(2, 5)
    check_vmap(torch.func.grad(lambda x: F.linear(x.sin(), w).sum()), (x,))


@pytest.mark.counted
def test_a_rule_of_the_users_is_asked():
    op = torch.ops.aten.addmm.default
    api_calls._known.clear()
    try:
        api_calls.leave_to_own_rule(op)
        assert not is_direct(
            F.linear, randn(3, 4, 5), randn(2, 5), randn(2), in_dims=(0, None, None)
        )
    finally:
        api_calls._overruled.clear()
        api_calls._known.clear()
    assert is_direct(F.linear, randn(3, 4, 5), randn(2, 5), randn(2), in_dims=(0, None, None))
