"""Results that are views of what is given, captured or returned, with a derivative outside."""

import warnings
from types import SimpleNamespace

import pytest
import torch

import forall
from forall import vmap
from forall._jit.cache.differentiable_entry import DifferentiableEntry

D = torch.float64
W = torch.linspace(1, 2, 12, dtype=D).reshape(3, 4).requires_grad_()
X = torch.linspace(0.1, 1, 12, dtype=D).reshape(3, 4)


@pytest.fixture
def replayed(monkeypatch):
    """Calls that were replayed as a node of the graph."""
    calls, real = [], DifferentiableEntry.__call__
    monkeypatch.setattr(
        DifferentiableEntry, "__call__", lambda self, given: calls.append(1) or real(self, given)
    )
    return calls


def detached(x):
    y = x.exp()
    return y, y.t(), y.detach(), y.t().detach()


def without_history(x):
    y = x.exp()
    with torch.no_grad():  # these say that they require grad, and no gradient ever comes to them
        return y, y[0], W.t()


def parts(x):
    y = (x * W).sin()
    return y.unbind(0), y.split(2, 1), y[1]


FUNCTIONS = {
    "the argument": lambda x: (x, x * 2),
    "what is captured": lambda x: (W, x * W),
    "a view of the argument": lambda x: (x.t(), x[0].sin()),
    "a view of what is captured": lambda x: (W.t()[1:], x @ W.t()),
    "views of a result": lambda x: (y := x.exp(), y.t(), y.t()[1], y.view(-1)),
    "views of what is no result": lambda x: ((y := x.exp() * W).t(), y[0], y[1:, :2]),
    "the same again": lambda x: (y := x.exp(), y, y.t(), y[0], y[0]),
    "without a history": detached,
    "parts": parts,
    "one number for many": lambda x: (x.sum() * W.sum()).expand(2, 3, 4).chunk(2),
    "mapped": lambda x: vmap(lambda x, w: (w, (y := x * w).sin(), y, y[:2]))(x, W),
    "a constant": lambda x: (torch.tensor([1.0, 2.0], dtype=D), x * 2, W.t()),
    "diagonals": lambda x: ((y := x.sin() @ W.t()).diagonal(), y),
    "windows": lambda x: ((y := x.sin()).unfold(1, 2, 1), y * W),
    "another dtype": lambda x: ((y := x * W).view(torch.int64), y.exp()),
}


def of(h, x):
    """Values, whether they require grad, and the slope of all that do, once and twice."""
    x = x.clone().requires_grad_()
    found = forall._compat.pytree.get_leaves(h(x))
    ends = [y for y in found if y.requires_grad]
    loss = sum((y.square() * y.exp()).sum() * (i + 1) for i, y in enumerate(ends))
    slopes = torch.autograd.grad(loss, (x, W), create_graph=True, allow_unused=True)
    twice = sum(g.square().sum() for g in slopes if g is not None)
    again = torch.autograd.grad(twice, (x, W), allow_unused=True)
    values = [y.detach() for y in found]
    found = forall._compat.pytree.get_leaves(h(x))
    loss = sum((y.cos() * y).sum() * (i + 1) for i, y in enumerate(found) if y.requires_grad)
    once = torch.autograd.grad(loss, (x, W), allow_unused=True)
    return values, len(ends), [*slopes, *again, *once]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_has_the_slopes_of_the_function(name, recorded, replayed):
    f = FUNCTIONS[name]
    g = recorded(f)
    with warnings.catch_warnings():
        warnings.simplefilter("error", forall.PerformanceWarning)
        for i in range(6):
            found, wanted = of(g, X + i), of(f, X + i)
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert replayed


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_lies_where_it_lay(name, recorded):
    """Which results are one tensor, which share memory, which are the arguments themselves."""
    f = FUNCTIONS[name]
    g = recorded(f)

    def told(h):
        x = X.clone().requires_grad_()
        found = [x, W, *forall._compat.pytree.get_leaves(h(x))]
        places = [y.untyped_storage().data_ptr() for y in found]
        return (
            [[a is b for b in found] for a in found],
            [[a == b for b in places] for a in places],
            [(y.requires_grad, y.shape, y.stride(), y.storage_offset()) for y in found],
        )

    for _ in range(6):
        assert told(g) == told(f)


def test_a_write_into_one_is_seen_by_all(recorded, replayed):
    def f(x):
        y = x.exp() * 2
        return y, y.t()

    def use(h, x):
        x = x.clone().requires_grad_()
        y, v = h(x)
        v[0].mul_(3)
        y[1].add_(x[1])
        return y.detach().clone(), v.detach().clone(), torch.autograd.grad((y * v.t()).sum(), x)[0]

    g = recorded(f)
    for i in range(6):
        torch.testing.assert_close(use(g, X + i), use(f, X + i))
    assert replayed


def test_a_write_into_a_view_of_an_argument(recorded):
    def use(h, x):
        x = x.clone().requires_grad_()
        a = x * 1
        y, v = h(a)
        v.mul_(3)
        return y.detach(), torch.autograd.grad((a * y).sum(), x)[0]

    f = lambda x: (x.sum(0), x.t())  # noqa: E731
    g = recorded(f)
    for i in range(6):
        torch.testing.assert_close(use(g, X + i), use(f, X + i))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.by = 5
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return ctx.by * g


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        return 7 * g * ctx.saved_tensors[0]


def hooked(x):
    v = (y := x.exp()).t()
    v.register_hook(lambda g: 3 * g)
    return y, v


def written(x):
    y = x * 2
    v = y.t()
    y[0].mul_(x[0])
    return y, v, y[1]


def leaf_inside(x):
    v = (y := x.exp()).detach()[0].requires_grad_()
    return y, v * 2, v


ODD = {
    "a view by a Function": lambda x: (Doubled.apply(x), x * 2),
    "a view by a Function of a result": lambda x: ((y := x.exp()), Doubled.apply(y)),
    "a view of a Function's result": lambda x: ((y := Scaled.apply(x)), y.t()),
    "a hook": hooked,
    "a write": written,
    "a leaf": leaf_inside,
    "made without a history": without_history,
    "as numbers of another kind": lambda x: torch.view_as_real(torch.view_as_complex(x * 1)),
}


@pytest.mark.filterwarnings("ignore:.*not recorded:forall.PerformanceWarning")
@pytest.mark.parametrize("name", ODD)
def test_what_is_no_view_alone(name, recorded):
    f = ODD[name]
    g = recorded(f)

    def use(h, x):
        x = x[:, :2].clone().requires_grad_()
        found = h(x)
        ends = [y for y in forall._compat.pytree.get_leaves(found) if y.requires_grad and y.grad_fn]
        loss = sum(y.square().sum() * (i + 1) for i, y in enumerate(ends))
        return [y.detach() for y in ends], torch.autograd.grad(loss, x)[0]

    for i in range(6):
        torch.testing.assert_close(use(g, X + i), use(f, X + i), rtol=1e-12, atol=1e-12)


def test_arguments_made_of_each_other_and_their_views(recorded):
    def f(a, b):
        return a.t(), b, (a * b).sin(), (c := b.exp()), c[0]

    def use(h, x):
        x = x.clone().requires_grad_()
        a = x * 2
        ends = h(a, a.exp() * W)
        return torch.autograd.grad(sum(y.square().sum() for y in ends), (x, W))

    g = recorded(f)
    for i in range(6):
        torch.testing.assert_close(use(g, X / (i + 1)), use(f, X / (i + 1)))


def test_a_capture_that_is_a_view_itself(recorded):
    w = torch.linspace(0, 1, 12, dtype=D).reshape(3, 4).requires_grad_()
    home = SimpleNamespace(v=w[1:], u=w.exp())

    def f(x):
        return home.v, home.v[0], home.u.t(), x * home.u

    g = recorded(f)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", forall.PerformanceWarning)
        for i in range(6):
            slopes = [
                torch.autograd.grad(sum(y.square().sum() for y in h(X + i)), w, retain_graph=True)
                for h in (g, f)
            ]
            torch.testing.assert_close(*slopes)
