"""What happens where the device's memory does not suffice."""

import pytest
import torch

from device import fakedev
from forall import jacrev, vmap
from forall._compat.storage import is_out_of_memory

D = fakedev.NAME
XS = torch.arange(64.0, device=D)


def large(x):
    return (x * torch.ones(1000, device=D)).exp().sin().sum()


def test_chunks_become_smaller_and_the_cache_is_emptied():
    wanted = torch.stack([large(x) for x in XS])
    before = fakedev.emptied()
    with fakedev.limited(100_000):
        found = vmap(large, chunk_size="auto")(XS)
    torch.testing.assert_close(found, wanted)
    assert fakedev.emptied() > before


def test_rows_of_a_jacobian_become_fewer():
    f = lambda x: (x[:, None] * torch.ones(100, device=D)).sin().sum(1)  # noqa: E731
    wanted = jacrev(f)(XS)
    with fakedev.limited(400_000):
        torch.testing.assert_close(jacrev(f, chunk_size="auto")(XS), wanted)


def test_without_chunks_it_is_an_error():
    with fakedev.limited(100_000), pytest.raises(torch.OutOfMemoryError, match="fakedev"):
        vmap(large)(XS)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("MPS backend out of memory (MPS allocated: 1.00 GB)"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    ],
)
def test_each_backend_says_it_in_its_own_words(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error", [RuntimeError("a size does not fit"), ValueError("out of memory")]
)
def test_other_errors_are_other_errors(error):
    assert not is_out_of_memory(error)
