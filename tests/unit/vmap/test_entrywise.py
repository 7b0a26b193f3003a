"""`apply_`, `map_` and `map2_`: Python's functions on entries are those of the loop."""

import pytest
import torch

import forall
from forall import grad, jvp, vmap
from oracle import check_vmap

X = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4)
Y = torch.linspace(2, 3, 4, dtype=torch.float64)


def cubed(v):
    return v**3 + 1


BODIES = [
    lambda x: x.clone().apply_(cubed),
    lambda x: x * Y.clone().apply_(cubed),
    lambda x: x.clone().map_(Y, lambda a, b: a * b + 1),
    lambda x: Y.clone().map_(x, lambda a, b: a - b),
    lambda x: x.clone().map2_(Y, x * 2, lambda a, b, c: a * b - c),
    lambda x: vmap(lambda a, b: a.clone().map_(b, lambda u, v: u / v), (0, None))(x, x[0]),
    lambda x: x.unsqueeze(0).repeat(2, 1)[1].apply_(cubed) if x[0] > 0 else x + 1,
]


@pytest.mark.parametrize("f", BODIES)
@pytest.mark.parametrize("dim", [0, 1])
def test_the_loop(f, dim):
    x = torch.cat([X, X[:1] - 1])  # (4, 4): along either dim there are four numbers, as in Y
    check_vmap(f, (x,), dim)


def test_order_of_the_calls_is_the_loops():
    seen, known = [], []
    vmap(lambda x: x.clone().apply_(lambda v: (seen.append(v), v)[1]))(X)
    for x in X:
        x.clone().apply_(lambda v: (known.append(v), v)[1])
    assert seen == known


def test_a_mapped_argument_is_written_to():
    x = X.clone()
    vmap(lambda x: x.apply_(cubed).sum())(x)
    torch.testing.assert_close(x, cubed(X))


def test_older_memory_that_is_read_and_written():
    y = Y.clone()
    with pytest.raises(RuntimeError, match="all examples share"):
        vmap(lambda x: (y.apply_(cubed), x)[1])(X)
    assert y.equal(Y)


def test_derivatives():
    f = lambda x: (x * x.detach().clone().apply_(cubed)).sum()  # noqa: E731
    torch.testing.assert_close(vmap(grad(f))(X), cubed(X))
    with pytest.raises(RuntimeError, match="requires grad"):
        grad(lambda x: x.clone().apply_(cubed).sum())(Y)
    with pytest.raises(RuntimeError, match="requires grad"):
        vmap(grad(lambda x: x.clone().apply_(cubed).sum()))(X)
    with pytest.raises(RuntimeError, match="memory of a tensor that has a tangent"):
        jvp(lambda x: x * Y.clone().apply_(cubed), (Y,), (Y,))


@pytest.mark.filterwarnings("ignore:.*not recorded:forall.PerformanceWarning")
def test_recorded():
    y = Y.clone()
    f = lambda x: x * y.clone().apply_(cubed)  # noqa: E731
    g = forall.jit(f)
    for i in range(4):
        y.fill_(i)
        torch.testing.assert_close(g(X), f(X))
