"""Linear algebra: vmap equals the loop, also nested, with shared operands, and in derivatives."""

from __future__ import annotations

import pytest
import torch
from torch import linalg

from forall import grad, vmap
from oracle import check_vmap, difference, loop


def _matrices(*shape):
    a = torch.randn(*shape, dtype=torch.float64)
    return a @ a.mT + torch.eye(shape[-1], dtype=a.dtype)


torch.manual_seed(0)
A = _matrices(2, 3, 4, 4)
B = torch.randn(2, 3, 4, 2, dtype=torch.float64)
V = torch.randn(2, 3, 4, dtype=torch.float64)

OF_ONE = {
    "cholesky": (linalg.cholesky, A),
    "cholesky_ex": (lambda a: linalg.cholesky_ex(a)[0], A),
    "cholesky_inverse": (lambda a: torch.cholesky_inverse(linalg.cholesky(a)), A),
    "det": (linalg.det, A),
    "eig": (lambda a: linalg.eig(a)[1].abs(), A),
    "eigh": (lambda a: (linalg.eigh(a)[0], linalg.eigh(a)[1].abs()), A),
    "eigvals": (lambda a: linalg.eigvals(a).abs(), A),
    "householder_product": (lambda b: linalg.householder_product(b, b[..., 0, :]), B),
    "inv": (linalg.inv, A),
    "lu": (lambda a: linalg.lu(a)[1:], A),
    "lu_unpack": (lambda a: torch.lu_unpack(*linalg.lu_factor(a))[1:], A),
    "matrix_exp": (lambda a: linalg.matrix_exp(a / 10), A),
    "matrix_norm": (lambda a: linalg.matrix_norm(a, "nuc"), A),
    "matrix_power": (lambda a: linalg.matrix_power(a, -2), A),
    "pinv": (linalg.pinv, B),
    "qr": (lambda b: tuple(linalg.qr(b)), B),
    "slogdet": (lambda a: linalg.slogdet(a)[1], A),
    "svd": (lambda b: linalg.svd(b, full_matrices=False)[0].abs(), B),
    "svdvals": (linalg.svdvals, B),
}
if hasattr(linalg, "polar"):  # since torch 2.14
    OF_ONE["matrix_sqrth"] = (linalg.matrix_sqrth, A)  # pyright: ignore[reportAttributeAccessIssue]
    OF_ONE["polar"] = (linalg.polar, A)  # pyright: ignore[reportAttributeAccessIssue]
OF_TWO = {
    "cholesky_solve": (lambda a, b: torch.cholesky_solve(b, linalg.cholesky(a)), B),
    "lstsq": (lambda a, b: linalg.lstsq(a, b)[0], B),
    "lu_solve": (lambda a, b: linalg.lu_solve(*linalg.lu_factor(a), b), B),
    "lu_solve from the right": (
        lambda a, b: linalg.lu_solve(*linalg.lu_factor(a), b.mT, left=False),
        B,
    ),
    "ormqr": (lambda a, b: torch.ormqr(a, a[..., 0, :], b), B),
    "ormqr from the right": (lambda a, b: torch.ormqr(a, a[..., 0, :], b.mT, False), B),
    "solve": (linalg.solve, B),
    "solve for a vector": (linalg.solve, V),
    "solve from the right": (lambda a, b: linalg.solve(a, b.mT, left=False), B),
    "solve_triangular": (lambda a, b: linalg.solve_triangular(a.triu(), b, upper=True), B),
}


def _scalar(f):
    def g(*args):
        out = f(*args)
        return sum(y.sin().sum() for y in (out if isinstance(out, tuple) else (out,)))

    return g


@pytest.mark.parametrize("name", OF_ONE)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_one_matrix(name, dim):
    f, x = OF_ONE[name]
    check_vmap(f, (x[0].movedim(0, dim),), dim)
    check_vmap(f, (x.movedim(0, dim),), dim)


@pytest.mark.parametrize("name", OF_TWO)
@pytest.mark.parametrize("in_dims", [(0, 0), (-1, 0), (0, -1), (1, 1)])
def test_a_matrix_and_a_right_hand_side(name, in_dims):
    f, b = OF_TWO[name]
    args = [x[0].movedim(0, d) for x, d in zip((A, b), in_dims, strict=True)]
    check_vmap(f, tuple(args), in_dims)
    check_vmap(f, (args[0], b[0, 0]), (in_dims[0], None))
    check_vmap(f, (A[0, 0], args[1]), (None, in_dims[1]))


@pytest.mark.parametrize("name", ["cholesky_solve", "lu_solve", "solve", "solve_triangular"])
@pytest.mark.parametrize("size", [0, 1])
def test_one_matrix_for_few_right_hand_sides(name, size):
    f, b = OF_TWO[name]
    result = vmap(f, (None, 0))(A[0, 0], b[0, :size])
    assert difference(result, loop(f, (None, 0))(A[0, 0], b[0])[:size]) is None


@pytest.mark.parametrize("b", [V[0, 0], V[0], B[0, 0], B[0]], ids=lambda b: f"{b.dim()} dims")
@pytest.mark.parametrize("a", [A[0, 0], A[0]], ids=lambda a: f"{a.dim()} dims")
def test_solve_takes_for_a_vector_what_it_is_in_one_example(a, b):
    if a.dim() == 2 and b.shape == (3, 4):
        pytest.skip("three rows do not fit four equations")
    for in_dims in ((0, 0), (0, None), (None, 0)):
        args = [
            x if d is None else torch.stack([x, 2 * x, x + 1])
            for x, d in zip((a, b), in_dims, strict=True)
        ]
        check_vmap(linalg.solve_ex, tuple(args), in_dims)


def test_three_examples_of_three_rows_are_no_vector():
    a, b = _matrices(3, 3, 3), torch.randn(3, 3, dtype=torch.float64)
    check_vmap(linalg.solve, (a, b), (0, None))


@pytest.mark.parametrize("name", [*OF_ONE, *OF_TWO])
def test_nested(name):
    f, *args = (*OF_TWO[name][:1], A, OF_TWO[name][1]) if name in OF_TWO else OF_ONE[name]
    assert difference(vmap(vmap(f))(*args), loop(loop(f))(*args)) is None
    if len(args) == 2:
        mixed = (args[0][:, 0], args[1])
        dims = ((None, 0), (0, 0))
        result = vmap(vmap(f, dims[0]), dims[1])(*mixed)
        assert difference(result, loop(loop(f, dims[0]), dims[1])(*mixed)) is None


@pytest.mark.parametrize("name", [*OF_ONE, *OF_TWO])
def test_gradients_inside_and_outside(name):
    f, *args = (*OF_TWO[name][:1], A, OF_TWO[name][1]) if name in OF_TWO else OF_ONE[name]
    args = [a[0] for a in args]
    g = _scalar(f)

    def plain(*xs):
        xs = [x.detach().requires_grad_() for x in xs]
        return torch.autograd.grad(g(*xs), xs)

    truth = loop(plain)(*args)
    inside = vmap(grad(g, tuple(range(len(args)))))(*args)
    assert difference(inside, truth) is None
    leaves = [a.clone().requires_grad_() for a in args]
    outside = torch.autograd.grad(vmap(g)(*leaves).sum(), leaves)
    assert difference(outside, truth) is None


@pytest.mark.parametrize("f", [linalg.inv, linalg.cholesky, lambda a: linalg.solve(a, V[0, 0])])
def test_the_error_of_a_singular_example_names_it(f):
    a = A[0].clone()
    a[1] = 0
    with pytest.raises(linalg.LinAlgError, match="example 1 of 3"):
        vmap(f)(a)


@pytest.mark.parametrize(
    "f",
    [
        lambda b: linalg.svd(b.conj()),
        lambda b: linalg.pinv(b.mH),
        lambda b: linalg.lstsq(b, b, driver="gels"),
        lambda b: b.mH @ b,
    ],
)
def test_lazy_conjugates(f):
    b = torch.randn(3, 4, 2, dtype=torch.complex128)
    check_vmap(f, (b,))


def test_results_not_asked_for_stay_empty():
    check_vmap(lambda a: linalg.qr(a, mode="r"), (A[0],))
    check_vmap(lambda a: torch.ops.aten._linalg_svd(a, False, False), (A[0],))
    check_vmap(lambda a: torch.ops.aten._linalg_eigh(a, "L", False), (A[0],))
    check_vmap(lambda a: torch.lu_unpack(*linalg.lu_factor(a), unpack_data=False), (A[0],))
