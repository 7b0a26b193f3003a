"""Forward mode where torch's formula is missing, or lacks terms once it is differentiated."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from forall import PerformanceWarning, grad, hessian, jvp, linearize, vmap
from oracle import difference

D = torch.float64


@torch.library.custom_op("forall_tests::wave", mutates_args=())
def wave(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


wave.register_autograd(
    lambda ctx, g: g * ctx.saved_tensors[0].cos(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


def test_a_librarys_operator_has_the_tangent_of_its_backward():
    x, u = torch.linspace(-1, 1, 4, dtype=D), torch.linspace(1, 2, 4, dtype=D)
    torch.testing.assert_close(jvp(wave, (x,), (u,)), (x.sin(), x.cos() * u))
    twice = jvp(lambda x: jvp(wave, (x,), (u,))[1], (x,), (u,))[1]
    torch.testing.assert_close(twice, -x.sin() * u * u)
    with pytest.warns(PerformanceWarning):
        mapped = vmap(lambda x: jvp(wave, (x,), (u[0],))[1])(x)
    torch.testing.assert_close(mapped, x.cos() * u[0])


def test_a_product_scattered_moves():
    x, src = torch.tensor([2.0, 3.0], dtype=D), torch.tensor([5.0, 7.0, 11.0], dtype=D)
    where = torch.tensor([0, 1, 0])
    t = jvp(lambda s: x.scatter_reduce(0, where, s, "prod"), (src,), (torch.ones(3, dtype=D),))[1]
    torch.testing.assert_close(t, torch.tensor([2.0 * (5 + 11), 3.0], dtype=D))


@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("dtype", [D, torch.complex128])
def test_an_inverse_from_a_triangle_moves(dtype, upper):
    def inverse(x):
        return torch.cholesky_inverse(x + 3 * torch.eye(3, dtype=dtype), upper=upper)

    generator = torch.Generator().manual_seed(0)
    both = torch.randn(2, 3, 3, dtype=dtype, generator=generator)
    both.diagonal(dim1=1, dim2=2).copy_(torch.rand(2, 3, generator=generator))  # real ones
    x, u = both
    step = 1e-6
    quotient = (inverse(x + step * u) - inverse(x - step * u)) / (2 * step)
    for tangent in (jvp(inverse, (x,), (u,))[1], linearize(inverse, x)[1](u)):
        torch.testing.assert_close(tangent, quotient, rtol=1e-6, atol=1e-8)
    mapped = vmap(lambda u: jvp(inverse, (x,), (u,))[1])(torch.stack([u, 2 * u]))
    torch.testing.assert_close(mapped[1], 2 * quotient, rtol=1e-6, atol=1e-8)

    def f(x):
        return inverse(x).abs().square().sum()

    def along(x):
        return (grad(f)(x).conj() * u).real.sum()

    push = jvp(along, (x,), (u,))[1]
    ahead = (along(x + step * u) - along(x - step * u)) / (2 * step)
    torch.testing.assert_close(push, ahead, rtol=1e-6, atol=1e-8)


SPECTRA = {
    "eigvalsh": lambda a: torch.linalg.eigvalsh(a + a.mH).pow(3).sum(),
    "eigh": lambda a: torch.linalg.eigh(a + a.mH)[0].exp().sum(),
    "both": lambda a: sum(t.abs().pow(3).sum() for t in torch.linalg.eigh(a + a.mH)),
    "svdvals": lambda a: torch.linalg.svdvals(a).pow(3).sum(),
}


@pytest.mark.parametrize("name", SPECTRA)
def test_the_gradient_of_a_tangent_of_a_complex_spectrum(name):
    f = SPECTRA[name]
    generator = torch.Generator().manual_seed(0)
    xs, us = torch.randn(2, 3, 3, 3, dtype=torch.complex128, generator=generator)

    def along(x):
        return jvp(f, (x,), (x.cos(),))[1]

    found = vmap(grad(along))(xs)
    torch.testing.assert_close(found, torch.stack([grad(along)(x) for x in xs]))
    step = 1e-6
    for x, u, g in zip(xs, us, found, strict=True):
        quotient = (along(x + step * u) - along(x - step * u)) / (2 * step)
        torch.testing.assert_close((g.conj() * u).real.sum(), quotient, rtol=1e-6, atol=1e-6)


def by_hand(x):
    x = x - x.mean(-1, keepdim=True)
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()


def norms():
    return {
        "layer": lambda x: F.layer_norm(x, (3,)),
        "batch": lambda x: F.batch_norm(x.T, None, None, training=True).T,
    }


THIRD = {
    "forward, forward, forward": lambda f, x: jvp(
        lambda x: jvp(lambda x: jvp(f, (x,), (x.sin(),))[1], (x,), (x.cos(),))[1], (x,), (x,)
    )[1],
    "forward, forward, reverse": lambda f, x: jvp(
        lambda x: jvp(grad(f), (x,), (x.cos(),))[1], (x,), (x,)
    )[1],
    "reverse, forward, reverse": lambda f, x: grad(lambda x: hessian(f)(x).sin().sum())(x),
}


@pytest.mark.parametrize("way", THIRD)
@pytest.mark.parametrize("name", norms())
def test_third_derivatives_of_a_norm(name, way):
    x = torch.linspace(0, 1, 6, dtype=D).square().reshape(2, 3)
    norm = norms()[name]
    found = THIRD[way](lambda x: norm(x).sin().sum(), x)
    torch.testing.assert_close(found, THIRD[way](lambda x: by_hand(x).sin().sum(), x))


def test_running_statistics_are_written_once():
    x = torch.linspace(0, 1, 8, dtype=D).square().reshape(4, 2)
    m, truth = (torch.nn.BatchNorm1d(2, dtype=D) for _ in range(2))
    truth(x)
    jvp(lambda x: jvp(m, (x,), (x,))[1], (x,), (x,))
    torch.testing.assert_close(m.state_dict(), truth.state_dict())


def test_softmax_in_reverse_over_forward():
    x, u = torch.linspace(0, 1, 6, dtype=D).reshape(2, 3), torch.ones(2, 3, dtype=D).cumsum(1)
    for f in (lambda x: x.softmax(1), lambda x: x.log_softmax(1), lambda x: x.logsumexp(1)):
        found = grad(lambda x, f=f: jvp(f, (x,), (u,))[1].square().sum())(x)
        hand = grad(lambda x, f=f: linearize(f, x)[1](u).square().sum())(x)
        torch.testing.assert_close(found, hand)


@pytest.mark.parametrize("mapped", [False, True])
def test_the_gradient_of_a_penalty_goes_through_attention(mapped):
    x = torch.linspace(-1, 1, 48, dtype=D).reshape(2, 1, 2, 3, 4).sin()
    w = torch.linspace(0, 1, 16, dtype=D).reshape(4, 4).cos().requires_grad_()

    def penalty(x):
        def f(x):
            return F.scaled_dot_product_attention(x @ w, x, x.cos()).sin().sum()

        each = vmap(grad(f))(x) if mapped else torch.stack([grad(f)(one) for one in x])
        return each.square().sum()

    (found,) = torch.autograd.grad(penalty(x), w)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        (truth,) = torch.autograd.grad(penalty(x), w)
    torch.testing.assert_close(found, truth)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_loss_in_chunks(reduction):
    options = torch.nn.LinearCrossEntropyOptions()
    x, w, b = (torch.randn(*s, dtype=D) for s in [(3, 2), (4, 2), (4,)])
    target = torch.tensor([0, -100, 3])

    def f(x, w, b, options=options):
        return F.linear_cross_entropy(
            x, w, target, linear_bias=b, options=options, reduction=reduction
        )

    along = tuple(map(torch.cos, (x, w, b)))
    found, truth = (jvp(partial(f, options=o), (x, w, b), along) for o in (options, None))
    assert difference(found, truth) is None


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "twice",
    [
        lambda f, x: jvp(grad(f), (x,), (x,)),
        lambda f, x: grad(lambda z: (grad(f)(z) * x).sum())(x),
        lambda f, x: hessian(f)(x),
        lambda f, x: vmap(hessian(f))(x.expand(2, 3, 2)),
    ],
)
def test_a_loss_in_chunks_is_not_differentiated_twice(twice, reduction):
    """Torch finds its gradients with its value: they have no history, so a term would be lost."""
    options = torch.nn.LinearCrossEntropyOptions()
    x, w, target = torch.randn(3, 2, dtype=D), torch.randn(4, 2, dtype=D), torch.tensor([0, 1, 3])

    def f(x):
        return F.linear_cross_entropy(x, w, target, options=options, reduction=reduction).sum()

    with pytest.raises(RuntimeError, match=r"twice a loss .* in chunks|functions with out="):
        twice(f, x)
