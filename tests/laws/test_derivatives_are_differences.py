"""Derivatives agree with finite differences, in every dtype, under every transform."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from draws import make_generator
from forall import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from oracle import check_vmap, difference

D = torch.float64


def seeded(*shape, dtype=D):
    generator = make_generator(sum(shape))
    return torch.randn(shape, dtype=dtype, generator=generator)


def attention(q, k):
    scores = (q @ k.T / 2).softmax(-1)
    return (scores @ k).sum(-1)


def in_place(a, b):
    out = torch.zeros(3, 2, dtype=a.dtype)
    out[0] = a[0] * b[1]
    out[1:] = (a.sin() * b)[1:3]
    return out * out


FUNCTIONS = {
    "pointwise": lambda a, b: (a * b).sin() * a.exp() / (2 + b.cos()),
    "matmul": lambda a, b: (a @ b.T).tanh(),
    "attention": attention,
    "reductions": lambda a, b: (a * b).logsumexp(0) + b.prod(1).sum() + a.norm(),
    "views and joins": lambda a, b: torch.cat([a.T, b.T], 1).flatten().unfold(0, 4, 3) ** 2,
    "writes in place": in_place,
    "indexing": lambda a, b: a[[0, 2, 0]] * b[1] + b[:, :1] ** 2,
    "where": lambda a, b: torch.where(a > b, a * b, b.exp()),
    "solve": lambda a, b: torch.linalg.solve(a.T @ a + 2 * torch.eye(2, dtype=D), b.T),
    "a gradient": lambda a, b: grad(lambda a: (a * b).sin().prod())(a),
    "a map": lambda a, b: vmap(lambda r: (r * b).sum(1).tanh())(a),
    "a push-forward": lambda a, b: jvp(lambda a: (a @ b.T).sin(), (a,), (b,))[1],
    "a Jacobian": lambda a, b: jacrev(lambda r: (r * b).sum(1).exp())(a[0]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_mapped_function_passes_gradcheck(name):
    f = FUNCTIONS[name]
    args = [(0.5 * t).requires_grad_() for t in (seeded(2, 3, 2), seeded(3, 2))]
    mapped = vmap(f, (0, None))
    assert gradcheck(mapped, args)
    assert gradgradcheck(mapped, args, fast_mode=True)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_under_two_maps_passes_gradcheck(name):
    args = [(0.5 * t).requires_grad_() for t in (seeded(3, 2, 2, 2), seeded(3, 2))]
    assert gradcheck(vmap(vmap(FUNCTIONS[name], (1, None)), (-1, None)), args)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_forward_mode_is_the_difference_quotient(name):
    f = FUNCTIONS[name]
    args, ts = (seeded(3, 2), seeded(3, 2) + 1), (seeded(3, 2) - 1, seeded(3, 2).cos())
    step = 1e-6
    ahead = f(*(a + step * t for a, t in zip(args, ts, strict=True)))
    behind = f(*(a - step * t for a, t in zip(args, ts, strict=True)))
    quotient = (ahead - behind) / (2 * step)
    value, tangent = jvp(f, args, ts)
    assert difference(value, f(*args)) is None
    torch.testing.assert_close(tangent, quotient, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(linearize(f, *args)[1](*ts), tangent)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_forward_and_reverse_mode_agree_for_every_example(name):
    f = FUNCTIONS[name]
    args = seeded(2, 3, 2), seeded(3, 2)
    forward = vmap(jacfwd(f, (0, 1)), (0, None))(*args)
    reverse = vmap(jacrev(f, (0, 1)), (0, None))(*args)
    assert difference(forward, reverse) is None


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_push_forward_is_the_transpose_of_the_pull_back(name):
    f = FUNCTIONS[name]
    args, ts = (seeded(3, 2), seeded(3, 2) + 1), (seeded(3, 2) - 1, seeded(3, 2).cos())
    value, tangent = jvp(f, args, ts)
    cotangent = seeded(*value.shape)
    pulled = vjp(f, *args)[1](cotangent)
    lhs = (cotangent * tangent).sum()
    rhs = sum((p * t).sum() for p, t in zip(pulled, ts, strict=True))
    torch.testing.assert_close(lhs, rhs)


# --- dtypes ------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_result_has_its_arguments_dtype(dtype):
    x = seeded(3, 2, dtype=torch.float32).to(dtype)
    f = lambda a: (a * a).sum()  # noqa: E731 - one line says it
    found = (
        vmap(f)(x),
        vmap(grad(f))(x),
        vmap(hessian(f))(x),
        *jvp(f, (x,), (x,)),
        vjp(f, x)[1](torch.ones((), dtype=dtype))[0],
        jacrev(f)(x),
        jacfwd(f)(x),
        linearize(f, x)[1](x),
    )
    assert {t.dtype for t in found} == {dtype}
    assert difference(found[1], 2 * x) is None


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_derivatives_follow_torchs_convention(dtype):
    z = seeded(3, 2, dtype=torch.complex128).to(dtype)

    def f(z):
        return (z * z.conj() * z).abs().sum()

    leaf = z.clone().requires_grad_()
    (truth,) = torch.autograd.grad(f(leaf), leaf)
    assert difference(grad(f)(z), truth) is None
    assert difference(vmap(grad(f))(z), truth) is None
    check_vmap(lambda z: (z.exp() * z.conj(), z.real + z.imag, z.angle()), (z,))


def test_a_mapped_complex_function_passes_gradcheck():
    z = seeded(2, 3, dtype=torch.complex128).requires_grad_()
    assert gradcheck(vmap(lambda z: z.sin() * z.conj() + z.real), (z,))


def test_a_holomorphic_push_forward_is_the_complex_derivative():
    z, t = seeded(3, dtype=torch.complex128), seeded(3, dtype=torch.complex128) + 1j
    value, tangent = jvp(lambda z: z**3, (z,), (t,))
    assert difference((value, tangent), (z**3, 3 * z**2 * t)) is None


# --- type promotion follows the example -----------------------------------------------------------

PROMOTIONS = {
    "a number of the mapped tensor with a wider vector": (
        lambda a, b: a + b,
        (torch.arange(3.0, dtype=D), torch.ones(2)),
        (0, None),
    ),
    "a narrower vector with a wider number of another mapped tensor": (
        lambda a, b: a * b,
        (torch.ones(3, 2), torch.arange(3.0, dtype=D)),
        (0, 0),
    ),
    "an integer number with a half vector": (
        lambda a, b: a * b,
        (torch.ones(3, 2, dtype=torch.float16), torch.arange(3)),
        (0, 0),
    ),
    "a float number with an integer vector": (
        lambda a, b: a * b,
        (torch.ones(3, 2, dtype=torch.int32), torch.arange(3.0, dtype=D)),
        (0, 0),
    ),
    "where, with numbers": (
        lambda a, b: torch.where(a > 0, b, a),
        (torch.ones(3, 2), torch.arange(3.0, dtype=D)),
        (0, 0),
    ),
    "clamp, by a number": (
        lambda a, b: torch.clamp(a, min=b),
        (torch.ones(3, 2), torch.arange(3.0, dtype=D)),
        (0, 0),
    ),
    "a Python number": (lambda a: a * 2 + 1.5, (torch.arange(3),), 0),
    "an integer result of an integer example": (lambda a: a // 2, (torch.arange(3),), 0),
}


@pytest.mark.parametrize("name", PROMOTIONS)
def test_type_promotion_follows_the_example(name):
    f, args, dims = PROMOTIONS[name]
    check_vmap(f, args, dims)


@pytest.mark.parametrize("name", ["where, with numbers", "clamp, by a number"])
def test_type_promotion_follows_the_example_of_two_maps(name):
    f, (a, b), _ = PROMOTIONS[name]
    found = vmap(vmap(f, (None, 0)), (0, None))(a, b)
    truth = torch.stack([torch.stack([f(x, y) for y in b]) for x in a])
    assert difference(found, truth) is None
