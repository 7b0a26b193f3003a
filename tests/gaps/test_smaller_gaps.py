"""Errors where the loop has an answer."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import forall
from draws import make_generator
from forall import grad, hessian, jacfwd, jacrev, jit, jvp, vjp, vmap

D = torch.float64


@pytest.mark.xfail(
    strict=True, reason="x.data = .. would have to keep the tangent", raises=NotImplementedError
)
def test_new_data_keeps_the_tangent_inside_jvp_of_vmap():
    def f(a):
        y = a * 1
        y.data = torch.ones(3, dtype=D)
        return y * y

    x = torch.arange(6.0, dtype=D).reshape(2, 3)
    found = jvp(vmap(f), (x,), (torch.ones_like(x),))[1]
    torch.testing.assert_close(found, torch.full((2, 3), 2.0, dtype=D))


@pytest.mark.xfail(strict=True, reason="the index of x[i] is freed by the first backward pass")
def test_two_backward_passes_through_one_row():
    xs = torch.arange(6.0, dtype=D).reshape(3, 2).requires_grad_()

    def f(x, i):
        row = x[i]
        row.sum().backward()
        (row * 2).sum().backward()
        return x.detach()

    vmap(f)(xs, torch.tensor([0, 1, 0]))


@pytest.mark.xfail(strict=True, reason="the derived in-place form overwrites what was saved")
def test_a_running_product_after_a_running_sum_in_forward_mode():
    w = torch.tensor([0.5, 2.0, 1.5], dtype=D, requires_grad=True)

    def f(a):
        t = a * w
        t.cumsum_(0)
        t.cumprod_(0)
        return t

    x = torch.arange(1.0, 7.0, dtype=D).reshape(2, 3)
    (found,) = torch.autograd.grad(jvp(vmap(f), (x,), (x,))[1].sum(), w)
    assert found.shape == w.shape


@pytest.mark.xfail(strict=True, reason="torch puts a list of lengths into memory by its address")
def test_lengths_in_a_list_in_forward_mode():
    x = torch.randn(5, 2, 4, dtype=D, generator=make_generator(0)).log_softmax(-1)
    targets = torch.tensor([[1, 2], [2, 3]])
    found = jvp(lambda x: F.ctc_loss(x, targets, (5, 4), (2, 2)), (x,), (x,))[1]
    lengths = torch.tensor([5, 4]), torch.tensor([2, 2])
    expected = jvp(lambda x: F.ctc_loss(x, targets, *lengths), (x,), (x,))[1]
    torch.testing.assert_close(found, expected)


@pytest.mark.xfail(strict=True, reason="no mode sees a hook on a node: whose gradient is it?")
def test_a_nodes_own_hook_makes_a_gradient_in_numpy_where_some_examples_use_the_node():
    def f(x):
        y = x * 2
        y.grad_fn.register_hook(lambda gs, _: (torch.from_numpy(np.full(3, 2.0)), *gs[1:]))
        return (y * x).sum() if x.sum() > 0 else (x * 3).sum()

    xs = torch.tensor([[1.0, 2.0, 3.0], [-1.0, -2.0, -3.0]], dtype=D)
    found = vmap(grad(f))(xs)
    torch.testing.assert_close(found, torch.stack([grad(f)(x) for x in xs]))


@pytest.mark.xfail(
    strict=True,
    reason="autograd saves no tensor that was made in inference mode",
    raises=RuntimeError,
)
def test_a_gradient_in_inference_mode_of_what_uses_a_tensor_that_was_made_in_it():
    with torch.inference_mode():
        w = torch.ones(3, dtype=D)
        grad(lambda x: (x * w).sum())(w * 2)


@pytest.mark.xfail(strict=True, reason="the forward runs again where its tangent is differentiated")
def test_a_custom_function_that_writes_to_what_it_captures_under_hessian():
    count = torch.zeros((), dtype=D)

    class Counting(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            count.add_(1)
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * x.cos()

    hessian(lambda x: Counting.apply(x).sum())(torch.ones(3, dtype=D))
    assert count == 1


@pytest.mark.xfail(
    strict=True, raises=RuntimeError, reason="torch reads the places from memory, which is ours"
)
def test_a_split_at_places_in_a_tensor_that_was_made_inside_jvp():
    x = torch.arange(5.0)
    out, _ = jvp(lambda v: torch.tensor_split(v, torch.tensor([1, 3]))[1], (x,), (x,))
    assert out.equal(x[1:3])


@pytest.mark.xfail(strict=True, reason="an operator without a derivative is refused, used or not")
def test_a_value_without_a_derivative_that_nobody_uses():
    def f(x):
        x.unique()
        return (x**3).sum()

    x = torch.tensor([1.0, 2.0, 2.0], dtype=D)
    torch.testing.assert_close(hessian(f)(x), (6 * x).diag())


@pytest.mark.xfail(strict=True, reason="torch reads the places in C++, and jvp sees no such call")
def test_a_size_that_the_places_tell_in_forward_mode():
    def f(x):
        return torch.sparse_coo_tensor([[0, 1], [1, 0]], torch.ones(2, dtype=D)) @ x

    x = torch.tensor([1.0, 2.0], dtype=D)
    torch.testing.assert_close(jvp(f, (x,), (x,))[1], x.flip(0))


@pytest.mark.filterwarnings("ignore:vmap. numpy runs")
@pytest.mark.xfail(
    strict=True, reason="examples do not diverge by the shape that numpy gives", raises=RuntimeError
)
def test_a_shape_that_numpy_gives():
    def f(x):
        return x * len(np.unique((x * 3).long()))

    xs = torch.tensor([[1.0, 1.0], [1.0, 2.0]], dtype=D)
    torch.testing.assert_close(vmap(f)(xs), torch.stack([f(x) for x in xs]))


@pytest.mark.xfail(strict=True, reason="apply_ asks for memory that a value inside jvp lacks")
def test_an_entrywise_function_of_what_has_no_tangent_inside_jvp():
    def f(x):
        return x * x.detach().clone().apply_(lambda v: v + 1)

    x = torch.tensor([1.0, 2.0], dtype=D)
    torch.testing.assert_close(jvp(f, (x,), (torch.ones_like(x),))[1], x + 1)


@pytest.mark.xfail(strict=True, reason="a recorded call knows texts and numbers by their values")
def test_which_of_two_equal_texts_it_is_asks_for_identity():
    sentinel = str(2.5)
    f = jit(lambda x, mode: x * (2 if mode is sentinel else 3))
    x = torch.ones(2)
    assert f(x, sentinel).equal(2 * x)
    assert f(x, str(2.5)).equal(3 * x)


@pytest.mark.xfail(
    strict=True, reason="a saved value counts writes below the levels as well", raises=RuntimeError
)
def test_a_gradient_of_a_hessian_whose_function_writes_into_an_argument():
    def f(x, y):
        y.mul_(x**2)
        return (x * y).sin().sum()

    def loss(x):
        return hessian(f)(x, torch.full((3,), 0.5, dtype=D)).sum()

    x = torch.tensor([0.1, 0.2, 0.3], dtype=D)
    torch.testing.assert_close(grad(loss)(x), jacfwd(loss)(x))


@pytest.mark.xfail(
    strict=True,
    reason="autograd makes the history of a view anew, where an inner level meets its base",
    raises=NotImplementedError,
)
def test_sums_of_examples_added_to_a_view_with_a_history_of_outer_examples():
    def f(x):
        y = (x * 2)[1:]
        vmap(lambda a: (y.add_(a.detach()), a)[1])(x)
        return (y * y).sum()

    x = torch.tensor([[0.1, 0.2, 0.3]], dtype=D)
    total = x[0].sum()
    right = torch.cat([torch.zeros(1, dtype=D), 4 * (2 * x[0, 1:] + total)])
    torch.testing.assert_close(vmap(grad(f))(x)[0], right)


@pytest.mark.xfail(strict=True, reason="torch's formula of x ** tensor, of second order at x = 0")
def test_second_derivative_of_a_power_at_zero():
    xs = torch.tensor([[0.0, 1.0], [1.0, 0.0]])

    def f(x):
        return x ** x[0].item()

    truth = torch.stack([jacrev(jacrev(f))(x) for x in xs])
    assert torch.equal(vmap(jacrev(jacrev(f)))(xs), truth)


@pytest.mark.xfail(strict=True, reason="the inner map's values meet those of the outer one")
@pytest.mark.parametrize("square", [False, True])
def test_gradients_per_example_through_a_pull_back_that_contains_a_map(square, monkeypatch):
    monkeypatch.setattr(forall.config, "replay", False)  # a recorded call has the loop's numbers
    rows, cotangents = torch.eye(2, 3, dtype=D), torch.ones(4, 2, dtype=D)
    _, pull = vjp(lambda x: vmap(lambda a: (a * x).sin().sum())(rows), rows.sum(0))

    def f(c):
        pulled = pull(c)[0]
        return (pulled.square() if square else pulled).sum()

    truth = torch.stack([grad(f)(c) for c in cotangents])
    assert torch.equal(vmap(grad(f))(cotangents), truth)


@pytest.mark.xfail(
    strict=True, reason="what all directions share gets one value for each", raises=ValueError
)
def test_a_hessian_of_a_gradient_through_a_graph_from_before_the_call():
    x = torch.tensor([1.0, 2.0, 3.0], dtype=D, requires_grad=True)
    y = x.sin() * x

    def f(c):
        return torch.autograd.grad(y, x, c, create_graph=True)[0].pow(3).sum()

    cotangents = torch.ones(4, 3, dtype=D)
    expected = torch.stack([hessian(f)(c) for c in cotangents])
    torch.testing.assert_close(vmap(hessian(f))(cotangents), expected)
