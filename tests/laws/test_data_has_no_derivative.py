"""What is written into ``x.data`` changes the numbers of x, and no derivative of it."""

import pytest
import torch

from forall import grad, jacfwd, jvp, linearize, vmap
from oracle import same

D = torch.float64


def doubled(x):
    y = x.sin()
    y.data.mul_(2)
    return y


def times_x(x):
    y = x.sin()
    y.data.mul_(x)
    return y * x


def through_views(x):
    y = x.sin() * 1
    y[0].data.add_(x[1])
    y.view(-1).data[1:].exp_()
    return y * y


def read(x):
    return x.data * x + x.sin().data


def made_here(x):
    y = torch.zeros(2, dtype=D)
    y.data.copy_(x)
    return y.data.data * x


FUNCTIONS = [doubled, times_x, through_views, read, made_here]


def truth(f, x):
    """By autograd's backward, row by row."""
    return torch.autograd.functional.jacobian(f, x) @ x.cos()


def push(f, x):
    value, tangent = jvp(f, (x,), (x.cos(),))
    assert same(value, f(x))
    return tangent


WAYS = {
    "jvp": lambda f, xs: torch.stack([push(f, x) for x in xs]),
    "vmap of jvp": lambda f, xs: vmap(lambda x: jvp(f, (x,), (x.cos(),))[1])(xs),
    "jvp of vmap": lambda f, xs: push(vmap(f), xs),
    "linearize": lambda f, xs: torch.stack([linearize(f, x)[1](x.cos()) for x in xs]),
    "vmap of linearize": lambda f, xs: vmap(lambda x: linearize(f, x)[1](x.cos()))(xs),
    "linearize of vmap": lambda f, xs: linearize(vmap(f), xs)[1](xs.cos()),
    "jacfwd": lambda f, xs: torch.stack([jacfwd(f)(x) @ x.cos() for x in xs]),
    "grad of vmap": lambda f, xs: grad(lambda t: (vmap(f)(xs + t * xs.cos())).sum(1)[0])(
        torch.zeros((), dtype=D)
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_directional_derivatives(f, way):
    xs = torch.linspace(0.2, 1, 6, dtype=D).view(3, 2)
    right = torch.stack([truth(f, x) for x in xs])
    found = WAYS[way](f, xs)
    assert same(found, right if found.dim() else right[0].sum())


@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_of_two_levels_of_forward_mode(f):
    xs = torch.linspace(0.2, 1, 6, dtype=D).view(3, 2)
    along, across = torch.tensor([0.5, 2], dtype=D), torch.tensor([3, -1.0], dtype=D)

    def there(x):
        by_backward = torch.autograd.functional.jvp
        first = lambda x: by_backward(f, x, along, create_graph=True)[1]  # noqa: E731
        return by_backward(first, x, across)[1]

    def once(x):
        return jvp(f, (x,), (along,))[1]

    right = torch.stack([there(x) for x in xs])
    each = torch.stack([jvp(once, (x,), (across,))[1] for x in xs])
    inside = vmap(lambda x: jvp(once, (x,), (across,))[1])(xs)
    between = jvp(vmap(once), (xs,), (across.expand(3, 2),))[1]
    for found in (each, inside, between):
        assert same(found, right)


def test_numpy_reads_the_memory_of_a_tensor_from_outside():
    table, x = torch.arange(3.0).cos(), torch.ones(3)

    def f(x):
        return x * torch.as_tensor(table.numpy())

    for got in (*jvp(f, (x,), (x,)), linearize(f, x)[1](x), jacfwd(f)(x).diagonal()):
        assert torch.equal(got, table)
