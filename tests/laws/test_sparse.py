"""Sparse and quantised tensors, captured or mapped, where the loop works."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

import forall
from draws import make_generator
from forall import PerformanceWarning
from oracle import difference

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CS[RC] tensor support:UserWarning")

B = 3
LAYOUTS = {
    "coo": Tensor.to_sparse,
    "csr": Tensor.to_sparse_csr,
    "csc": Tensor.to_sparse_csc,
}
LAYOUT = pytest.mark.parametrize("layout", LAYOUTS)

# Of a sparse (4, 5) and an example (5,).
PRODUCTS = {
    "@": lambda s, x: s @ x,
    "mv": torch.mv,
    "mm": lambda s, x: torch.mm(s, x.outer(x)),
    "sparse.mm": lambda s, x: torch.sparse.mm(s, x[:, None]),
    "sparse.addmm": lambda s, x: torch.sparse.addmm(x.expand(4, 5), s, x.outer(x), beta=2, alpha=3),
    "from the right": lambda s, x: x @ s.t(),
    "to_dense": lambda s, x: s.to_dense() * x,
    "scaled, to_dense": lambda s, x: (s * 2).to_dense() @ x,
}


def matrix(layout: str) -> Tensor:
    dense = torch.randn(4, 5, generator=make_generator(0), dtype=torch.float64)
    return LAYOUTS[layout](dense * (dense > -0.5))


def examples() -> Tensor:
    return torch.randn(B, 5, generator=make_generator(1), dtype=torch.float64)


@pytest.mark.parametrize("name", PRODUCTS)
@LAYOUT
def test_a_sparse_matrix_that_is_captured(layout, name):
    s, xs, f = matrix(layout), examples(), PRODUCTS[name]
    truth = torch.stack([f(s, x) for x in xs])
    assert difference(forall.vmap(lambda x: f(s, x))(xs), truth) is None
    assert difference(forall.vmap(f, in_dims=(None, 1))(s, xs.mT), truth) is None
    assert difference(forall.vmap(forall.vmap(lambda x: f(s, x)))(xs[None]), truth[None]) is None


@pytest.mark.parametrize("name", PRODUCTS)
@LAYOUT
def test_its_product_has_derivatives(layout, name):
    s, xs, f = matrix(layout), examples(), PRODUCTS[name]
    dense = s.to_dense()
    jacobian = torch.autograd.functional.jacobian(lambda x: PRODUCTS[name](dense, x), xs[0])
    for found in (forall.jacrev, forall.jacfwd):
        assert difference(found(lambda x: f(s, x))(xs[0]), jacobian) is None
    assert difference(forall.vmap(forall.jacrev(lambda x: f(s, x)))(xs)[0], jacobian) is None
    along = forall.jvp(lambda x: f(s, x), (xs[0],), (xs[1],))[1]
    assert difference(along, jacobian @ xs[1]) is None
    push = forall.linearize(lambda x: f(s, x), xs[0])[1]
    assert difference(push(xs[1]), along) is None
    assert difference(forall.vmap(push)(xs), torch.stack([jacobian @ x for x in xs])) is None


def test_a_sparse_result_that_all_examples_share_is_given_as_it_is():
    for layout in LAYOUTS:
        s = matrix(layout)
        out = forall.vmap(lambda x, s=s: s * 2, out_dims=None)(examples())
        assert out.layout == s.layout
        assert torch.equal(out.to_dense(), 2 * s.to_dense())


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_a_sparse_stack_is_mapped(layout):
    s = matrix("coo").to_dense()
    dense = torch.stack([s, 2 * s, -s])
    stack, x = LAYOUTS[layout](dense), examples()[0]
    assert torch.equal(forall.vmap(Tensor.to_dense)(stack), dense)
    with pytest.warns(PerformanceWarning):
        assert difference(forall.vmap(lambda s: s @ x)(stack), dense @ x) is None
    with pytest.warns(PerformanceWarning):
        out = forall.vmap(lambda s: torch.sparse.mm(s, x[:, None]))(stack)
    assert difference(out, dense @ x[:, None]) is None
    assert torch.equal(forall.vmap(lambda s: s * 2)(stack).to_dense(), 2 * dense)


def test_examples_part_with_sparse_values_and_meet_again():
    s = matrix("coo")

    def f(x):
        if x[0] > 0:
            m = s
        elif x[1] > 0:
            m = torch.outer(x[:4], x).to_sparse()
        else:
            m = s * 2
        return m

    def two(x):
        m = torch.outer(x[:4], x).to_sparse()
        if x[0] > 0:
            m = m * 2
        return m

    xs = examples()
    xs[:, :2] = torch.tensor([[1.0, 1.0], [-1.0, 1.0], [-1.0, -1.0]])
    with warnings.catch_warnings():
        warnings.simplefilter("error", PerformanceWarning)  # all in one run
        for g in (f, two):
            truth = torch.stack([g(x).to_dense() for x in xs])
            assert torch.equal(forall.vmap(g)(xs).to_dense(), truth)
            assert torch.equal(forall.vmap(lambda x, g=g: g(x).to_dense())(xs), truth)
            twice = forall.vmap(forall.vmap(lambda x, g=g: g(x).to_dense()))(xs[None])
            assert torch.equal(twice, truth[None])


SUMS = {
    "all": Tensor.sum,
    "all, sparse.sum": torch.sparse.sum,
    "all, in a dtype": lambda s: torch.sparse.sum(s, dtype=torch.float32),
    "the only dim": lambda s: s[0].sum(0),
    "a dim": lambda s: torch.sparse.sum(s, dim=1).to_dense(),
}


@pytest.mark.filterwarnings("ignore::forall.PerformanceWarning")
@pytest.mark.parametrize("name", SUMS)
def test_a_sum_of_a_sparse_example(name):
    """Examples have different numbers of entries; a sum of all of them is dense."""
    s = matrix("coo").to_dense()
    dense = torch.stack([s, s.clamp_min(0), s.clamp_max(0)])
    truth = torch.stack([SUMS[name](x.to_sparse()) for x in dense])
    assert difference(forall.vmap(SUMS[name])(dense.to_sparse()), truth) is None
    twice = torch.stack([dense, 2 * dense])
    found = forall.vmap(forall.vmap(SUMS[name]))(twice.to_sparse())
    assert difference(found, torch.stack([truth, 2 * truth])) is None


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_values_of_each_example_in_places_that_all_share():
    where, values = torch.tensor([[0, 1], [1, 2]]), examples()[:, :2]
    made = lambda v: torch.sparse_coo_tensor(where, v, (2, 3)) @ torch.ones(3).double()  # noqa: E731
    with pytest.warns(PerformanceWarning):
        found = forall.vmap(made)(values)
    assert difference(found, torch.stack([made(v) for v in values])) is None


def test_compressed_rows_of_each_example_cannot_be_stacked():
    with pytest.raises(NotImplementedError, match=r"layout torch.sparse_csr have no stack"):
        forall.vmap(lambda x: x.outer(x).to_sparse_csr())(examples())


WHERE = torch.tensor([[0, 1], [1, 0]])
FIRST = torch.tensor([0, 1])
TOLD = {
    "captured": lambda x: torch.sparse_coo_tensor(WHERE, torch.ones(2).double()),
    "made inside": lambda x: torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 0]]), x),
    "a list": lambda x: torch.sparse_coo_tensor([[0, 1], [1, 0]], x),
    "lists": lambda x: torch.sparse_coo_tensor([[0, 1], [1, 0]], [1.0, 2.0], dtype=x.dtype),
    "by name": lambda x: torch.sparse_coo_tensor(indices=WHERE, values=x),
    "with a dense dim": lambda x: torch.sparse_coo_tensor(WHERE[:1], x.outer(x)),
    "no entries": lambda x: torch.sparse_coo_tensor(WHERE[:, :0], x[:0], (2, 2)),
    "other places": lambda x: torch.sparse_coo_tensor(torch.stack([FIRST, x.argsort()]), x),
    "checked": lambda x: torch.sparse_coo_tensor(WHERE, x, (2, 2), check_invariants=True),
    "other sizes": lambda x: torch.sparse_coo_tensor(x.argsort()[:1][None], x[:1]).sum() * x.diag(),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.filterwarnings("ignore::forall.PerformanceWarning")
@pytest.mark.parametrize("name", TOLD)
def test_a_size_that_the_places_tell(name):
    def f(x):
        return TOLD[name](x).to_dense() @ x

    def slope(x):
        return forall.grad(lambda x: f(x).sum())(x)

    xs = examples()[:, :2]
    assert len(set(xs.argsort().flatten().tolist())) == 2
    truth, slopes = (torch.stack([g(x) for x in xs]) for g in (f, slope))
    assert difference(forall.vmap(f)(xs), truth) is None
    assert difference(forall.vmap(slope)(xs), slopes) is None
    assert difference(forall.vmap(forall.vmap(f))(xs[None]), truth[None]) is None


@pytest.mark.parametrize("shift", [-1, 1])
def test_places_that_are_not_there(shift):
    def f(x):
        size = [(2, 2)] if shift > 0 else []
        return torch.sparse_coo_tensor(WHERE + shift, x, *size, check_invariants=True).to_dense()

    with pytest.raises(RuntimeError) as expected:
        f(examples()[0, :2])
    with pytest.raises(RuntimeError) as found:
        forall.vmap(f)(examples()[:, :2])
    assert str(found.value).startswith(str(expected.value))


PLACES = torch.tensor([0, 1, 2]), torch.tensor([1, 0])
COMPRESSED = {
    "csr": lambda v: torch.sparse_csr_tensor(*PLACES, v, (2, 2)),
    "csr, size told": lambda v: torch.sparse_csr_tensor(*PLACES, v),
    "csc": lambda v: torch.sparse_csc_tensor(*PLACES, v, (2, 2)),
    "bsr": lambda v: torch.sparse_bsr_tensor(*PLACES, v.reshape(2, 1, 1), (2, 2)),
    "bsc": lambda v: torch.sparse_bsc_tensor(*PLACES, v.reshape(2, 1, 1), (2, 2)),
    "csr, by layout": lambda v: torch.sparse_compressed_tensor(
        *PLACES, v, (2, 2), layout=torch.sparse_csr
    ),
}


@pytest.mark.parametrize("name", COMPRESSED)
def test_values_of_each_example_are_not_put_in_compressed_places(name):
    make, vs = COMPRESSED[name], examples()[:, :2]
    for f in (lambda v: make(v).to_dense(), lambda v: (make(v) * 2).to_dense(), make):
        with pytest.raises(NotImplementedError, match=r"layout torch.sparse_\w+ have no stack"):
            forall.vmap(f)(vs)
        with pytest.raises(NotImplementedError, match="no tangent of a sparse tensor"):
            forall.jvp(f, (vs[0],), (vs[1],))
        with pytest.raises(NotImplementedError, match="no tangent of a sparse tensor"):
            forall.linearize(f, vs[0])


@pytest.mark.parametrize("name", ["csr", "csc", "coo"])
def test_values_that_do_not_move_are_put_in_places_inside(name):
    coo = lambda v: torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 0]]), v, (2, 2))  # noqa: E731
    make = {**COMPRESSED, "coo": coo}[name]
    vs = examples()[:, :2]
    dense = make(torch.ones(2, dtype=vs.dtype)).to_dense()

    def f(v):
        return make(torch.ones(2, dtype=v.dtype)) @ v.sin()

    for x in vs:
        assert difference(f(x), dense @ x.sin()) is None
        assert difference(forall.jacfwd(f)(x), dense @ x.cos().diag()) is None
        assert difference(forall.jacrev(f)(x), dense @ x.cos().diag()) is None
    each = torch.stack([dense @ x.cos().diag() for x in vs])
    assert difference(forall.vmap(f)(vs), vs.sin() @ dense.mT) is None
    assert difference(forall.vmap(forall.jacrev(f))(vs), each) is None
    assert difference(forall.vmap(forall.jacfwd(f))(vs), each) is None
    _, tangents = forall.jvp(forall.vmap(f), (vs,), (vs.exp(),))
    assert difference(tangents, (vs.cos() * vs.exp()) @ dense.mT) is None


# --- quantised ----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_quantised_tensors_are_the_loop():
    xs = examples().float()
    found = forall.vmap(lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize())(
        xs
    )
    whole = torch.quantize_per_tensor(xs, 0.1, 0, torch.qint8)
    assert torch.equal(found, whole.dequantize())
    assert torch.equal(forall.vmap(lambda x: whole.dequantize()[0] + x)(xs), found[0] + xs)
