"""Writes that are seen under another name: the caller's tensor, its history, copies of x[i]."""

from __future__ import annotations

import pytest
import torch

from draws import make_generator
from forall import grad, hessian, jacfwd, jvp, vmap
from oracle import difference

D = torch.float64


def numbers(*shape):
    generator = make_generator(sum(shape))
    return torch.randn(shape, dtype=D, generator=generator)


def looped(f, *stacks):
    return torch.stack([f(*(s[i] for s in stacks)) for i in range(len(stacks[0]))])


# --- mapped arguments


@pytest.mark.parametrize("stack_requires_grad", [False, True])
@pytest.mark.parametrize(
    "write",
    [
        lambda x, w: x.mul_(w),
        lambda x, w: x[0].copy_(w * 2),
        lambda x, w: x.add_(w.detach()),
        lambda x, w: (x.sin_(), x[1:].mul_(w)),
    ],
)
def test_what_is_written_into_a_mapped_argument_has_a_derivative_outside(
    write, stack_requires_grad
):
    results = []
    for mapped in (True, False):
        w = torch.tensor(2.0, dtype=D, requires_grad=True)
        leaf = numbers(3, 2).requires_grad_(stack_requires_grad)
        stack = leaf.clone()

        def f(x, w=w):
            write(x, w)
            return x.sum().sin() * w

        y = vmap(f)(stack) if mapped else looped(f, stack)
        total = y.sum() + (3 * stack.sin()).sum()
        found = torch.autograd.grad(total, [w, leaf] if stack_requires_grad else [w])
        results.append([y, stack, *found])
    assert difference(*results) is None


def test_a_local_tensor_written_by_an_inner_map_has_a_derivative_inside():
    def f(x, mapped):
        rows = torch.zeros(3, 2, dtype=D)

        def add(row):
            row.add_(x.sin())
            return row.sum()

        if mapped:
            vmap(add)(rows)
        else:
            looped(add, rows)
        return (rows.cumsum(0) * x).sum()

    xs = numbers(4, 2)
    found = vmap(grad(lambda x: f(x, mapped=True)))(xs)
    assert difference(found, looped(grad(lambda x: f(x, mapped=False)), xs)) is None


def test_chunks_give_their_part_of_a_written_argument_its_history():
    leaf = numbers(5, 2).requires_grad_()
    stack = leaf * 1
    vmap(lambda x: x.mul_(x.detach().clone()), chunk_size=2)(stack)
    (found,) = torch.autograd.grad(stack.sum(), leaf)
    assert difference(found, leaf.detach()) is None


# --- rows that the examples' own numbers pick

PLACES = torch.tensor([0, 2, 1])

ROWS = {
    "read again after x was written": lambda x, i: _after(x[i], x.mul_(2)),
    "written": lambda x, i: _after(x, x[i].mul_(3)),
    "written through a view": lambda x, i: _after(x, x[i][1:].mul_(3)),
    "of a row": lambda x, i: _after(x, x[i][i // 2].add_(1)),
    "kept while x changes by a view": lambda x, i: _after(x[i], x[1].zero_()),
    "two rows of one place": lambda x, i: _two(x, i),
    "narrowed": lambda x, i: _after(x, torch.narrow(x, 0, i // 2, 2).neg_()),
    "written and read": lambda x, i: _written_and_read(x, i),
}


def _after(result, _):
    return result.sin()


def _two(x, i):
    a, b = x[i], x[i]
    a.mul_(2)
    return a * b


def _written_and_read(x, i):
    row = x[i]
    row.add_(1)
    x.mul_(row.sum())
    return row * x.sum()


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize(
    "through", ["vmap", "vmap of grad", "grad of vmap", "vmap of jvp", "vmap of vmap"]
)
def test_a_row_at_a_mapped_place_is_a_view(name, through):
    xs = numbers(3, 3, 2)

    def f(x, i):
        return ROWS[name](x.sin(), i)

    def number(x, i):
        return f(x, i).square().sum()

    if through == "vmap":
        found, truth = vmap(f)(xs, PLACES), looped(lambda x, i: f(x, int(i)), xs, PLACES)
    elif through == "vmap of grad":
        found = vmap(grad(number))(xs, PLACES)
        truth = looped(grad(lambda x, i: number(x, int(i))), xs, PLACES)
    elif through == "grad of vmap":
        found = grad(lambda xs: vmap(number)(xs, PLACES).sum())(xs)
        truth = looped(grad(lambda x, i: number(x, int(i))), xs, PLACES)
    elif through == "vmap of jvp":
        found = vmap(lambda x, i: jvp(lambda x: f(x, i), (x,), (x.cos(),))[1])(xs, PLACES)
        truth = looped(lambda x, i: jvp(lambda x: f(x, int(i)), (x,), (x.cos(),))[1], xs, PLACES)
    else:
        found = vmap(vmap(f, (None, 0)), (0, None))(xs, PLACES)
        truth = torch.stack([looped(lambda i, x=x: f(x, int(i)), PLACES) for x in xs])
    assert difference(found, truth) is None


# --- views or copies, as the strides of one example say

SHAPED = {
    "reshape": lambda y: y.reshape(-1),
    "flatten": lambda y: y.flatten(),
    "ravel": lambda y: torch.ravel(y),
    "view": lambda y: y.view(-1),
    "contiguous": lambda y: y.contiguous(),
    "contiguous after t": lambda y: y.mT.contiguous(),
    "reshape after t": lambda y: y.mT.reshape(-1),
    "as_strided": lambda y: y.as_strided((2, 2), (2, 1), 1),
    "as_strided of a part": lambda y: y[1].as_strided((3, 2), (2, 1), 0),
}


@pytest.mark.parametrize("in_dim", [0, 1, 2])
@pytest.mark.parametrize("name", SHAPED)
def test_what_is_a_view_in_the_loop_is_a_view(name, in_dim):
    def f(x):
        y = x * 2
        SHAPED[name](y).mul_(3)
        return y

    xs = numbers(4, 3, 2).movedim(0, in_dim).contiguous()
    found = vmap(f, in_dim)(xs)
    assert difference(found, looped(f, xs.movedim(in_dim, 0))) is None


# --- in place, but for shape or history alone

RESHAPED = {
    "squeeze_": lambda x: x.sin().unsqueeze(0).squeeze_(0) * x,
    "unsqueeze_": lambda x: x.sin().unsqueeze_(1) * x,
    "t_": lambda x: x.sin().t_() @ x,
    "transpose_": lambda x: x.sin().transpose_(0, 1).cumsum(0),
    "detach_": lambda x: x.sin().detach_() * x,
    "a row times a matrix": lambda x: (x[0] @ x.mT).tanh(),
}


@pytest.mark.parametrize("name", RESHAPED)
def test_tangents_go_along_when_a_shape_changes_in_place(name):
    f, x = RESHAPED[name], numbers(3, 2)

    def number(x):
        return f(x).sin().sum()

    functional = torch.autograd.functional
    assert difference(jacfwd(f)(x), functional.jacobian(f, x)) is None
    assert difference(hessian(number)(x), functional.hessian(number, x)) is None
    mapped = vmap(hessian(number))(torch.stack([x, 2 * x]))
    truth = [functional.hessian(number, x), functional.hessian(number, 2 * x)]
    assert difference(mapped, torch.stack(truth)) is None
