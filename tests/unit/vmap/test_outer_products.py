"""Products of a column and a row: by whichever operator, what the loop gives, and refuses."""

import pytest
import torch

from forall import vmap


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("shape", [(1, 1), (3, 4), (30, 40), (5, 33), (300, 3), (70, 90)])
def test_each_product_is_the_loops(shape, dtype):
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randn(5, *s, generator=g) for s in ((shape[0], 1), (1, shape[1])))
    for t in (x, y):
        t[torch.rand(t.shape, generator=g) < 0.2] = 0
        if dtype != torch.bfloat16:  # some of whose kernels make nan of 1 * inf
            t[torch.rand(t.shape, generator=g) < 0.1] = torch.inf
    x, y = x.to(dtype), y.to(dtype)
    found, wanted = vmap(torch.mm)(x, y), torch.stack([*map(torch.mm, x, y)])
    assert found.is_contiguous()
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.float64), (torch.int64, torch.float32), (torch.bool,) * 2]
)
def test_what_the_loop_refuses_is_refused(dtypes):
    x, y = torch.ones(5, 3, 1, dtype=dtypes[0]), torch.ones(5, 1, 4, dtype=dtypes[1])
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.mm(x[0], y[0])
    with pytest.raises((RuntimeError, NotImplementedError)):
        vmap(torch.mm)(x, y)
