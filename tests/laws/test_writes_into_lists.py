"""What writes into the tensors of a list is a write into each, which views and autograd see."""

import pytest
import torch
from torch.autograd import forward_ad

from forall import grad, jvp, vmap
from oracle import same

D = torch.float64


def viewed(v):
    v = v * 1
    t = v[:]
    torch._foreach_mul_([v], 0.5)
    return t.sin().sum()


def written_through_views(v):
    v = v * 1
    rows = [v[:1], v[1:]]
    whole = v.view(-1)
    torch._foreach_add_(rows, [v[1:] * 2, v[:1] * 3])
    torch._foreach_exp_(rows)
    return (whole * v).sum() + rows[0].sum()


def written_from_others(v):
    a, b = v.sin(), v.cos()
    views = [a[0], b[:1]]
    torch._foreach_addcmul_([a, b], [v * 2, v * v], [v, v.exp()])
    return (views[0] * views[1] * a).sum()


def shared(v):
    a = torch.ones(2, dtype=D)
    first = a[0]
    torch._foreach_mul_([a], 3.0)
    torch._foreach_mul_([a], [v])
    return (first * a).sum()


FUNCTIONS = [viewed, written_through_views, written_from_others, shared]


def slope(f, x):
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(f(leaf), leaf)[0]


def push(f, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, x.cos()))).tangent


def curve(f, x):
    leaf = x.clone().requires_grad_()
    first = torch.autograd.grad(f(leaf), leaf, create_graph=True)[0]
    return torch.autograd.grad(first, leaf, x.cos())[0]


WAYS = {
    "vmap of grad": (lambda f, x: vmap(grad(f))(x), slope),
    "grad of vmap": (lambda f, x: grad(lambda x: vmap(f)(x).sum())(x), slope),
    "vmap of vmap of grad": (lambda f, x: vmap(vmap(grad(f)))(x[None])[0], slope),
    "vmap of jvp": (lambda f, x: vmap(lambda x: jvp(f, (x,), (x.cos(),))[1])(x), push),
    "jvp of vmap": (lambda f, x: jvp(vmap(f), (x,), (x.cos(),))[1], push),
    "jvp of vmap of grad": (lambda f, x: jvp(vmap(grad(f)), (x,), (x.cos(),))[1], curve),
    "vmap of jvp of grad": (
        lambda f, x: vmap(lambda x: jvp(grad(f), (x,), (x.cos(),))[1])(x),
        curve,
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_views_see_the_write(f, way):
    xs = torch.linspace(-1, 1, 6, dtype=D).view(3, 2)
    ours, there = WAYS[way]
    assert same(ours(f, xs), torch.stack([there(f, x) for x in xs]))


def spoilt(v):
    y = v * 1
    z = y.sin()
    torch._foreach_mul_([y], 2.0)
    return z.sum()


@pytest.mark.parametrize("way", [w for w in WAYS if "grad" in w])
def test_what_autograd_saved_was_written_to(way):
    ours, there = WAYS[way]
    x = torch.ones(3, 2, dtype=D)
    for run in (lambda: there(spoilt, x[0]), lambda: ours(spoilt, x)):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            run()


def test_each_write_counts_once():
    seen = []

    def f(v):
        a, b = v * 1, torch.zeros(2)
        torch._foreach_mul_([a, b], 2.0)
        b.add_(1)
        seen.append((a._version, b._version))
        return a + b

    vmap(f)(torch.ones(3, 2))
    jvp(f, (torch.ones(2),), (torch.ones(2),))
    f(torch.ones(2))
    assert seen == [(1, 2)] * 3
