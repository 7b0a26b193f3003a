"""A backward pass records itself only where somebody can ask for its derivative."""

import pytest
import torch
from torch.testing import assert_close

import forall
from forall._autodiff import reverse_mode


def variable(value=2.0):
    return torch.tensor(value, requires_grad=True)


def test_a_graph_of_own_variables_alone_is_closed():
    with reverse_mode.record_autograd() as run:
        x, y = reverse_mode.make_variables([torch.tensor(2.0), torch.tensor(3.0)])
        assert reverse_mode.can_skip_graph((x.sin() * y,), run)
        assert not reverse_mode.can_skip_graph((x * variable(),), run)


def test_variables_of_a_run_within_are_closed_and_those_of_one_around_are_not():
    with reverse_mode.record_autograd() as outer:
        (x,) = reverse_mode.make_variables([torch.tensor(2.0)])
        with reverse_mode.record_autograd() as inner:
            (y,) = reverse_mode.make_variables([torch.tensor(3.0)])
        both = x * y
        assert reverse_mode.can_skip_graph((both,), outer)
        assert not reverse_mode.can_skip_graph((both,), inner)


def test_only_the_results_that_lead_outside_keep_their_history():
    w = variable()
    with reverse_mode.record_autograd() as run:
        (x,) = reverse_mode.make_variables([torch.tensor(2.0)])
        results = x.sin(), w * x, x, w, w.exp(), torch.ones(())
    requires = [t.requires_grad for t in reverse_mode.detach_from_run(results, run, True)]
    assert requires == [False, True, False, True, True, False]


def test_a_function_written_in_python_runs_as_in_a_pass_that_records():
    seen = []

    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            seen.append(torch.is_grad_enabled())
            return g * 3 * x**2

    xs = torch.tensor([1.0, 2.0])
    assert_close(forall.vmap(forall.grad(Cube.apply))(xs), 3 * xs**2)
    assert_close(forall.grad(Cube.apply)(xs[1]), torch.tensor(12.0))
    assert seen == [True, True]


def test_what_can_be_asked_for_from_outside_has_its_derivative():
    xs, w = torch.tensor([1.0, 2.0]), variable()
    found = forall.vmap(forall.grad(lambda x: (w * x).sin()))(xs)
    found.sum().backward()
    other = variable()
    (other * (other * xs).cos()).sum().backward()
    assert_close(w.grad, other.grad)


def test_tangents_pass_through_a_closed_pass():
    x, t = torch.tensor(0.5), torch.tensor(2.0)
    assert_close(forall.jvp(forall.grad(torch.sin), (x,), (t,))[1], -x.sin() * t)
    together = forall.vmap(lambda x: forall.jvp(forall.grad(torch.sin), (x,), (t,))[1])
    assert_close(together(x.expand(3)), (-x.sin() * t).expand(3))


def test_a_gradient_that_a_hook_keeps_has_the_numbers_of_the_loop():
    kept = []

    def f(x):
        y = x.sin()
        y.register_hook(lambda g: kept.append(forall.stacked(g)))
        return y * y

    xs = torch.tensor([1.0, 2.0])
    assert_close(forall.vmap(forall.grad(f))(xs), 2 * xs.sin() * xs.cos())
    assert_close(kept[0].detach(), 2 * xs.sin())


HOOKED = {
    "tensor": lambda y, hook: y.register_hook(hook),
    "node": lambda y, hook: y.grad_fn.register_prehook(lambda gs: (hook(gs[0]),)),
    "behind": lambda y, hook: y.grad_fn.register_hook(lambda gs, _: (hook(gs[0]), *gs[1:])),
}


@pytest.mark.parametrize("register", HOOKED.values(), ids=HOOKED)
@pytest.mark.parametrize("mapped", [False, True])
def test_what_a_hook_captures_has_its_derivative(register, mapped):
    """Nothing in the graph of the function tells of ``w``."""
    x, w = torch.tensor([0.5, 2.0]), torch.tensor([3.0, 4.0])

    def summed(gradient_of, w):
        def f(x):
            y = x * x
            register(y, lambda g: g * w * w)
            return y.sin().sum()

        return gradient_of(f)(x).sum()

    def plain(f):
        def gradient(x):
            x = x.detach().requires_grad_()
            return torch.autograd.grad(f(x), x, create_graph=True)[0]

        return gradient

    given = torch.stack([w, w + 1]) if mapped else w
    ours = forall.grad(lambda w: summed(forall.grad, w))
    ours = forall.vmap(ours) if mapped else ours
    rows = [v.detach().requires_grad_() for v in (given if mapped else (w,))]
    truth = [torch.autograd.grad(summed(plain, v), v)[0] for v in rows]
    assert_close(ours(given), torch.stack(truth) if mapped else truth[0])

    leaves = [w.clone().requires_grad_() for _ in range(2)]
    for gradient_of, leaf in zip((forall.grad, plain), leaves, strict=True):
        summed(gradient_of, leaf).backward()
    assert_close(leaves[0].grad, leaves[1].grad)


def test_a_hook_that_needs_no_derivative_runs_once():
    seen, x, w = [], torch.tensor(0.5), torch.tensor(2.0).requires_grad_()

    def f(x):
        y = x * x
        y.register_hook(lambda g: seen.append(g.detach() + w.shape.numel()))
        y.register_hook(lambda g: g * w.detach() * y.sign())
        return y

    assert_close(forall.grad(f)(x), 2 * 2 * x)
    assert len(seen) == 1
