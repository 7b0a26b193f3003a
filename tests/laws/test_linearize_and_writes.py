"""The tangent program of a function that writes in place is that of the values it saw."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from forall import config, jit, jvp, linearize, vmap
from oracle import same

D = torch.float64
W = torch.linspace(-1, 1, 5, dtype=D)


def used_then_scaled(x):
    y = x.sin()
    z = y * y
    y.mul_(2)
    return z + y


def used_then_zeroed(x):
    y = x.sin()
    z = y.exp()
    z.mul_(y)
    y.zero_()
    return z


def a_result_that_is_saved(x):
    y = x.exp()
    z = y.sqrt()
    y.add_(1).log_()
    return z * y


def in_place_all_along(x):
    y = x * W
    for _ in range(3):
        y = y.sin_().mul_(x).add_(y.exp())
    return y


def by_a_view(x):
    y = x.cos()
    z = y * y
    y[1:3].mul_(x[:2])
    y.view(-1)[0] = 3.0
    return z * y


def a_part_of_a_buffer(x):
    out = torch.zeros(2, 5, dtype=D)
    out[0] = x.sin()
    z = out[0] * out[0]
    out[0].copy_(z)
    out[1].addcmul_(z, x)
    return out * out


def by_out(x):
    y = x.sin()
    z = y * y
    other = torch.empty(5, dtype=D)
    torch.add(torch.ones(5, dtype=D), 1, out=other)
    a = other * x
    other.zero_()
    return z + a


def rectified(x):
    h = x * W
    s = h * h
    return F.relu(h, inplace=True) * s + h.sigmoid_() * x


def turned(x):
    y = x.sin().reshape(1, 5)
    z = y * y
    y.t_().squeeze_(1)
    return z.sum(0) * y


def the_argument(x):
    z = x * x
    x = x.clone().mul_(z)
    z.add_(x)
    return z * x


def a_captured_tensor(x):
    scale = W.clone()
    z = scale * x
    scale.mul_(3)
    return z + scale * x * x


def by_halves(x):
    halves = [x.sin(), x.cos()]
    stacked = torch.stack(halves)
    z = stacked.prod(0)
    torch._foreach_mul_(halves, 2.0)
    stacked[0].sub_(halves[1])
    return z * stacked.sum(0)


FUNCTIONS = [
    used_then_scaled,
    used_then_zeroed,
    a_result_that_is_saved,
    in_place_all_along,
    by_a_view,
    a_part_of_a_buffer,
    by_out,
    rectified,
    turned,
    the_argument,
    a_captured_tensor,
    by_halves,
]
functions = pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)


def pushed(f, x, t) -> tuple:
    with forward_ad.dual_level():
        y, moved = forward_ad.unpack_dual(f(forward_ad.make_dual(x, t)))
    return y, moved


def points():
    return torch.linspace(0.1, 0.9, 15, dtype=D).view(3, 5), torch.arange(15, dtype=D).cos().view(
        3, 5
    )


@functions
def test_a_point(f):
    xs, ts = points()
    for x, t in zip(xs, ts, strict=True):
        y, push = linearize(f, x)
        expected, moved = pushed(f, x, t)
        assert same(y, expected)
        assert same(push(t), moved)
        assert same(push(t + t), moved + moved)  # and once more


@functions
def test_several_points(f):
    xs, ts = points()
    expected = torch.stack([pushed(f, x, t)[1] for x, t in zip(xs, ts, strict=True)])
    assert same(vmap(lambda x, t: linearize(f, x)[1](t))(xs, ts), expected)
    assert same(vmap(lambda x, t: linearize(f, x)[1](t), 1)(xs.T, ts.T), expected)
    assert same(linearize(vmap(f), xs)[1](ts), expected)


@functions
def test_several_directions(f):
    xs, ts = points()
    _, push = linearize(f, xs[0])
    assert same(vmap(push)(ts), torch.stack([pushed(f, xs[0], t)[1] for t in ts]))


@functions
def test_derivatives_of_the_program(f):
    x, t = (a[0] for a in points())
    found = jvp(lambda x: linearize(f, x)[1](t), (x,), (t,))
    expected = jvp(lambda x: jvp(f, (x,), (t,))[1], (x,), (t,))
    assert same(found, expected)
    found = linearize(lambda x: linearize(f, x)[1](t), x)[1](t)
    assert same(found, expected[1])


@functions
def test_recorded_calls(f, monkeypatch):
    monkeypatch.setattr(config, "patience", 0)
    xs, ts = points()
    program = jit(lambda x, t: linearize(f, x)[1](t))
    for x, t in [*zip(xs, ts, strict=True)] * 2:
        expected = pushed(f, x, t)[1]
        assert same(program(x, t), expected)
        assert same(linearize(f, x)[1](t), expected)


@pytest.mark.parametrize("replay", [True, False])
def test_a_modules_parameters_are_as_they_were_in_each_direction(replay, monkeypatch):
    monkeypatch.setattr(config, "replay", replay)
    net = torch.nn.Sequential(
        torch.nn.Linear(5, 4), torch.nn.LayerNorm(4), torch.nn.Tanh(), torch.nn.Linear(4, 2)
    ).to(D)  # whose weights were written into when they were made
    x, tangents = torch.randn(3, 5, dtype=D), torch.randn(6, 3, 5, dtype=D)
    _, push = linearize(net, x)
    expected = torch.stack([jvp(net, (x,), (t,))[1] for t in tangents])
    assert same(vmap(push)(tangents), expected)
    nested = vmap(vmap(push))(tangents.view(2, 3, 3, 5))
    assert same(nested, expected.view(2, 3, 3, 2))
    with torch.no_grad():
        net[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        vmap(push)(tangents)
