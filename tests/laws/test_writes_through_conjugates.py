"""``z.conj()`` and its parts are views of z: what is written into them is written into z."""

import pytest
import torch
from torch.autograd import forward_ad

from forall import grad, jvp, linearize, vmap
from oracle import same

D = torch.float64


def imag(x):
    z = torch.complex(x, x.cos())
    z.conj().imag.mul_(x)
    return z


def real(x):
    z = torch.complex(x, x.cos())
    z.conj().real.exp_()
    return z


def imag_of_a_part(x):
    z = torch.complex(x, x.cos())
    torch.imag(z.conj()[1:]).copy_(x[:1])
    return z * z.conj()


def twice(x):
    z = torch.complex(x, x.cos())
    z.conj().view(2, 1).mH.imag.neg_().add_(x)
    return z


def added(x):
    z = torch.complex(x, x.cos())
    c = z.conj()
    c.mul_(torch.complex(x, x))
    c.imag.add_(x)
    return c.sin() + z


def shared(x):
    z = torch.zeros(2, dtype=torch.complex128)
    c = z.conj()
    imag = c.imag
    imag.copy_(x)
    c.real.add_(x.exp())
    return z + imag


def told(x):
    z = torch.complex(x, x.cos())
    c = z.conj()
    w = c.resolve_conj()
    w.mul_(2)
    n = c.imag.resolve_neg()
    n.mul_(x)
    return z + w * 2 + n + int(c.is_conj()) + 2 * int(w.is_conj()) + 4 * int(c.imag.is_neg())


FUNCTIONS = [imag, real, imag_of_a_part, twice, added, shared, told]


def push(f, x):
    with forward_ad.dual_level():
        y = forward_ad.unpack_dual(f(forward_ad.make_dual(x, x.cos())))
        return y.primal.clone(), y.tangent.clone()


def pulled(f, x):
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(f(leaf).abs().sum(), leaf)[0]


def loop(f, xs):
    found = [f(x) for x in xs]
    return (
        torch.stack(found)
        if isinstance(found[0], torch.Tensor)
        else [*map(torch.stack, zip(*found, strict=True))]
    )


WAYS = {
    "vmap": (lambda f, xs: vmap(f)(xs), lambda f, x: f(x)),
    "vmap of jvp": (lambda f, xs: vmap(lambda x: jvp(f, (x,), (x.cos(),)))(xs), push),
    "jvp of vmap": (lambda f, xs: jvp(vmap(f), (xs,), (xs.cos(),)), push),
    "linearize": (lambda f, xs: linearize(vmap(f), xs)[1](xs.cos()), lambda f, x: push(f, x)[1]),
    "vmap of grad": (lambda f, xs: vmap(grad(lambda x: f(x).abs().sum()))(xs), pulled),
    "grad of vmap": (lambda f, xs: grad(lambda xs: vmap(f)(xs).abs().sum())(xs), pulled),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_what_is_written_into_a_conjugate(f, way):
    xs = torch.linspace(0.2, 1, 6, dtype=D).view(3, 2)
    ours, there = WAYS[way]
    found, right = ours(f, xs), loop(lambda x: there(f, x), xs)
    for one, other in (
        zip(found, right, strict=True) if isinstance(right, list) else [(found, right)]
    ):
        assert same(one, other)


@pytest.mark.parametrize("there", ["conj", "conj here"])
def test_a_captured_conjugate(there):
    c = torch.randn(2, 2, dtype=torch.complex128)
    c = c.conj() if there == "conj" else c
    xs = torch.linspace(0.2, 1, 6, dtype=D).view(3, 2)

    def f(x):
        d = c if there == "conj" else c.conj()
        parts = d.imag * x + d.view(-1)[0].imag + d.real.sin() - d.imag.resolve_neg()
        return torch.view_as_real(d.resolve_conj()).sum(-1) * parts + (d @ d.mH).real

    right = torch.stack([f(x) for x in xs])
    for _ in range(3):  # the third is replayed
        assert same(vmap(f)(xs), right)
        assert same(vmap(vmap(f))(xs[None])[0], right)
        assert same(jvp(vmap(f), (xs,), (xs,))[0], right)
