"""Which tensors are known to be diagonal matrices, and what products with them are."""

import gc
import weakref

import pytest
import torch

from forall import grad, hessian, jacfwd, jacobian, jacrev, jit, vmap
from forall._autodiff.standard_basis import make_basis_rows
from forall._compat.symbolic_diagonal import find_diagonal
from forall._vmap.rule_makers import diagonal_cotangents

CPU = torch.device("cpu")


def make_identity_rows(start, stop, size, dtype, device):
    return make_basis_rows([torch.empty(size, dtype=dtype, device=device)], start, stop)[0]


def make_identity(size, dtype, device):
    return make_identity_rows(0, size, size, dtype, device)


def is_identity(t):
    known = find_diagonal(t)
    return known is not None and known.shape == (known.size, known.size) and known.entries is None


ARE = {
    "itself": lambda t: t,
    "rows": lambda t: t.unsqueeze(1),
    "columns": lambda t: t.unsqueeze(-1),
    "turned": lambda t: t.t(),
    "by another way": lambda t: t.view(3, 1, 3).flatten(0, 1),
    "all of it": lambda t: t[:, :3],
}
ARE_NOT = {
    "a part": lambda t: t[:2, :2],
    "a row": lambda t: t[0],
    "other rows": lambda t: t[[1, 0, 2]],
    "a row for each": lambda t: t[:1].expand(3, 3),
    "directions of a matrix": lambda t: t.view(9),
    "its bits": lambda t: t.view(torch.int32),
    "a copy": lambda t: t.clone(),
    "less": lambda t: t._neg_view(),
    "another order": lambda t: t.as_strided((3, 3), (1, 2)),
    "from further on": lambda t: t.as_strided((2, 2), (3, 1), 1),
}


@pytest.mark.parametrize("name", ARE)
def test_what_is_one(name):
    t = make_identity(3, torch.float32, CPU)
    view = ARE[name](t)
    assert is_identity(view)
    assert view.squeeze().equal(torch.eye(3))


@pytest.mark.parametrize("name", ARE_NOT)
def test_what_is_none(name):
    assert not is_identity(ARE_NOT[name](make_identity(3, torch.float32, CPU)))


def test_others_are_none():
    assert not is_identity(torch.eye(3))
    assert not is_identity(torch.eye(3).to_sparse())
    assert not is_identity(torch.nn.Parameter(torch.eye(3)))


@pytest.mark.parametrize(
    "write",
    [
        lambda t: t.mul_(2),
        lambda t: t.view(-1).mul_(2),
        lambda t: t[0].zero_(),
        lambda t: vmap(lambda row: row.mul_(2))(t),
        lambda t: vmap(lambda row: row[1:].mul_(2))(t),
        lambda t: vmap(lambda _: t.view(3, 3).zero_().sum())(torch.ones(2)),
    ],
)
def test_until_it_is_written_to(write):
    t = make_identity(3, torch.float32, CPU)
    view = t.unsqueeze(1)
    write(t)
    assert not is_identity(t)
    assert not is_identity(view)


def test_until_any_example_is_written_to():
    t = make_identity(3, torch.float32, CPU)
    vmap(lambda x: (x * 2).add_(1))(torch.ones(2))
    assert not is_identity(t)
    assert is_identity(make_identity(3, torch.float32, CPU))


@pytest.mark.parametrize("size", [0, 1])
def test_the_smallest(size):
    assert is_identity(make_identity(size, torch.float64, CPU).unsqueeze(1))


def test_its_memory_is_freed():
    t = make_identity(3, torch.float32, CPU)
    memory = weakref.ref(t.untyped_storage())
    view = t.unsqueeze(1)
    assert is_identity(view)
    del t, view
    gc.collect()
    assert memory() is None


def test_inference_mode_counts_no_writes():
    with torch.inference_mode():
        assert not is_identity(make_identity(3, torch.float32, CPU))


def test_rows_of_one():
    t = make_identity_rows(1, 3, 5, torch.float32, CPU)
    assert t.equal(torch.eye(5)[1:3])
    for view in (t, t.t(), t.unsqueeze(1)):
        known = find_diagonal(view)
        assert known is not None
        assert known[:3] == (1, 3, 5)
        assert known.entries is None
    assert find_diagonal(t[:1]) is None


# --- Jacobians behind pointwise functions ------------------------------------------------------


@pytest.fixture(autouse=True)
def all_sizes(monkeypatch):
    monkeypatch.setattr(diagonal_cotangents, "_ROWS", 1)
    monkeypatch.setattr(diagonal_cotangents, "_LEAST", 1)


W, V = torch.randn(4, 5, dtype=torch.double), torch.randn(3, 4, dtype=torch.double)
X = torch.randn(5, dtype=torch.double)
FUNCTIONS = {
    "tanh": lambda x: (W @ x).tanh(),
    "a net": lambda x: (V @ (W @ x).tanh()).sigmoid(),
    "two in a row": lambda x: (2 * (W @ x).sigmoid()).sin(),
    "relu": lambda x: torch.nn.functional.linear(x, W).relu(),
    "leaky relu": lambda x: torch.nn.functional.leaky_relu(x @ W.T),
    "softplus": lambda x: torch.nn.functional.softplus(torch.nn.functional.linear(x, W)),
    "gelu": lambda x: torch.nn.functional.gelu(W @ x),
    "elu": lambda x: torch.nn.functional.elu(W @ x),
    "a quotient": lambda x: -(W @ x) / (1 + (W @ x).square()),
    "a number for all": lambda x: (W @ x) * x.sum(),
    "a power": lambda x: (W @ x) ** 3,
    "first": lambda x: W @ x.exp(),
    "a write": lambda x: (W @ x).tanh_().clone().mul_(2).exp_(),
    "a matrix of results": lambda x: (W @ torch.outer(x, x)).tanh(),
    "one result": lambda x: (W[:1] @ x).tanh(),
    "shared slopes": lambda x: (W @ x).tanh() * torch.arange(4),
    "of itself": lambda x: (W[:, :4] @ (W @ x).tanh()).tanh(),
}


def rows_by_loop(f):
    """Return the Jacobian, a row after the other by torch.autograd."""

    def jacobian_by_loop(x):
        x = x.clone().requires_grad_()
        y = f(x)
        rows = [torch.autograd.grad(y_i, x, retain_graph=True)[0] for y_i in y.flatten()]
        return torch.stack(rows).view(*y.shape, *x.shape)

    return jacobian_by_loop


@pytest.mark.parametrize("size", [None, 1, 2, 3])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_jacobians_are_those_of_the_loop(name, size):
    f = FUNCTIONS[name]
    want = rows_by_loop(f)(X)
    for transform in (jacrev, jacfwd, jacobian):
        torch.testing.assert_close(transform(f, chunk_size=size)(X), want)
    recorded = jit(jacrev(f, chunk_size=size))
    for _ in range(3):
        torch.testing.assert_close(recorded(X), want)
    torch.testing.assert_close(recorded(2 * X), rows_by_loop(f)(2 * X))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_their_derivatives_are_those_of_forward_mode(name):
    f = FUNCTIONS[name]
    want = jacfwd(jacfwd(f))(X)
    torch.testing.assert_close(jacrev(jacrev(f))(X), want)
    torch.testing.assert_close(jacfwd(jacrev(f))(X), want)
    torch.testing.assert_close(hessian(f)(X), want)
    scalar = grad(lambda x: jacrev(f)(x).square().sum())(X)
    torch.testing.assert_close(scalar, grad(lambda x: jacfwd(f)(x).square().sum())(X))
    x = X.clone().requires_grad_()
    jacrev(f)(x).square().sum().backward()
    torch.testing.assert_close(x.grad, scalar)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_many_jacobians_are_those_of_the_loop(name):
    f, xs = FUNCTIONS[name], torch.stack([X, X.cos(), -X])
    torch.testing.assert_close(vmap(jacrev(f))(xs), torch.stack([rows_by_loop(f)(x) for x in xs]))


@pytest.mark.parametrize("size", [None, 2])
def test_complex_jacobians(size):
    w = W.to(torch.cdouble) + 0.5j * W.cos()
    x = X.to(torch.cdouble) * (1 + 0.3j)

    def f(x):
        return (w[:, :4] @ (w[:, :4].T @ (w @ x).tanh()).sin()) * (2 - 1j)

    found = jacrev(f, holomorphic=True, chunk_size=size)(x)
    columns = [(f(x + 1e-6 * e) - f(x - 1e-6 * e)) / 2e-6 for e in torch.eye(5, dtype=x.dtype)]
    torch.testing.assert_close(found, torch.stack(columns, 1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found, jacfwd(f, holomorphic=True)(x))
    assert find_diagonal(make_identity(3, torch.cdouble, CPU).conj()) is None


def test_a_product_with_diagonal_cotangents_multiplies_no_zeros():
    """An inf in one row of the matrix stays in that row of the Jacobian."""
    w = torch.tensor([[1.0, 2.0], [float("inf"), 1.0]])
    found = jacrev(lambda x: (w @ x).tanh())(torch.tensor([0.5, -0.5]))
    assert found[0].isfinite().all()


def test_the_slopes_of_cotangents_are_one_vector():
    """The Jacobian of a net of n results has one product of matrices fewer than layers."""
    products = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.mm.default:
                products.append(tuple(args[0].shape))
            return func(*args, **(kwargs or {}))

    with Count():
        jacrev(FUNCTIONS["a net"])(X)
    assert products == [(3, 4)]
