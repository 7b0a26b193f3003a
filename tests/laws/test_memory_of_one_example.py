"""What a function makes lies in memory as it does in the loop, wherever the examples' axis is."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from forall import grad, jacfwd, jacrev, jvp, linearize, vmap
from oracle import same

D = torch.float64


def strided(x):
    return x.sin().as_strided((4, 2), (5, 2), 1)


def strided_twice(x):
    return x.sin().as_strided((4, 4), (5, 1)).as_strided((2, 3), (1, 5), 2)


def strided_and_written(x):
    y = x.sin()
    y.as_strided((4, 2), (5, 2), 1).mul_(x[:, :2])
    return y


def strided_in_place(x):
    y = x.sin()
    y.as_strided_((4, 2), (5, 2), 1)
    return y * x[:, 1:3]


def strided_in_place_and_written(x):
    y = x.sin()
    y.as_strided_((2, 3), (3, 1)).add_(x[:2, :3])
    return y.cos()


def turned(x):
    return x.sin().t().as_strided((3, 2), (2, 1), 3)


def told(x):
    y = x.sin()
    return y.as_strided((2, 2), y.stride()) * y.t().stride(0)


def view_written(x):
    y = x.cos()
    y.view(-1)[3:9].mul_(2)
    y.t().reshape(-1)[2:4].mul_(3)
    return y


def by_halves(x):
    y = x.exp()
    return torch.view_as_complex(y[:, :4].contiguous().view(4, 2, 2)).abs()


def pooled(x):
    image = x.sin().expand(2, 3, 4, 5) * torch.arange(6.0, dtype=D).view(2, 3, 1, 1)
    image = image.contiguous(memory_format=torch.channels_last)
    return F.adaptive_avg_pool2d(image, 1).flatten(1).t().reshape(-1) * x[0, 0]


FUNCTIONS = [
    strided,
    strided_twice,
    strided_and_written,
    strided_in_place,
    strided_in_place_and_written,
    turned,
    told,
    view_written,
    by_halves,
    pooled,
]


def direction(x):
    return x.cos()


def pulled(f):
    def there(x):
        leaf = x.detach().clone().requires_grad_()
        return torch.autograd.grad(f(leaf).sin().sum(), leaf)[0]

    return grad(lambda x: f(x).sin().sum()), there


def pushed(f):
    def there(x):
        with forward_ad.dual_level():
            y = f(forward_ad.make_dual(x, direction(x)))
            return forward_ad.unpack_dual(y).tangent

    return lambda x: jvp(f, (x,), (direction(x),))[1], there


def in_columns(f):
    def there(x):
        return torch.autograd.functional.jacobian(f, x)

    return jacfwd(f), there


def in_rows(f):
    return jacrev(f), in_columns(f)[1]


def played(f):
    def ours(x):
        return linearize(f, x)[1](direction(x))

    return ours, pushed(f)[1]


WORDS = {
    "f": lambda f: (f, f),
    "grad": pulled,
    "jvp": pushed,
    "jacfwd": in_columns,
    "jacrev": in_rows,
    "linearize": played,
}


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_the_axis_of_the_examples(f, word, dim):
    xs = torch.linspace(-1, 1, 60, dtype=D).view(3, 4, 5)
    stack = xs.movedim(0, dim).contiguous()
    ours, there = WORDS[word](f)
    assert same(vmap(ours, dim)(stack), torch.stack([there(x) for x in xs]))


@pytest.mark.parametrize("dims", [(0, 2), (2, 0), (1, 1), (3, 0), (0, 3), (2, 1)])
@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_the_axes_of_two_levels(f, word, dims):
    outer, inner = dims[0], dims[1] if dims[1] < 3 else 2
    xs = torch.linspace(-1, 1, 120, dtype=D).view(2, 3, 4, 5)
    stack = torch.stack([half.movedim(0, inner) for half in xs], outer)
    ours, there = WORDS[word](f)
    found = vmap(vmap(ours, inner), outer)(stack)
    assert same(found, torch.stack([torch.stack([there(x) for x in half]) for half in xs]))


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_derivatives_of_all_examples(f, dim):
    xs = torch.linspace(-1, 1, 60, dtype=D).view(3, 4, 5)
    stack = xs.movedim(0, dim).contiguous()
    _, there = pulled(f)
    found = grad(lambda s: vmap(f, dim)(s).sin().sum())(stack)
    assert same(found, torch.stack([there(x) for x in xs], dim))
    _, push = pushed(f)
    found = jvp(vmap(f, dim), (stack,), (direction(stack),))[1]
    assert same(found, torch.stack([push(x) for x in xs]))
