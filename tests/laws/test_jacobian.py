"""`jacobian` equals `jacrev` and `jacfwd`, and calls its function once; keywords of all three."""

import pytest
import torch
import torch.nn.functional as F

from forall import grad, hessian, jacfwd, jacobian, jacrev, jvp, vmap
from golden import refused

D = torch.float64
W = torch.linspace(-1, 1, 77, dtype=D).sin().reshape(7, 11)


LSTM = torch.nn.LSTM(3, 3, dtype=D).requires_grad_(False)


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * g


def tall(x):  # (3,) -> (7, 11)
    return (W * x.sum()).tanh() + x[0] * W.exp() * x.prod()


def wide(x):  # (3,) -> ()
    return (x * x.roll(1)).sin().sum()


def written(x):  # (3,) -> (20,)
    out = torch.zeros(20, dtype=x.dtype)
    out[:3] = x
    out[3:6].copy_(x.exp())
    out[5:].mul_(x[1])
    return out


def normed(x):  # (3,) -> (33,)
    return F.layer_norm(torch.cat([x.sin(), x * x, *[x] * 9]), (33,))


def attended(x):  # (3,) -> (1, 4, 5)
    q = x[:2].repeat(10).reshape(1, 4, 5)
    return F.scaled_dot_product_attention(q, q.sin(), q.cos() * x[2])


def custom(x):  # (3,) -> (12,)
    return Cubed.apply(x.repeat(4)) * x[0]


class Unrecorded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return (g * x.exp()).detach()


def unrecorded(x):  # (3,) -> (12,)
    return Unrecorded.apply(x.repeat(4)) * x[0]


def hooked(x):  # (3,) -> (12,)
    y = x.repeat(4)
    y.register_hook(lambda g: g.detach() * 2)
    return y * x[0]


def clamped(x):  # (3,) -> (12,): by a hook of the node's own
    y = x.repeat(4) * 2
    y.grad_fn.register_hook(lambda gs, _: (gs[0].detach().clamp(-1, 1), *gs[1:]))
    return y * x[0]


def gated(x):  # (3,) -> (4, 3): no second backward of this on a CPU
    return LSTM(x.repeat(4).reshape(4, 3))[0]


def constant(x):  # (3,) -> (12,): nothing depends on x[1:], nor some outputs on x at all
    return torch.cat([x[:1].repeat(5), torch.ones(7, dtype=x.dtype)])


def solved(x):  # (3,) -> (8, 8)
    return torch.linalg.solve(torch.eye(8, dtype=x.dtype) * 3 + x.sum() * W[:1, :8], W.T[:8, :7])


F_S = [tall, wide, written, normed, attended, custom, constant, solved]
X = torch.tensor([0.5, -1.5, 0.25], dtype=D)


@pytest.mark.parametrize("f", F_S)
@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_both_modes_agree(f, chunk_size, dtype):
    def of(x):
        return f(x.double()).to(dtype)

    found = jacobian(of, chunk_size=chunk_size)(X.to(dtype))
    assert found.is_contiguous()
    torch.testing.assert_close(found, jacrev(of)(X.to(dtype)))
    torch.testing.assert_close(found, jacfwd(of)(X.to(dtype)))


@pytest.mark.parametrize("f", [unrecorded, hooked, clamped, gated])
def test_a_pull_back_that_cannot_be_pulled_back_is_taken_row_by_row(f):
    torch.testing.assert_close(jacobian(f)(X), jacrev(f)(X))
    xs = torch.stack([X, X.cos()])
    torch.testing.assert_close(vmap(jacobian(f))(xs), torch.stack([jacrev(f)(x) for x in xs]))


@pytest.mark.parametrize("f", F_S)
def test_under_other_transforms(f):
    xs = torch.stack([X, X.cos(), X * 2])
    torch.testing.assert_close(vmap(jacobian(f))(xs), torch.stack([jacrev(f)(x) for x in xs]))
    if f is attended:
        return  # as jacrev, see tests/gaps
    sums = [lambda x, j=j: j(f)(x).sin().sum() for j in (jacobian, jacrev)]
    torch.testing.assert_close(grad(sums[0])(X), grad(sums[1])(X))
    torch.testing.assert_close(vmap(grad(sums[0]))(xs), vmap(grad(sums[1]))(xs))
    torch.testing.assert_close(jvp(jacobian(f), (X,), (X.cos(),)), jvp(jacrev(f), (X,), (X.cos(),)))
    torch.testing.assert_close(jacobian(jacobian(f))(X), hessian(f)(X))


def test_the_derivative_of_a_captured_leaf_and_none_where_there_is_none():
    w = W.clone().requires_grad_()
    x = X.clone().requires_grad_()
    found = jacobian(lambda x: (w * x.sum()).sin())(x)
    expected = jacrev(lambda x: (w * x.sum()).sin())(x)
    for y in (x, w):
        gs = [torch.autograd.grad(j.exp().sum(), y, retain_graph=True) for j in (found, expected)]
        torch.testing.assert_close(*gs)
    assert not jacobian(tall)(X).requires_grad
    with torch.no_grad():
        assert not jacobian(tall)(x).requires_grad


@pytest.mark.parametrize("n", [1, 40])
def test_trees_arguments_and_what_comes_beside(n):
    calls = []

    def f(p, k, *, scale):
        calls.append(1)
        y = {"a": (p["w"] * scale).sin().repeat(n), "b": p["v"].sum() * scale}
        return y, (k, y["b"])

    p = {"w": X, "v": torch.ones(2, 2, dtype=D), "n": 3}
    for options in ({}, {"argnames": "scale"}):
        given = {"scale": X[0]}
        options = {"has_aux": True, "return_value": True, **options}
        found = jacobian(f, **options)(p, 5, **given)
        assert len(calls) == 1
        expected = jacrev(f, **options)(p, 5, **given)
        torch.testing.assert_close(found[0], expected[0])
        torch.testing.assert_close(found[1], expected[1])
        calls.clear()
    found = jacobian(lambda x, y: (x * y).repeat(n), (1, 0))(X, X[1])
    torch.testing.assert_close(found, jacrev(lambda x, y: (x * y).repeat(n), (1, 0))(X, X[1]))


@pytest.mark.parametrize("shapes", [((0,), (4,)), ((3,), (0,)), ((), (5, 1)), ((2, 0), ())])
def test_nothing_in_nothing_out(shapes):
    inside, outside = shapes

    def f(x):
        return x.sum() * torch.ones(outside, dtype=D)

    x = torch.ones(inside, dtype=D)
    torch.testing.assert_close(jacobian(f)(x), jacrev(f)(x))


def test_draws_are_those_of_one_call():
    torch.manual_seed(0)
    found, y = jacobian(lambda x: F.dropout(x.repeat(10)), return_value=True)(X)
    torch.testing.assert_close(found @ X, y)


def test_next_to_torchs_own_transforms():
    found = torch.func.vmap(jacobian(tall))(torch.stack([X, X]))
    torch.testing.assert_close(found, torch.stack([jacrev(tall)(X)] * 2))


def test_a_complex_output():
    with refused(
        RuntimeError,
        """
        jacobian(<lambda>, argnums=0): the outputs of a Jacobian must be real.
            outputs   complex128[3]
        Take real and imaginary parts apart (torch.view_as_real), or use vjp or jvp.
        """,
    ):
        jacobian(lambda x: x * 1j)(X)
