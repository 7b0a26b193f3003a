"""`linearize` of a function whose calls are replayed: its value, and what is asked of `push`."""

import gc
import weakref

import pytest
import torch

import forall
from forall import grad, hvp, jacfwd, jvp, linearize, vjp, vmap
from jit.cases import Cubed

pytestmark = pytest.mark.usefixtures("at_once")
D = torch.float64
X = torch.linspace(0.1, 1, 12, dtype=D).reshape(4, 3)
T = torch.linspace(-1, 1, 3, dtype=D)
W = torch.linspace(1, 2, 9, dtype=D).reshape(3, 3)


@pytest.fixture
def hits(either_way, hits):
    return hits


def both(f, use, calls=6, at=lambda i: X[0] + i):
    """What ``use`` finds of replayed calls, and of the same without, bit for bit."""
    on = forall.config.replay
    for i in range(calls):
        torch.manual_seed(i)
        found = use(f, at(i))
        torch.manual_seed(i)
        forall.config.replay = False
        wanted = use(f, at(i))
        forall.config.replay = on
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
        kinds = [
            [t.requires_grad for t in forall._compat.pytree.get_leaves(r)] for r in (found, wanted)
        ]
        assert kinds[0] == kinds[1]


def ways(f, x):
    y, push = linearize(f, x)
    return y, push(T), push(2 * T), push(T)


FUNCTIONS = {
    "a layer": lambda: lambda x: (W @ x).tanh() + x.sin() * x.sum(),
    "what it captures as it is": lambda: lambda x: x * W * x,
    "its own result": lambda: lambda x: x.exp(),
    "views of its own result": lambda: lambda x: (x.exp().view(3, 1) @ x.exp()[None]).t(),
    "a tree": lambda: lambda x: {"a": [x.sin(), (x * 2,)], "b": x.sum()},
    "nothing that moves": lambda: lambda x: (torch.ones(2, dtype=D), x.detach() * 2, x * 3),
    "the argument": lambda: lambda x: x,
    "a view of it": lambda: lambda x: x[1:],
    "writes into its own": lambda: lambda x: x.clone().mul_(x).add_(W[0]),
    "a write into a part": lambda: written_in_part,
    "a transform inside": lambda: lambda x: grad(lambda x: (x.sin() * x).sum())(x),
    "examples inside": lambda: lambda x: vmap(lambda w: (w * x).sum().cos())(W),
    "no derivative in a part": lambda: partly,
    "numbers": lambda: lambda x: x**3 / 7 - torch.tensor(2.0, dtype=D) * x,
    "a sort": lambda: lambda x: (x - 0.5).abs().sort(descending=True).values * x,
    "an inverse": lambda: lambda x: torch.linalg.inv(W * W.t() + x.diag().exp()),
    "complex": lambda: lambda x: torch.view_as_real((x + 2j * x.exp()) * x),
}


def written_in_part(x):
    y = torch.zeros(4, dtype=D)
    y[1:] = x * x
    y[0] = x[2] * x[0]
    return y


def partly(x):
    with torch.no_grad():
        z = x.sin()
    return z * x


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_call_is_the_functions(name, hits):
    both(FUNCTIONS[name](), ways)
    assert "_linearize_eagerly" in hits
    assert "play" in hits


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_with_a_derivative_outside(name, hits):
    p = torch.linspace(0.5, 1.5, 3, dtype=D).requires_grad_()
    f = FUNCTIONS[name]()

    def use(f, x):
        x = x.clone().requires_grad_()
        t = T.clone().requires_grad_()
        y, push = linearize(f, x * p)
        first, second = push(t), push(p * 2)
        leaves = [
            z for z in forall._compat.pytree.get_leaves((y, first, second)) if z.requires_grad
        ]
        if not leaves:
            return y, first, second
        loss = sum((z.square() * (i + 1)).sum() for i, z in enumerate(leaves))
        return loss.detach(), torch.autograd.grad(loss, (x, t, p), allow_unused=True)

    use_in_bits(f, use)
    del hits


def use_in_bits(f, use):
    """As `both`, but for rounding: gradients are added up in another order."""
    on = forall.config.replay
    for i in range(7):
        found = use(f, X[0] + i)
        forall.config.replay = False
        wanted = use(f, X[0] + i)
        forall.config.replay = on
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12, equal_nan=True)


def test_changing_shapes_and_kinds(hits):
    f = lambda x: x.sin() * x.sum()  # noqa: E731

    def use(f, x):
        y, push = linearize(f, x)
        return y, push(torch.ones_like(x)), push(x)

    points = [X[0], X, X.float(), X[0], X.t(), X, X[1:3]]
    both(f, use, 28, lambda i: points[i % 7] + i)
    assert hits


def test_captured_tensors_are_read_anew(hits):
    w = torch.ones(3, dtype=D)
    f = lambda x: (x * w).sin()  # noqa: E731
    for i in range(8):
        w.fill_(i)
        y, push = linearize(f, X[0])
        torch.testing.assert_close(y, (X[0] * i).sin(), rtol=0, atol=0)
        torch.testing.assert_close(push(T), T * i * (X[0] * i).cos())
    assert hits


def test_what_is_written_between_a_call_and_its_push(hits):
    """The constants of the program are the very tensors, and no longer what they were."""
    w = torch.ones(3, dtype=D)

    def use(f, x):
        w.fill_(2)
        x = x.clone()
        y, push = linearize(f, x)
        w.mul_(3)
        x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            push(T)
        return y

    both(lambda x: x * w * x.sin(), use)
    assert hits


def test_numbers_that_change(hits):
    rate, rates = {"by": 1.0}, [0.0, 1.0, 2.0]
    f = lambda x: x.sin() * rate["by"]  # noqa: E731
    for i in range(30):
        rate["by"] = rates[i // 10]
        torch.testing.assert_close(linearize(f, X[0])[1](T), T * X[0].cos() * (i // 10))
    assert hits


def test_draws_are_in_their_order(hits):
    def f(x):
        return torch.nn.functional.dropout(x * x, 0.5) + torch.rand_like(x) * x

    def use(f, x):
        y, push = linearize(f, x)
        return y, push(T), push(T), torch.rand(2)

    both(f, use)
    assert hits


def test_side_effects_happen_with_each_call():
    told = []

    def f(x):
        told.append(1)
        return x.sin()

    for _ in range(6):
        linearize(f, X[0])[1](T)
    assert len(told) == 6


def test_writes_to_what_is_outside_happen_with_each_call():
    count = torch.zeros(())

    def f(x):
        count.add_(1)
        return x.sin() * count

    for i in range(6):
        torch.testing.assert_close(linearize(f, X[0])[1](T), T * X[0].cos() * (i + 1))
    assert count == 6


def test_a_push_outlives_later_calls(hits):
    f = lambda x: (W @ x).tanh() * x  # noqa: E731
    pushes = [linearize(f, X[0] + i)[1] for i in range(7)]
    wanted = [jvp(f, (X[0] + i,), (T,))[1] for i in range(7)]
    for _ in range(4):
        for push, known in zip(pushes, wanted, strict=True):
            torch.testing.assert_close(push(T), known)
    assert {"_linearize_eagerly", "play"} <= {*hits}


def test_results_are_the_callers_own(hits):
    f = lambda x: x.exp()  # noqa: E731
    for i in range(7):
        y, push = linearize(f, X[0] + i)
        push(T).zero_()
        torch.testing.assert_close(push(T), T * (X[0] + i).exp())
        torch.testing.assert_close(y, (X[0] + i).exp(), rtol=0, atol=0)
    assert hits


@pytest.mark.parametrize(
    "use",
    [
        lambda f, x: vmap(linearize(f, x)[1])(torch.eye(3, dtype=D)),
        lambda f, x: jacfwd(linearize(f, x)[1])(T),
        lambda f, x: jvp(linearize(f, x)[1], (T,), (2 * T,)),
        lambda f, x: vjp(linearize(f, x)[1], T)[1](T),
        lambda f, x: linearize(linearize(f, x)[1], T)[1](2 * T),
        lambda f, x: vmap(lambda x: linearize(f, x)[1](T))(torch.stack([x, 2 * x])),
        lambda f, x: grad(lambda x: linearize(f, x)[1](T).square().sum())(x),
        lambda f, x: jvp(lambda x: linearize(f, x)[1](T), (x,), (T,)),
        lambda f, x: linearize(grad(lambda x: f(x).sum()), x)[1](T),
        lambda f, x: hvp(lambda x: linearize(f, x)[1](T).square().sum())(x, T),
        lambda f, x: forall.jit(lambda t: linearize(f, x)[1](t))(T),
    ],
)
def test_transforms_of_it(use):
    both(lambda x: (W @ x).tanh() * x.sum(), use)


def test_a_push_that_a_recorded_function_captures():
    f = lambda x: x.sin() * x  # noqa: E731
    for i in range(4):
        _, push = linearize(f, X[0] + i)
        along = grad(lambda t, push=push: push(t).square().sum())
        for k in range(4):
            t = T + k
            slope = (X[0] + i).cos() * (X[0] + i) + (X[0] + i).sin()
            torch.testing.assert_close(along(t), 2 * t * slope**2)


@pytest.mark.parametrize("outside", [True, False])
def test_under_no_grad_it_is_a_constant(hits, outside):
    w = torch.ones(3, dtype=D, requires_grad=True)
    f = lambda x: (x * w).sin() * w  # noqa: E731
    for i in range(6):
        with torch.no_grad():
            y, push = linearize(f, X[0] + i)
            inside = push(T)
        u = push(T) if outside else inside
        assert not y.requires_grad
        assert not u.requires_grad
        torch.testing.assert_close(u, T * (X[0] + i).cos())
    assert hits


@pytest.mark.parametrize("older", [True, False])
def test_in_inference_mode(older):
    layer = torch.nn.Linear(3, 3, dtype=D)
    f = lambda x: layer(x).tanh() * x  # noqa: E731
    for i in range(6):
        x = X[0] + i
        with torch.no_grad():
            wanted = f(x), jvp(f, (x,), (T,))[1]
        with torch.inference_mode():
            y, push = linearize(f, x if older else x.clone())
            inside = push(T), push(T.clone())
        torch.testing.assert_close((y, *inside, push(T)), (*wanted, wanted[1], wanted[1]))
        assert not y.requires_grad


def test_pulled_back_through_one_and_the_other():
    w = torch.linspace(1, 2, 3, dtype=D).requires_grad_()
    f = lambda x: (x * w).tanh() * w  # noqa: E731

    def use(f, x):
        y, push = linearize(f, x)
        u = push(T)
        way = int(x[0]) % 3
        ends = [y.sum()] if way == 0 else [u.sum()] if way == 1 else [y.sum(), u.square().sum()]
        (g,) = torch.autograd.grad(ends, w, create_graph=True)
        return g.detach(), torch.autograd.grad(g.square().sum(), w)[0]

    for _ in range(3):
        use_in_bits(f, use)


def test_what_is_read_by_a_backward_pass_and_written_is_an_error_as_ever():
    w = torch.linspace(1, 2, 3, dtype=D).requires_grad_()
    f = lambda x: (x * w).sin()  # noqa: E731
    for i in range(6):
        _, push = linearize(f, X[0] + i)
        u = push(T.clone().requires_grad_())  # so that its pull-back reads w
        with torch.no_grad():
            w.add_(1)
        with pytest.raises(RuntimeError, match=r"inplace operation|changed since"):
            u.sum().backward()


def test_errors_are_as_ever(hits):
    f = lambda x: torch.linalg.cholesky(x.diag())  # noqa: E731
    for _ in range(5):
        linearize(f, X[0])[1](T)
    with pytest.raises(RuntimeError, match="not positive-definite"):
        linearize(f, -X[0])
    _, push = linearize(f, X[0])
    for _ in range(3):
        with pytest.raises(RuntimeError, match="linearize"):
            push(T.float())
        with pytest.raises(RuntimeError, match="linearize"):
            push(T, T)
        push(T)
    assert hits


def test_a_backward_of_the_users_own_is_part_of_the_program():
    both(lambda x: Cubed.apply(x) * x.sin(), ways)


@pytest.mark.parametrize("pushes", [1, 9])
def test_nothing_is_kept(pushes):
    f = lambda x: (W @ x).tanh() * x  # noqa: E731

    def call(i):
        x = X[0] + i
        y, push = linearize(f, x)
        made = [push(T) for _ in range(pushes)]
        return [weakref.ref(t) for t in (x, y, *made)], weakref.ref(push)

    for i in range(12):  # until all is recorded that will be
        call(i)
    gc.collect()
    for i in range(3):
        gone, push = call(i)
        assert push() is None
        assert [r() for r in gone] == [None] * (2 + pushes)


def test_a_push_that_is_kept_keeps_its_own_constants_alone():
    f = lambda x: (W @ x).tanh() * x  # noqa: E731

    def call(i):
        x = X[0] + i
        y, push = linearize(f, x)
        push(T)
        return push, weakref.ref(x), weakref.ref(y)

    kept = [call(i) for i in range(6)]
    gc.collect()
    assert all(y() is None for _, _, y in kept[3:])
    last = kept[-1][0]
    kept.clear()
    gc.collect()
    torch.testing.assert_close(last(T), jvp(f, (X[0] + 5,), (T,))[1])
