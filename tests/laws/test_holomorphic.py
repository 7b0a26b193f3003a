"""`holomorphic=True`: df/dz of complex-differentiable functions, against closed forms.

Of a function of a real direction t, d/dt f(z + t v) is f'(z) v: what finite differences give.
"""

import pytest
import torch

import forall
from draws import make_generator
from forall import grad, grad_and_value, hessian, jacfwd, jacobian, jacrev, jit, jvp, vjp, vmap

D = torch.complex128
VERBS = [jacrev, jacfwd, jacobian]

generator = make_generator(7)
Z = torch.randn(3, dtype=D, generator=generator)
ZS = torch.randn(4, 3, dtype=D, generator=generator)
A = torch.randn(3, 3, dtype=D, generator=generator) + 3 * torch.eye(3)
B = torch.randn(3, dtype=D, generator=generator)
W = torch.randn(5, 3, dtype=D, generator=generator)

close = torch.testing.assert_close


def solved(a):  # (3, 3) -> (3,): d(A^-1 b) = -A^-1 dA A^-1 b
    return torch.linalg.solve(a, B)


CLOSED = {
    "exp": (torch.exp, Z, lambda z: z.exp().diag()),
    "square": (lambda z: z**2, Z, lambda z: (2 * z).diag()),
    "reciprocal": (lambda z: 1 / z, Z, lambda z: (-(z**-2)).diag()),
    "linear": (lambda z: W @ z, Z, lambda z: W),
    "by rows": (lambda z: (W @ z).sin(), Z, lambda z: (W @ z).cos()[:, None] * W),
    "product": (lambda z: z.prod() * 1j, Z, lambda z: 1j * z.prod() / z),
    "several dims": (
        lambda z: torch.outer(z, z),
        Z,
        lambda z: (
            torch.einsum("ik,j->ijk", torch.eye(3, dtype=D), z)
            + torch.einsum("jk,i->ijk", torch.eye(3, dtype=D), z)
        ),
    ),
    "inverse": (
        torch.linalg.inv,
        A,
        lambda a: -torch.einsum("ik,lj->ijkl", a.inverse(), a.inverse()),
    ),
    "solve": (solved, A, lambda a: -torch.einsum("ik,l->ikl", a.inverse(), solved(a))),
    "determinant": (torch.linalg.det, A, lambda a: torch.linalg.det(a) * a.inverse().T),
    "put off": (lambda z: (z.conj() ** 2).conj() * 1j, Z, lambda z: (2j * z).diag()),
    "written": (lambda z: torch.zeros(3, dtype=D).copy_(z).mul_(z), Z, lambda z: (2 * z).diag()),
    "constant": (lambda z: torch.ones(2, dtype=D), Z, lambda z: torch.zeros(2, 3, dtype=D)),
}
cases = pytest.mark.parametrize("name", CLOSED)
verbs = pytest.mark.parametrize("verb", VERBS, ids=lambda v: v.__name__)


@pytest.mark.sweep(2)
@cases
@verbs
def test_closed_forms(verb, name):
    f, z, derivative = CLOSED[name]
    found = verb(f, holomorphic=True)(z)
    assert found.dtype is D
    assert not found.is_conj()
    assert not found.requires_grad
    close(found, derivative(z))


@pytest.mark.sweep(2)
@cases
def test_it_is_the_limit_of_differences(name):
    f, z, _ = CLOSED[name]
    h, v = 1e-5, torch.randn(z.shape, dtype=D, generator=generator)
    difference = (f(z + h * v) - f(z - h * v)) / (2 * h)
    found = jacrev(f, holomorphic=True)(z)
    close((found.flatten(-z.dim()) @ v.flatten()), difference, rtol=1e-7, atol=1e-7)


@pytest.mark.sweep(2)
@cases
@verbs
def test_each_mapped_example_is_the_loops(verb, name):
    f, z, derivative = CLOSED[name]
    zs = torch.stack([z, z + 0.5, 1j * z])
    found = vmap(verb(f, holomorphic=True))(zs)
    close(found, torch.stack([derivative(z) for z in zs]))


@pytest.mark.parametrize("verb", [jacrev, jacobian, jacfwd], ids=lambda v: v.__name__)
@pytest.mark.parametrize("chunk_size", [1, 2])
def test_in_chunks(verb, chunk_size):
    f, z, derivative = CLOSED["by rows"]
    close(verb(f, holomorphic=True, chunk_size=chunk_size)(z), derivative(z))


def test_gradients():
    gradient = grad(lambda z: (z**3).sum(), holomorphic=True)
    close(gradient(Z), 3 * Z**2)
    close(vmap(gradient)(ZS), 3 * ZS**2)
    both = grad_and_value(lambda z: (z**3).sum(), holomorphic=True)(Z)
    close(both, (3 * Z**2, (Z**3).sum()))
    with_aux = grad_and_value(lambda z: (z.exp().sum(), "aux"), has_aux=True, holomorphic=True)(Z)
    close(with_aux[0], Z.exp())
    assert with_aux[1][1] == "aux"
    close(grad(lambda z: torch.ones((), dtype=D), holomorphic=True)(Z), torch.zeros_like(Z))


def test_a_gradient_is_not_torchs_conjugate_gradient():
    """Without holomorphic the convention is torch's: conj(df/dz) of a holomorphic function."""
    f = lambda z: (1j * z**2).sum()  # noqa: E731
    (torchs,) = vjp(f, Z)[1](torch.ones((), dtype=D))
    close(grad(f, holomorphic=True)(Z), torchs.conj())
    close(grad(lambda z: z.abs().square().sum())(Z), 2 * Z)  # real outputs go as before


def test_derivatives_of_any_order():
    third = torch.sin
    for order in range(1, 4):
        third = grad(third, holomorphic=True)
        want = [torch.cos, lambda z: -torch.sin(z), lambda z: -torch.cos(z)][order - 1]
        close(third(Z[0]), want(Z[0]))
        close(vmap(third)(Z), want(Z))


@pytest.mark.sweep(3)
@pytest.mark.parametrize("outer", VERBS, ids=lambda v: v.__name__)
@pytest.mark.parametrize("inner", VERBS, ids=lambda v: v.__name__)
def test_hessians(outer, inner):
    def f(z):
        return (W @ z).exp() * z.prod()

    found = outer(inner(f, holomorphic=True), holomorphic=True)(Z)
    e, p = (W @ Z).exp(), Z.prod()
    cross = (p / torch.outer(Z, Z)) * (1 - torch.eye(3))
    rows = W[:, :, None] * (p / Z)
    want = e[:, None, None] * (
        p * torch.einsum("oi,oj->oij", W, W) + rows + rows.transpose(1, 2) + cross
    )
    close(found, want)
    close(hessian(f, holomorphic=True)(Z), want)
    close(hessian(f, holomorphic=True, chunk_size=2)(Z), want)
    mapped = vmap(hessian(f, holomorphic=True))(ZS)
    close(mapped, torch.stack([outer(inner(f, holomorphic=True), holomorphic=True)(z) for z in ZS]))


def test_values_beside():
    f = lambda z: z**3  # noqa: E731
    (j, y) = jacrev(f, holomorphic=True, return_value=True)(Z)
    close((j, y), ((3 * Z**2).diag(), Z**3))
    h, (j, y) = hessian(lambda z: (z**3).sum(), holomorphic=True, return_value=True)(Z)
    close((h, j, y), ((6 * Z).diag(), 3 * Z**2, (Z**3).sum()))


def test_trees_and_argnums():
    def f(p, z, n):
        return {"y": p["w"] * z * n, "s": (p["w"] * z).sum()}

    p = {"w": Z, "name": 3}
    for verb in VERBS:
        found = verb(f, argnums=(1, 0), holomorphic=True)(p, ZS[0], 2)
        assert found["y"][1]["name"] is None
        close(found["y"][0], (2 * Z).diag())
        close(found["y"][1]["w"], (2 * ZS[0]).diag())
        close(found["s"][0], Z)
        close(verb(f, argnames="z", holomorphic=True)(p, z=ZS[0], n=2)["s"], Z)


def test_derivatives_outside():
    """The result is a function of z and of what f captures, with derivatives of its own."""
    w = Z.clone().requires_grad_()
    z = ZS[0].clone().requires_grad_()
    for verb in VERBS:
        found = verb(lambda z: w * z**3, holomorphic=True)(z)
        close(found.detach(), (3 * Z * ZS[0] ** 2).diag())
        gz, gw = torch.autograd.grad(found.sum(), (z, w), grad_outputs=torch.ones((), dtype=D))
        close(gz, (6 * Z * ZS[0]).conj())
        close(gw, (3 * ZS[0] ** 2).conj())
    slope = jvp(grad(lambda z: (z**3).sum(), holomorphic=True), (Z,), (B,))[1]
    close(slope, 6 * Z * B)
    slopes = vmap(lambda z, b: jvp(jacrev(torch.exp, holomorphic=True), (z,), (b,))[1])(ZS, ZS)
    close(slopes, torch.diag_embed(ZS.exp() * ZS))


def test_recorded(monkeypatch):
    for transform in (
        grad(lambda z: (z**3).sum(), holomorphic=True),
        vmap(grad(lambda z: (z**3).sum(), holomorphic=True)),
        jacrev(torch.exp, holomorphic=True),
        jacfwd(torch.exp, holomorphic=True),
        hessian(lambda z: (z.conj() ** 3).conj().sum(), holomorphic=True),
    ):
        recorded = jit(transform)
        for z in (ZS, 2 * ZS, ZS + 1j):
            close(recorded(z), transform(z))
        assert recorded.cache_info().hits == 2
    monkeypatch.setattr(forall.config, "patience", 0)
    monkeypatch.setattr(forall.config, "replay", "check")
    for n in range(5):
        close(grad(lambda z: (z**3).sum(), holomorphic=True)(Z * n), 3 * (Z * n) ** 2)


def test_a_transform_told_to_be_holomorphic_is_not_taken_for_another(monkeypatch):
    """Calls are kept with the function; torch's convention and this one have each their own."""
    monkeypatch.setattr(forall.config, "patience", 0)

    def f(z):
        return z.abs().square().sum()

    def g(z):
        return (z**2).sum()

    for _ in range(4):
        close(grad(f)(Z), 2 * Z)
        close(grad(g, holomorphic=True)(Z), 2 * Z)
        with pytest.raises(RuntimeError, match="must return a real number"):
            grad(g)(Z)
        with pytest.raises(RuntimeError, match="must return a complex number"):
            grad(f, holomorphic=True)(Z)


def test_where_examples_part():
    def f(z):
        return z.exp() if z.real > 0 else z**2

    zs = torch.tensor([1 + 1j, -1 + 1j, 2 - 1j, -3.0], dtype=D)
    want = torch.where(zs.real > 0, zs.exp(), 2 * zs)
    close(vmap(grad(f, holomorphic=True))(zs), want)


def test_examples_of_several_lengths():
    lengths = torch.tensor([1, 3, 2])
    zs = torch.arange(9.0).reshape(3, 3).to(D) * (1 + 2j)

    def f(row, n):
        return grad(lambda z: (z[: n.item()] ** 2).sum(), holomorphic=True)(row)

    want = torch.where(torch.arange(3) < lengths[:, None], 2 * zs, 0)
    close(vmap(f)(zs, lengths), want)


TRANSFORMS = {
    "grad": (lambda z: grad(lambda z: z.exp().sum(), holomorphic=True)(z), torch.exp),
    "grad_and_value": (
        lambda z: grad_and_value(lambda z: z.exp().sum(), holomorphic=True)(z),
        lambda z: (z.exp(), z.exp().sum()),
    ),
    "jacrev": (jacrev(torch.exp, holomorphic=True), lambda z: z.exp().diag_embed()),
    "jacobian": (jacobian(torch.exp, holomorphic=True), lambda z: z.exp().diag_embed()),
    "jacfwd": (jacfwd(torch.exp, holomorphic=True), lambda z: z.exp().diag_embed()),
    "hessian": (
        hessian(lambda z: z.exp().sum(), holomorphic=True, return_value=True),
        lambda z: (z.exp().diag_embed(), (z.exp(), z.exp().sum())),
    ),
}


@pytest.mark.sweep(3)
@pytest.mark.filterwarnings("ignore::Warning:torch")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_next_to_torchs_own_transforms(name):
    f, want = TRANSFORMS[name]
    torch.compiler.reset()
    close(torch.compile(f, backend="eager", fullgraph=True)(Z), want(Z))
    found = torch.func.vmap(f)(ZS)
    close(found, vmap(want)(ZS))
