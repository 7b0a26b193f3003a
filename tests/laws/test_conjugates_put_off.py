"""A tensor may have its conjugation, or negation, yet to be done: derivatives see the numbers."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

from forall import jit, jvp, linearize, vjp, vmap
from oracle import same

COMPLEX = torch.complex128


def _inner(x):
    return x[None].mH @ x.conj()[None]


def _written(x):
    y = x.conj().view(2, 2).clone().mH.t_()
    return y.conj().mul_(x.view(2, 2)).sum(0)


FUNCTIONS = {
    "conj": lambda x: x.conj(),
    "conj-times": lambda x: x.conj() * x,
    "inner": _inner,
    "imag": lambda x: x.imag * x.real,
    "negated": lambda x: x.conj().imag,
    "negated-squared": lambda x: x.conj().imag * x.conj().imag,
    "ifft": lambda x: torch.fft.ifft(x.real),
    "hfft": torch.fft.hfft,
    "ihfft": lambda x: torch.fft.ihfft(x.imag),
    "written": _written,
    "resolved": lambda x: x.conj().resolve_conj() * 2j,
    "as-real": lambda x: torch.view_as_real(x.conj().resolve_conj()).sum(-1),
}
BITS = {"plain": lambda z: z, "conj": lambda z: z.conj_physical().conj()}


def _points(*shape):
    return torch.randn(*shape, dtype=COMPLEX)


def _truth(f, x, t):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x.clone(), t.clone()))).tangent.clone()


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("of_point", BITS)
@pytest.mark.parametrize("of_direction", BITS)
def test_directional_derivatives(name, of_point, of_direction):
    f = FUNCTIONS[name]
    x, t = BITS[of_point](_points(4)), BITS[of_direction](_points(4))
    truth = _truth(f, x, t)
    assert same(jvp(f, (x,), (t,))[1], truth)
    for _ in range(3):  # the third is replayed
        value, push = linearize(f, x)
        assert same(value, f(x))
        push(_points(4))
        assert same(push(t), truth)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("of_point", BITS)
@pytest.mark.parametrize("of_direction", BITS)
def test_of_each_example(name, of_point, of_direction):
    f = FUNCTIONS[name]
    x, t = BITS[of_point](_points(3, 4)), BITS[of_direction](_points(3, 4))
    for push in (
        lambda x, t: jvp(f, (x,), (t,))[1],
        lambda x, t: linearize(f, x)[1](t),
    ):
        assert same(vmap(push)(x, t), torch.stack([*map(lambda *p: _truth(f, *p), x, t)]))
        assert same(vmap(push, (0, None))(x, t[0]), torch.stack([_truth(f, p, t[0]) for p in x]))
        assert same(vmap(push, (None, 0))(x[0], t), torch.stack([_truth(f, x[0], d) for d in t]))
    assert same(linearize(vmap(f), x)[1](t), torch.stack([*map(lambda *p: _truth(f, *p), x, t)]))
    assert same(vmap(linearize(f, x[0])[1])(t), torch.stack([_truth(f, x[0], d) for d in t]))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_twice(name):
    """The derivative of a directional derivative, and of a gradient, by both forward modes."""
    f = FUNCTIONS[name]
    x, t, u = _points(4), _points(4), _points(4)
    given = torch.randn_like(f(x))
    for once in (
        lambda p: jvp(f, (p,), (t,))[1],
        lambda p: jvp(f, (x,), (p,))[1],
        lambda p: vjp(f, p)[1](given)[0],
    ):
        assert same(linearize(once, x)[1](u), jvp(once, (x,), (u,))[1])


def test_what_runs_again_resolves_them_again():
    """A copy that conjugates is none that a program can do without."""

    def f(z):
        return torch.view_as_real(z.resolve_conj()).sum(-1)

    z = _points(3, 4).conj()
    for run in (jit(f), vmap(jit(f)), jit(vmap(f)), vmap(f)):
        for _ in range(3):
            assert same(run(z), f(z))
