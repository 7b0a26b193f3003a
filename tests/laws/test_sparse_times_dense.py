"""A sparse matrix that all examples share, times a dense one of each example."""

import pytest
import torch

from forall import vjp, vmap


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("how", ["sum", "mean", "amax", "amin"])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_reduced_product_and_its_pull_back_are_the_loops(how, axis):
    torch.manual_seed(0)
    a = torch.randn(4, 5, dtype=torch.float64).relu().to_sparse_csr()
    b = torch.randn(3, 5, 2, dtype=torch.float64)
    c = torch.randn(3, 4, 2, dtype=torch.float64)

    def pulled(b, c):
        y, pull = vjp(lambda b: torch.sparse.mm(a, b, how), b)
        return y, *pull(c)

    found = vmap(pulled, in_dims=(axis, 0))(b.movedim(0, axis), c)
    truth = []
    for x, cot in zip(b, c, strict=True):
        x = x.clone().requires_grad_()
        y = torch.sparse.mm(a, x, how)
        truth.append((y.detach(), *torch.autograd.grad(y, x, cot)))
    for mine, theirs in zip(found, zip(*truth, strict=True), strict=True):
        torch.testing.assert_close(mine, torch.stack(theirs))
